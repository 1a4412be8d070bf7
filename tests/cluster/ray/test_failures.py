"""What clients of the real application see when its replicas are killed, hang, crawl, break inside, or are replaced.

Traffic runs through the public port all the while; each of its streams has to give the tokens of plain decoding in
one process. The application of these tests has two targets, whose engines can be broken on demand, and impatient
routers; it comes by a rolling update of the shared one, under traffic, and goes by another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
from dataclasses import dataclass, field

import grpc
import pytest
from tests.cluster.ray.conftest import ON_RAY, START_S, config_for, letters, until
from tests.cluster.ray.test_app import assert_all_free, collect, plain, request, stub_of
from tests.support.loops import LIMIT_S, finish

from paceline.client import AsyncClient
from paceline.config import ServiceConfig

pytestmark = [*ON_RAY, pytest.mark.slow]

NUM_TOKENS = 400
PROMPTS = [letters(14), letters(31, 5)]
DRAFT_TIMEOUT_S, TARGET_TIMEOUT_S = 1.0, 5.0
RECOVERY_S = 15.0
STEP_S = 0.1
"""Generous for a plain step of the tiny target."""
SLACK_S = 60.0
"""Far longer than any pause on a busy machine: a stream that stands still for so long was lost."""
MAX_QUEUED = 3


# -- the application of these tests -----------------------------------------------------------------------------------


def breakable():
    """A target class whose engine fails on demand. Local, so that replicas need no test module to load it."""
    from paceline.cluster.replicas import Target

    class Breakable(Target):
        async def break_engine(self):
            def broken():
                raise RuntimeError("broken by a test")

            self._host._engine.engine.step = broken

    return Breakable


def application(config, versions):
    """As ``build`` does it, with breakable targets; a deployment is replaced when its version changes."""
    from paceline.cluster import app as service

    config = ServiceConfig.parse(config)
    monitor = service._deployment(
        service.MonitorReplica, config, {"ray_actor_options": {"num_cpus": 0}, "num_replicas": 1}, "Monitor", ()
    ).bind()
    targets = service.build_target_deployment(config, bind_kwargs={"monitor": monitor}, deployment_cls=breakable())
    drafts = service.build_draft_deployment(config, bind_kwargs={"monitor": monitor})
    options = config.router_config.deployment_options()
    router = service._deployment(service.IngressReplica, config, options, "Router", ()).bind(
        config, targets, drafts, monitor
    )
    parts = {"monitor": monitor, "target": targets, "draft": drafts, "router": router}
    for name, part in parts.items():
        part._bound_deployment._version = versions.get(name, "1")
    return router


def deploy(built):
    """Asks Serve for it; returns at once."""
    from ray import serve

    from paceline.cluster.app import APPLICATION

    serve.run_many(
        [serve.RunTarget(built, name=APPLICATION, route_prefix="/", external_scaler_enabled=True)],
        wait_for_applications_running=False,
    )


def changed(app):
    """The configuration of these tests."""
    config = config_for(app.pair) | {"server": app.config["server"]}
    target = config["target_config"]
    config["target_config"] = target | {"deployment_config": target["deployment_config"] | {"num_replicas": 2}}
    config["router_config"] = config["router_config"] | {
        "max_queued_requests": MAX_QUEUED,
        "recovery_timeout_s": RECOVERY_S,
        "draft_timeout_s": DRAFT_TIMEOUT_S,
        "target_timeout_s": TARGET_TIMEOUT_S,
    }
    return config


async def settled(app, **counts):
    """Every deployment runs what it should, nothing else is left, and all routers are linked to all of it."""
    from ray import serve

    async def done():
        status = (await asyncio.to_thread(serve.status)).applications["paceline"]
        assert status.status != "DEPLOY_FAILED", status.message
        if status.status != "RUNNING":
            return False
        if await app.states(app.TARGET) != {"RUNNING": counts["target"]}:
            return False
        if await app.states(app.DRAFT) != {"RUNNING": 1} or await app.states("Router") != {"RUNNING": 2}:
            return False
        seen = await app.ask("Router", "statuses")
        wanted = {"target": counts["target"], "draft": 1}
        return all({kind: len(s) for kind, s in one.items()} == wanted for one in seen)

    await until(done, START_S, f"the application runs with {counts}")


async def pids(app, kind):
    """Process ids of a pool, as the monitor knows them: clients are not told."""
    (info,) = await app.ask("Monitor", "server_info")
    return {status.pid for status in info.pools.get(kind, ())}


async def replaced(app, kind, lost, timeout_s=60):
    """Waits until the pool has as many processes as before, without the lost one; returns the new ones."""
    before = await pids(app, kind) | {lost}

    async def new():
        now = await pids(app, kind)
        return now - before if lost not in now and now - before else None

    return await until(new, timeout_s, f"a new {kind} replica")


async def speculates(app):
    """Draft tokens are accepted again. Whether drafts pay is the target's to judge: it may take several requests."""

    async def accepted():
        async with stub_of(app) as stub:
            _, _, complete = await collect(stub.Generate(request(PROMPTS[0], 40)))
        return complete.speculation.hits > 0 and complete.speculation.accepted > 0

    await until(accepted, 120, "it speculates again")


