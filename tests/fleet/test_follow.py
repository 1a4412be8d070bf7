"""Serve's controller follows the newest decision of the monitor, and holds without one."""

from types import SimpleNamespace

import pytest
from ray.cloudpickle import cloudpickle

from paceline.fleet import follow
from paceline.fleet.board import BOARD
from paceline.fleet.follow import STALE_S


@pytest.fixture(autouse=True)
def empty():
    BOARD.clear()
    yield
    BOARD.clear()


def context(now=1001.0, size=4, app="a", metrics=None):
    return SimpleNamespace(raw_metrics=metrics, current_time=now, target_num_replicas=size, app_name=app)


def statistics(**replicas):
    """Of monitors: id -> (decided at, wanted by pool); an older value precedes each."""
    metrics = {}
    for rid, (at, wanted) in replicas.items():
        values = {"wanted_at": at} | {f"wanted_{pool}": size for pool, size in wanted.items()}
        for name, value in values.items():
            series = [SimpleNamespace(timestamp=0.0, value=9.0), SimpleNamespace(timestamp=1.0, value=float(value))]
            metrics.setdefault(name, {})[rid] = series
    return metrics


def posted(**replicas):
    assert follow.post(context(size=1, metrics=statistics(**replicas))) == (1, {})


def test_each_pool_follows_its_decision():
    posted(m=(1000.0, {"target": 2, "draft": 0}))
    assert follow.follow_target(context()) == (2, {})
    assert follow.follow_draft(context()) == (0, {})
    assert follow.follow_router(context(size=1)) == (1, {}), "nothing was decided about it"
    assert follow.follow_target(context(app="b")) == (4, {}), "another application"


def test_of_two_monitors_the_newest_counts():
    posted(old=(1000.0, {"target": 2}), new=(1000.9, {"target": 3}))
    assert follow.follow_target(context()) == (3, {})
    posted(old=(1001.0, {"target": 3}), new=(1001.5, {}))
    assert follow.follow_target(context()) == (4, {}), "a new one has decided nothing yet"


def test_without_a_fresh_decision_the_pool_keeps_its_size():
    assert follow.follow_target(context()) == (4, {})
    assert follow.post(context(size=1)) == (1, {})
    assert follow.post(context(size=1, metrics={"running": {"m": []}, "wanted_at": {"m": []}})) == (1, {})
    assert follow.follow_target(context()) == (4, {})
    posted(m=(1000.0, {"target": 0}))
    assert follow.follow_target(context(now=1000.0 + STALE_S)) == (0, {})
    assert follow.follow_target(context(now=1000.1 + STALE_S)) == (4, {})


def test_the_policies_share_the_board_although_serve_pickles_them_by_value():
    cloudpickle.register_pickle_by_value(follow)
    try:
        copies = [cloudpickle.loads(cloudpickle.dumps(f)) for f in (follow.post, follow.follow_draft)]
    finally:
        cloudpickle.unregister_pickle_by_value(follow)
    assert copies[0] is not follow.post
    copies[0](context(size=1, metrics=statistics(m=(1000.0, {"draft": 3}))))
    assert copies[1](context()) == (3, {})
