"""A Ray whose node is not up in time is started again, and of the attempts that failed nothing is left."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray._private import node

from paceline.cluster.first_node import start_ray

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


class Node:
    """Stands for Ray's, whose constructor starts processes and raises if they are not up."""

    errors: list[str]
    started: list[Node]

    def __init__(self) -> None:
        self.ended = False
        self.started.append(self)
        if self.errors:
            raise Exception(self.errors.pop(0))

    def kill_all_processes(self, check_alive: bool = True, allow_graceful: bool = False) -> None:
        assert not check_alive, "some may have ended by themselves"
        self.ended = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    """The nodes that were started."""

    def init(**options: Any) -> dict[str, Any]:
        Node()
        return options

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(node, "Node", Node)
    Node.started = []
    return Node.started


def test_a_node_that_was_too_slow_is_started_again(started: list[Node], caplog: pytest.LogCaptureFixture) -> None:
    Node.errors = [SLOW, SLOW]
    assert start_ray(num_cpus=1) == {"address": "local", "num_cpus": 1}
    assert [each.ended for each in started] == [True, True, False]
    assert [record.levelname for record in caplog.records if record.name == "paceline.cluster.first_node"] == [
        "WARNING"
    ] * 2


@pytest.mark.parametrize(("errors", "attempts"), [([SLOW] * 4, 3), (["no such option"], 1)])
def test_what_does_not_pass_is_raised(errors: list[str], attempts: int, started: list[Node]) -> None:
    Node.errors = list(errors)
    with pytest.raises(Exception, match=errors[0]):
        start_ray()
    assert [each.ended for each in started] == [True] * attempts
