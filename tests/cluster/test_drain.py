"""Leaving the cluster: what Ray is asked, and when the wait is over."""

import inspect
import os
import time
from types import SimpleNamespace

import pytest
from tests.support.fakes import Clock

from paceline.cluster import drain as drain_module
from paceline.cluster import local_streams
from paceline.cluster.drain import drain

pytest.importorskip("ray", reason="the states and reasons are Ray's")

ALIVE, DEAD = 0, 1


class Node:
    def __init__(self, name, address, state=ALIVE):
        self.name = name
        self.info = SimpleNamespace(node_manager_address=address, state=state)

    def hex(self):
        return self.name


class FakeCluster:
    """Answers as Ray's control store; a drained node leaves after ``lasts_s``."""

    def __init__(self, *nodes, clock, lasts_s=5.0, refusals=0, gone_at=None):
        self.nodes, self.clock, self.lasts_s = nodes, clock, lasts_s
        self.refusals, self.gone_at = refusals, gone_at
        self.asked = []

    def get_all_node_info(self, timeout):
        assert timeout > 0
        if self.gone_at is not None and self.clock.now >= self.gone_at:
            raise ConnectionError("nobody there")
        if self.asked and self.clock.now >= self.asked[0][0] + self.lasts_s:
            next(node for node in self.nodes if node.name == self.asked[0][1]).info.state = DEAD
        return {node: node.info for node in self.nodes}

    def drain_node(self, node_id, reason, message, deadline_ms):
        if self.refusals:
            self.refusals -= 1
            return False, "it is busy"
        self.asked.append((self.clock.now, node_id, reason, deadline_ms))
        return True, ""


def run(timeout_s=60.0, nodes=None, streams_until=0.0, wall=None, **options):
    clock = Clock(1000.0)
    cluster = FakeCluster(*(nodes or (Node("a", "10.0.0.1"), Node("b", "10.0.0.2"))), clock=clock, **options)
    streams = {"num_streams": lambda: int(clock.now < 1000.0 + streams_until), "clock": clock, "sleep": clock.sleep}
    streams["wall"] = wall or clock
    out = drain(cluster, "10.0.0.2", timeout_s, **streams)
    return out, cluster, clock.now - 1000.0


@pytest.mark.parametrize("jump_s", [6 * 3600, -6 * 3600])
def test_a_wall_clock_that_jumps_changes_no_wait(jump_s):
    walls = iter([5000.0] + [5000.0 + jump_s] * 1000)
    out, cluster, took = run(streams_until=20.0, gone_at=1003.0, wall=lambda: next(walls))
    assert cluster.asked[0][3] == 5_060_000
    assert inspect.signature(drain).parameters["clock"].default is time.monotonic
    assert out
    assert 20 <= took <= 22


def test_the_node_of_this_address_is_drained_once_with_a_deadline():
    out, cluster, took = run()
    assert out
    ((_, node, reason, deadline_ms),) = cluster.asked
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    assert node == "b"
    assert reason == DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    assert deadline_ms == 1_060_000
    assert 5 <= took <= 7


def test_a_refusal_is_no_answer():
    out, cluster, _ = run(refusals=3)
    assert out
    assert len(cluster.asked) == 1


def test_the_wait_ends_with_its_time_out():
    out, cluster, took = run(lasts_s=1e9)
    assert not out
    assert len(cluster.asked) == 1
    assert 60 <= took <= 61


def test_a_node_that_has_left_or_never_joined_has_nothing_to_drain():
    out, cluster, took = run(nodes=(Node("a", "10.0.0.1"), Node("b", "10.0.0.2", DEAD)))
    assert (out, cluster.asked, took) == (True, [], 0.0)
    out, cluster, took = run(nodes=(Node("a", "10.0.0.1"),))
    assert (out, cluster.asked, took) == (True, [], 0.0)


def test_a_cluster_that_is_gone_is_waited_for_only_a_while():
    out, _, took = run(lasts_s=1e9, gone_at=1010.0)
    assert out
    assert 10 + 15 <= took <= 10 + 18


def test_streams_that_run_here_are_waited_for_though_the_cluster_is_silent():
    """The head stops at once when a cluster is deleted; the streams of its routers do not."""
    out, _, took = run(lasts_s=1e9, gone_at=1000.0, streams_until=40.0)
    assert out
    assert 40 <= took <= 42
    out, _, took = run(lasts_s=1e9, gone_at=1000.0, streams_until=1e9)
    assert not out
    assert took >= 60
    out, _, took = run(nodes=(Node("a", "10.0.0.1"),), streams_until=7.0)
    assert (out, took) == (True, 7.0)


def test_streams_of_a_node_that_still_drains_are_left_to_the_cluster():
    out, _, took = run(lasts_s=5.0, streams_until=5.0)
    assert out
    assert 5 <= took <= 7


def test_without_a_cluster_only_streams_are_waited_for():
    clock = Clock(1000.0)
    assert drain(None, "here", 60.0, num_streams=lambda: clock.now < 1012.0, clock=clock, sleep=clock.sleep)
    assert 12 <= clock.now - 1000.0 <= 13


def test_streams_are_counted_over_the_processes_of_this_machine_that_live(tmp_path, monkeypatch):
    folder = tmp_path / "streams"
    assert local_streams.count(folder) == 0
    for pid, num_streams in ((11, 2), (12, 3), (13, 4)):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        local_streams.note(num_streams, folder)
    assert local_streams.count(folder) == 9
    for at_s in (0, time.time() + 6 * 3600):  # killed: nobody writes it any more, and the clock was set back meanwhile
        os.utime(folder / "12", (at_s, at_s))
        assert local_streams.count(folder) == 6
    local_streams.note(0, folder)
    assert local_streams.count(folder) == 2
    (folder / "14").write_text("")
    assert local_streams.count(folder) == 2
    local_streams.note(1, folder / "11" / "no-folder")


def deadline_of(monkeypatch, *arguments):
    seen = []
    monkeypatch.setattr(drain_module, "drain", lambda cluster, address, timeout_s: seen.append(timeout_s) or True)
    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address_or_die", _missing)
    assert drain_module.main(list(arguments)) == 0
    return seen[0]


def _missing(address):
    raise ConnectionError("no Ray here")


def test_the_deadline_leaves_a_successor_time_to_start(monkeypatch):
    """Serve stops a replica ``graceful_shutdown_timeout_s`` before the deadline, whatever its successor does."""
    assert deadline_of(monkeypatch) == 600 + 900
    assert deadline_of(monkeypatch, "--graceful-s", "1830") == 1830 + 900
    assert deadline_of(monkeypatch, "--graceful-s", "1830", "--cold-start-s", "60") == 1890
    assert deadline_of(monkeypatch, "--timeout-s", "2760") == 2760


@pytest.mark.parametrize("flag", ["--graceful-s", "--cold-start-s"])
def test_a_time_below_zero_is_refused(flag, capsys):
    with pytest.raises(SystemExit):
        drain_module.main([flag, "-1"])
    assert f"{flag} is -1: it must be at least 0" in capsys.readouterr().err


def test_the_command_refuses_a_time_out_that_is_none(capsys):
    with pytest.raises(SystemExit) as ended:
        drain_module.main(["--timeout-s", "0"])
    assert ended.value.code == 2
    assert "--timeout-s is 0: it must be more than 0" in capsys.readouterr().err


def test_without_ray_there_is_nothing_to_drain(monkeypatch):
    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address_or_die", _missing)
    assert drain_module.main(["--timeout-s", "5"]) == 0
