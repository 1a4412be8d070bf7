"""Tensor-parallel targets in the real application: every rank a Ray actor in its replica's placement group.

The same sixty-four requests as for whole targets, against the same oracle; then ranks are killed and stopped under
traffic, which must not notice but by a pause.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from tests.cluster.ray.conftest import ON_RAY, config_for, until
from tests.cluster.ray.test_failures import Traffic, deploy, expected, pids, replaced, report, settled, stopped
from tests.cluster.ray.test_lossless import check_lossless
from tests.support.loops import finish

pytestmark = [*ON_RAY, pytest.mark.nightly]

RANK_TIMEOUT_S, RECOVERY_S, TARGET_TIMEOUT_S = 6.0, 20.0, 5.0
__all__ = ["expected"]  # a fixture


def sharded(app, degree, num_replicas=1, draft_degree=1):
    """The configuration of the application with targets and drafts of so many ranks."""
    config = config_for(app.pair) | {"server": app.config["server"]}
    target, router = config["target_config"], config["router_config"]
    engine = target["engine_kwargs"] | {"tensor_parallel_size": degree, "rank_timeout_s": RANK_TIMEOUT_S}
    bundles = {"placement_group_config": {"bundles": [{"CPU": 0.1}] * degree}}
    deployment = target["deployment_config"] | {"num_replicas": num_replicas}
    config["target_config"] = target | bundles | {"engine_kwargs": engine, "deployment_config": deployment}
    config["router_config"] = router | {"recovery_timeout_s": RECOVERY_S, "target_timeout_s": TARGET_TIMEOUT_S}
    config["draft_config"] = draft = dict(config["draft_config"])
    draft["engine_kwargs"] = draft["engine_kwargs"] | {"tensor_parallel_size": draft_degree}
    draft["placement_group_config"] = {"bundles": [{"CPU": 0.1}] * draft_degree}
    return config


def bring(app, config, num_replicas):
    """A rolling update."""
    from paceline.cluster.app import build

    async def update():
        await asyncio.to_thread(deploy, build(config))
        await asyncio.sleep(1)
        await settled(app, target=num_replicas)

    finish(update())


@pytest.fixture(scope="module")
def restored(app):
    yield app
    bring(app, app.config, 1)


def rank_pids():
    """Processes of this cluster's ranks that are not a first one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(b"ray::Rank"):
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize(("degree", "draft_degree"), [(2, 2), (4, 1)])
def test_the_service_is_lossless_at_every_degree(degree, draft_degree, restored):
    bring(restored, sharded(restored, degree, draft_degree=draft_degree), 1)
    num_actors = degree - 1 + draft_degree - 1
    assert len(rank_pids()) == num_actors, "each rank is an actor; those of former replicas have ended"
    check_lossless(restored)


async def test_a_lost_rank_costs_a_pause_and_nothing_else(restored, expected):
    """One is killed, one hangs, one replica's first rank is killed: each time another replica takes over."""
    app = restored
    bring(app, sharded(app, 2, num_replicas=2), 2)
    first = set(rank_pids())
    assert len(first) == 2
    for harm in ("kill a rank", "stop a rank", "kill a first rank"):
        before = set(rank_pids())
        targets = await pids(app, "target")
        async with Traffic(app, expected) as traffic:
            started = time.monotonic()
            if harm == "kill a first rank":
                lost = next(iter(targets))
                os.kill(lost, signal.SIGKILL)
                await replaced(app, "target", lost, 90)
            else:
                rank = next(iter(before))
                if harm == "kill a rank":
                    os.kill(rank, signal.SIGKILL)
                else:
                    with stopped(rank):
                        await until(lambda rank=rank: rank not in rank_pids(), 60, "the hung rank is gone")
                await until(lambda before=before: len(set(rank_pids()) - before) == 1, 90, "a new rank")
            await settled(app, target=2)
            took = time.monotonic() - started
        report(f"{harm}: {took:.1f} s until all is as before", traffic)
        assert len(rank_pids()) == 2
        assert traffic.longest_s < TARGET_TIMEOUT_S + RECOVERY_S
