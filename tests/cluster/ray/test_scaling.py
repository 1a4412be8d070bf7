"""Pools that change their size while streams run: told to, and by themselves.

The shared application gets other sizes in place, as ``serve deploy`` of a changed file does, and its own again.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.cluster.ray.conftest import ON_RAY, START_S, until
from tests.cluster.ray.test_app import collect, leases, plain, request, stub_of
from tests.cluster.ray.test_failures import NUM_TOKENS, PROMPTS, SLACK_S, Traffic, pids
from tests.support.loops import finish

from paceline.cli.status import report
from paceline.client import AsyncClient

pytestmark = [*ON_RAY, pytest.mark.nightly]

KINDS = ("target", "draft", "router")


@pytest.fixture(scope="module")
def expected(pair):
    return dict(zip(PROMPTS, plain(pair, PROMPTS, NUM_TOKENS), strict=True))


def sized(app, external=False, **pools):
    """Deploys the application with other options of these pools' deployments; returns at once."""
    from ray import serve

    from paceline.cluster.app import APPLICATION, build

    config = dict(app.config)
    for kind, options in pools.items():
        part = config[f"{kind}_config"]
        deployment = {name: value for name, value in part["deployment_config"].items() if name != "num_replicas"}
        config[f"{kind}_config"] = part | {"deployment_config": deployment | options}
    serve.run_many(
        [serve.RunTarget(build(config), name=APPLICATION, route_prefix="/", external_scaler_enabled=external)],
        wait_for_applications_running=False,
    )


async def runs(app, timeout_s=START_S, **counts):
    """Waits until so many replicas of each kind run, none is on its way, and all routers are linked to all of them."""
    names = {"target": app.TARGET, "draft": app.DRAFT, "router": "Router"}

    async def done():
        for kind, count in counts.items():
            if await app.states(names[kind]) != ({"RUNNING": count} if count else {}):
                return False
        seen = await app.ask("Router", "statuses")
        engines = {kind: count for kind, count in counts.items() if kind != "router"}
        return all(len(one.get(kind, [])) == count for one in seen for kind, count in engines.items())

    await until(done, timeout_s, f"the pools have {counts}")


@pytest.fixture
def restored(app):
    """Afterwards the application is as it was."""
    yield app

    async def restore():
        await asyncio.to_thread(sized, app, True, **{kind: {"num_replicas": 1} for kind in ("target", "draft")})
        await runs(app, target=1, draft=1)

    finish(restore())


async def test_sizes_change_in_place_while_streams_run(restored, expected):
    app = restored
    before = {kind: await pids(app, kind) for kind in KINDS}
    async with Traffic(app, expected) as traffic:
        await asyncio.to_thread(sized, app, True, target={"num_replicas": 2}, draft={"num_replicas": 2})
        await runs(app, target=2, draft=2)
        more = {kind: await pids(app, kind) for kind in KINDS}
        # bounds instead of a number: the pool stays, and is cut to its new most
        bounds = {"min_replicas": 1, "max_replicas": 1}
        await asyncio.to_thread(sized, app, target={"autoscaling_config": bounds}, draft={"num_replicas": 1})
        await runs(app, target=1, draft=1)
    print(f"sizes changed in place: {traffic.num_streams} streams, longest gap {traffic.longest_s:.3f} s")
    assert all(before[kind] < more[kind] for kind in ("target", "draft")), "nobody was replaced"
    assert before["router"] == more["router"]
    assert traffic.num_streams > 2
    assert traffic.longest_s < START_S / 30 + SLACK_S


class Load:
    """Sessions of one mode, each followed by the next."""

    def __init__(self, app, mode, count):
        self._app, self._mode, self._count = app, mode, count

    async def __aenter__(self):
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(self._count)]

    async def __aexit__(self, *_):
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result

    async def _run(self, number):
        async with stub_of(self._app) as stub:
            while True:
                await collect(stub.Generate(request(PROMPTS[number % 2], NUM_TOKENS, mode=self._mode)))


async def test_pools_size_themselves_apart(restored):
    """Plain sessions raise the targets alone, speculating ones wake the drafts alone; both go back."""
    app = restored
    pace = {"upscale_delay_s": 2.0, "downscale_delay_s": 6.0}
    targets = pace | {"min_replicas": 1, "max_replicas": 2, "policy": {"occupancy": 0.1}}  # 2.4 sessions
    drafts = pace | {"min_replicas": 0, "max_replicas": 2}

    async def scaling():
        async with AsyncClient(app.address) as client:
            info = await client.server_info()
        return {pool.name: pool for pool in info.scaling}, info

    await asyncio.to_thread(sized, app, target={"autoscaling_config": targets}, draft={"autoscaling_config": drafts})
    await runs(app, target=1, draft=0)

    async def only():
        found = await pids(app, "target")  # those that have just ended are heard of for a while
        return found if len(found) == 1 else None

    known = await until(only, 30, "one target reports")
    async with Load(app, "plain", 4):
        await runs(app, target=2, draft=0)
        pools, info = await scaling()
        assert (pools["target"].wanted, pools["draft"].wanted) == (2, 0)
        assert pools["target"].reason.endswith("2.4 are enough for a target")
        assert any(line.startswith("target: changed") for line in report(info))
    assert known < await pids(app, "target")
    await runs(app, target=1, draft=0)
    async with Load(app, "overlapped", 1):
        await runs(app, target=1, draft=1)
        async with stub_of(app) as stub:

            async def accepted():
                _, _, complete = await collect(stub.Generate(request(PROMPTS[0], 40)))
                return complete.speculation.accepted > 0

            await until(accepted, 30, "it speculates with the draft that came")
        pools, _ = await scaling()
        assert (pools["target"].wanted, pools["draft"].wanted) == (1, 1)
        assert pools["draft"].reason.endswith("sessions may have a draft")
    await runs(app, target=1, draft=0)
    pools, _ = await scaling()
    assert pools["draft"].reason == "no session speculates"
    assert await leases(app, app.TARGET) == 0
