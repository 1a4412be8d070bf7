"""What clients are told of the fleet: no process id, no node, no path."""

from paceline.fleet.public import public
from paceline.rpc.generation import server_info_to_proto
from paceline.types import ReplicaStatus, ServerInfo, Startup

DOING = "loading target /srv/models/big: dtype float32; compile cache: /root/.cache/x"


def info(**changes):
    pools = {
        "target": tuple(ReplicaStatus(f"t{i}", "target", 1, 3, 1, 4, pid=4242, node=node, model="org/big")
                        for i, node in enumerate(("10.1.2.3", "10.1.2.3", "10.1.2.4")))
    }  # fmt: skip
    starting = (Startup("d2", "draft", "10.1.2.4", DOING, 4.4),)
    return ServerInfo("1", 1.0, pools, 3, 2, 0.5, 2.0, 0.5, starting=starting)


def test_neither_process_nor_node_nor_path_is_told():
    told = str(server_info_to_proto(public(info(), "secret")))
    for word in ("4242", "10.1.2", "/srv", "/root", ".cache", "pid"):
        assert word not in told
    assert "4242" in str(server_info_to_proto(info()))


def test_what_clients_need_stays():
    told = public(info(), "secret")
    assert [(s.replica_id, s.num_sessions, s.max_sessions, s.model) for s in told.pools["target"]] == [
        (f"t{i}", 3, 4, "org/big") for i in range(3)
    ]
    assert told.starting[0].doing == "loading target ...: dtype float32; compile cache: ..."


def test_a_name_says_who_shares_a_node_and_only_the_secret_tells_which():
    first, second, third = (status.node for status in public(info(), "secret").pools["target"])
    assert first == second != third
    assert third == public(info(), "secret").starting[0].node
    assert first != public(info(), "another").pools["target"][0].node
    nameless = ServerInfo("1", 1.0, {"draft": (ReplicaStatus("d", "draft", 1, 0, 0, 1),)}, 0, 0, 0.0, 1.0, 0.0)
    assert public(nameless, "secret").pools["draft"][0].node == ""
