"""Leaving the cluster: what Ray is asked, and when the wait is over."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.cluster import drain as drain_module
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


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def run(timeout_s=60.0, nodes=None, **options):
    clock = Clock()
    cluster = FakeCluster(*(nodes or (Node("a", "10.0.0.1"), Node("b", "10.0.0.2"))), clock=clock, **options)
    out = drain(cluster, "10.0.0.2", timeout_s, clock=clock, sleep=clock.sleep)
    return out, cluster, clock.now - 1000.0


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


def test_the_command_refuses_a_time_out_that_is_none(capsys):
    with pytest.raises(SystemExit) as ended:
        drain_module.main(["--timeout-s", "0"])
    assert ended.value.code == 2
    assert "--timeout-s is 0: it must be more than 0" in capsys.readouterr().err


def test_without_ray_there_is_nothing_to_drain(monkeypatch):
    def missing(address):
        raise ConnectionError("no Ray here")

    monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address_or_die", missing)
    assert drain_module.main(["--timeout-s", "5"]) == 0