@dataclass
class Traffic:
    """Streams without end: when one has ended the same request follows.

    Each prompt runs over the bare protocol, on a connection of its own, and through the project's client. ``resuming``:
    through that alone, which continues the streams of a router that is lost.
    """

    app: object
    expected: dict
    resuming: bool = False
    num_resumes: int = 0
    gaps: list = field(default_factory=list)
    num_streams: int = 0
    _stopping: bool = False

    async def __aenter__(self):
        self._begun = asyncio.Event()
        runs = [self._resume] if self.resuming else [self._run, self._resume]
        self._tasks = [asyncio.create_task(run(prompt)) for run in runs for prompt in PROMPTS]
        async with asyncio.timeout(60):
            await self._begun.wait()
        return self

    async def __aexit__(self, kind, *_):
        self._stopping = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _run(self, prompt):
        async with stub_of(self.app) as stub:
            while not self._stopping:
                token_ids, times, complete = [], [], None
                async for response in stub.Generate(request(prompt, NUM_TOKENS)):
                    times.append(time.monotonic())
                    token_ids += response.chunk.token_ids
                    complete = response.complete if response.HasField("complete") else None
                    if len(times) == 4:
                        self._begun.set()
                assert token_ids == self.expected[prompt]
                assert complete is not None
                assert complete.completion_tokens == NUM_TOKENS
                self.num_streams += 1
                self.gaps += [b - a for a, b in itertools.pairwise(times)]

    async def _resume(self, prompt):
        async with AsyncClient(self.app.address) as client:
            while not self._stopping:
                stream, times = client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True), []
                async for _ in stream:
                    times.append(time.monotonic())
                    if len(times) == 4:
                        self._begun.set()
                result = await stream.result
                assert list(result.token_ids) == self.expected[prompt]
                assert result.usage.completion_tokens == NUM_TOKENS
                self.num_resumes += stream.num_resumes
                self.num_streams += 1
                self.gaps += [b - a for a, b in itertools.pairwise(times)]

    @property
    def longest_s(self):
        """The longest pause inside a stream."""
        return max(self.gaps)


@pytest.fixture(scope="module")
def expected(pair):

    return dict(zip(PROMPTS, plain(pair, PROMPTS, NUM_TOKENS), strict=True))


@pytest.fixture(scope="module")
def two(app, expected):
    """The application with two breakable targets; brought and taken away by rolling updates."""

    async def bring():
        async with Traffic(app, expected) as traffic:
            await asyncio.to_thread(deploy, application(changed(app), {}))
            await asyncio.sleep(1)
            await settled(app, target=2)
        return traffic

    async def restore():
        from paceline.cluster.app import build

        await asyncio.to_thread(deploy, build(app.config))
        await asyncio.sleep(1)
        await settled(app, target=1)

    try:
        app.rolled = finish(bring())
        yield app
    finally:
        finish(restore())


@contextlib.contextmanager
def stopped(pid):
    """A process that hangs meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def report(what, traffic):
    print(f"{what}: {traffic.num_streams} streams, longest gap {traffic.longest_s:.3f} s")


# -- updates ----------------------------------------------------------------------------------------------------------


def test_a_rolling_update_of_everything_breaks_no_stream(two):
    report(f"rolling update of everything, {two.rolled.num_resumes} streams resumed", two.rolled)
    assert two.rolled.num_streams > 4
    assert two.rolled.longest_s < STEP_S + TARGET_TIMEOUT_S + SLACK_S


@contextlib.asynccontextmanager
async def strangers(app, num):
    """Streams without end of clients that know nothing of this service, each on a connection of its own; gives the
    errors that they get."""
    errors, stopping = [], False

    async def run():
        async with stub_of(app) as stub:
            while not stopping:
                try:
                    await collect(stub.Generate(request(PROMPTS[0], NUM_TOKENS)))
                except grpc.aio.AioRpcError as error:
                    errors.append(error)
                    await asyncio.sleep(0.2)

    tasks = [asyncio.create_task(run()) for _ in range(num)]
    try:
        yield errors
    finally:
        stopping = True
        await asyncio.gather(*tasks)


async def test_a_killed_router_breaks_no_stream_of_the_client_and_is_unavailable_to_others(two, expected):
    """Of which router a connection is, its proxy decides: the busiest one is killed until that has hit both kinds."""
    async with strangers(two, 4) as errors, Traffic(two, expected, resuming=True) as traffic:
        while not (traffic.num_resumes and errors):
            pid = await busiest(two, "router")
            os.kill(pid, signal.SIGKILL)
            await replaced(two, "router", pid)
            await settled(two, target=2)
    report(f"router killed, {traffic.num_resumes} streams resumed, {len(errors)} of others broken", traffic)
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}, errors
    await assert_all_free(two)


async def test_a_router_that_is_stopped_sends_its_clients_to_the_other_while_their_streams_go_on(two, expected):
    """Each connection has a stream at all times, so that a router which kept its connections would never be idle."""

    async def busy(app):
        return all(await app.ask("Router", "num_requests"))

    async def only_one(app):
        return await app.states("Router") == {"RUNNING": 1}

    async with contextlib.AsyncExitStack() as stack:
        errors = [await stack.enter_async_context(strangers(two, 2)) for _ in range(2)]
        await until(lambda: busy(two), 60, "both routers have streams")
        await two.scale("Router", 1)
        await until(lambda: only_one(two), LIMIT_S / 4, "the router that is stopped has ended")
    assert errors == [[], []]
    await two.scale("Router", 2)
    await settled(two, target=2)


@pytest.mark.nightly
async def test_a_rolling_update_of_the_draft_replaces_the_draft_only(two, expected):
    before = {kind: await pids(two, kind) for kind in ("target", "draft", "router")}
    (draft,) = before["draft"]
    config = changed(two)
    config["draft_config"] = config["draft_config"] | {
        "engine_kwargs": config["draft_config"]["engine_kwargs"] | {"tree_budget": 64}
    }
    async with Traffic(two, expected) as traffic:
        await asyncio.to_thread(deploy, application(config, {"draft": "2"}))
        await replaced(two, "draft", draft)
        await settled(two, target=2)
    report("rolling update of the draft", traffic)
    assert await pids(two, "target") == before["target"]
    assert await pids(two, "router") == before["router"]
    assert traffic.longest_s < STEP_S + DRAFT_TIMEOUT_S + SLACK_S
    await speculates(two)


# -- drafts -----------------------------------------------------------------------------------------------------------


async def test_a_killed_draft_is_not_missed_and_its_successor_speculates(two, expected):
    (pid,) = await pids(two, "draft")
    async with Traffic(two, expected) as traffic:
        os.kill(pid, signal.SIGKILL)
        await replaced(two, "draft", pid)
        await settled(two, target=2)
    report("draft killed", traffic)
    assert traffic.longest_s < STEP_S + DRAFT_TIMEOUT_S + SLACK_S
    await speculates(two)


@pytest.mark.nightly
async def test_a_draft_that_hangs_or_crawls_does_not_hold_streams_up(two, expected):
    (pid,) = await pids(two, "draft")
    async with Traffic(two, expected) as traffic:
        with stopped(pid):
            await asyncio.sleep(2.5)
    report("draft hung", traffic)
    assert traffic.longest_s < STEP_S + DRAFT_TIMEOUT_S + SLACK_S
    async with Traffic(two, expected) as traffic:
        for _ in range(12):
            with stopped(pid):
                await asyncio.sleep(0.25)
            await asyncio.sleep(0.05)
    report("draft slow", traffic)
    assert traffic.longest_s < STEP_S + DRAFT_TIMEOUT_S + SLACK_S
    assert await pids(two, "draft") == {pid}, "short hangs are no reason to replace it"
    await speculates(two)


@pytest.mark.nightly
async def test_a_draft_that_hangs_for_long_is_replaced(two, expected):
    """By Serve, when its health checks have failed; streams speculate again with the new one."""
    (pid,) = await pids(two, "draft")
    async with Traffic(two, expected) as traffic:
        with stopped(pid):
            await replaced(two, "draft", pid, timeout_s=120)
            await speculates(two)
        await settled(two, target=2)
    report("draft hung for long", traffic)
    assert traffic.longest_s < STEP_S + DRAFT_TIMEOUT_S + SLACK_S


# -- targets ----------------------------------------------------------------------------------------------------------


async def busiest(app, kind="target"):
    """Pid of a replica that serves a session now."""

    async def serving():
        (info,) = await app.ask("Monitor", "server_info")
        statuses = info.pools.get(kind, ())
        best = max(statuses, key=lambda status: status.num_sessions, default=None)
        return best.pid if best is not None and best.num_sessions else None

    return await until(serving, 60, f"a {kind} serves")


async def test_streams_of_a_killed_target_go_on_at_the_other(two, expected):
    async with Traffic(two, expected) as traffic:
        pid = await busiest(two)
        os.kill(pid, signal.SIGKILL)
        await replaced(two, "target", pid)
        await settled(two, target=2)
    report("target killed", traffic)
    assert traffic.longest_s < STEP_S + SLACK_S  # its connection breaks at once
    await assert_all_free(two)


@pytest.mark.nightly
async def test_streams_of_a_target_that_hangs_go_on_at_the_other(two, expected):
    async with Traffic(two, expected) as traffic:
        pid = await busiest(two)
        with stopped(pid):
            await asyncio.sleep(TARGET_TIMEOUT_S + 3)
        await settled(two, target=2)
    report("target hung", traffic)
    assert traffic.longest_s < STEP_S + TARGET_TIMEOUT_S + SLACK_S
    await assert_all_free(two)


@pytest.mark.nightly
async def test_a_target_whose_engine_dies_is_replaced_and_its_streams_go_on(two, expected):
    from ray import serve

    before = await pids(two, "target")
    handle = serve.get_deployment_handle(two.TARGET, "paceline")
    async with Traffic(two, expected) as traffic:
        await handle.break_engine.remote()

        async def one_is_new():
            now = await pids(two, "target")
            return len(now) == 2 and len(now & before) == 1

        await until(one_is_new, 60, "Serve replaces the replica")
        await settled(two, target=2)
    report("target's engine dead", traffic)
    assert traffic.longest_s < STEP_S + SLACK_S
    await assert_all_free(two)


# -- refusals ---------------------------------------------------------------------------------------------------------


async def refusal(call):
    """The error of a call that must fail, and how long that took."""
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call)
    return caught.value, time.monotonic() - started


@pytest.mark.nightly
async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(two):
    """2 x 24 sessions run, 2 x 3 wait, the others are refused."""
    async with stub_of(two) as stub, stub_of(two) as other:

        def start(i):
            message = request(letters(9, i % 20), 1900, temperature=1.0, seed=i)
            call = (stub, other)[i % 2].Generate(message)
            calls.append(call)
            return asyncio.create_task(refusal(call))

        calls = []
        crowd = [start(i) for i in range(90)]
        await asyncio.wait(crowd, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        late = [start(i) for i in range(8)]  # both routers are full, or nearly so
        done, _ = await asyncio.wait(late, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            call.cancel()
        await asyncio.gather(*crowd, *late, return_exceptions=True)
        errors = [task.result() for task in done]
    assert errors
    for error, _ in errors:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"at most {MAX_QUEUED} may wait" in error.details()
        trailers = dict(error.trailing_metadata())
        assert trailers["paceline-error"] == "ResourceExhaustedError"
        assert int(trailers["grpc-retry-pushback-ms"]) > 0
    took_s = min(took_s for _, took_s in errors)
    print(f"queue full: refused after {took_s:.3f} s")
    assert took_s < SLACK_S
    await assert_all_free(two)


@pytest.mark.nightly
async def test_without_a_target_requests_end_as_unavailable_in_time_and_are_served_again_later(two, expected):
    async with stub_of(two) as stub:
        lost = asyncio.create_task(refusal(stub.Generate(request(PROMPTS[0], 1900))))
        await busiest(two)
        known = await pids(two, "target")
        await two.scale(two.TARGET, 0)
        for pid in known:
            os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        late, (new, new_s), (error, _) = await asyncio.gather(
            refusal(stub.Generate(request(PROMPTS[1], 9), timeout=2.0)),
            refusal(stub.Generate(request(PROMPTS[1], 9))),
            lost,
        )
        lost_s = time.monotonic() - started
        print(f"no target: UNAVAILABLE after {lost_s:.2f} s in progress, {new_s:.2f} s new, late {late[1]:.2f} s")
        assert error.code() is new.code() is grpc.StatusCode.UNAVAILABLE
        assert "no target replica was up" in error.details()
        assert max(lost_s, new_s) < RECOVERY_S + SLACK_S
        assert late[0].code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert late[1] < 2.0 + SLACK_S
        await two.scale(two.TARGET, 2)
        await settled(two, target=2)
        token_ids, _, _ = await collect(stub.Generate(request(PROMPTS[0], NUM_TOKENS)))
        assert token_ids == expected[PROMPTS[0]]
    await assert_all_free(two)
