"""Spans of targets and drafts: real engines, a real router and a client, over real gRPC, in one process."""

import asyncio
import contextlib
import threading
from collections import defaultdict

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from tests.service.support import routed, run, tiny_pair, until
from tests.support.door import opened
from tests.support.rings import slow
from tests.support.spans import REQUEST, Recorded, values

from paceline.client import AsyncClient
from paceline.config import TracingConfig
from paceline.metrics.engine_tracing import EngineSpans
from paceline.metrics.tracing import Tracing
from paceline.router.pool import Member
from paceline.router.service import GenerationService
from paceline.runtime.server import engine_server
from paceline.types import Mode, Request, Result, SamplingParams, SpeculationParams

PROMPT = "abcdefgh"
SAMPLING = SamplingParams(max_tokens=80, temperature=1.0, seed=3, ignore_eos=True)
FIRST, EVERY = 3, 20
HELD_AFTER = 40


class Held:
    """An engine that waits after its first steps until a test lets it go on, or die."""

    def __init__(self, engine, replica):
        self._engine, self._replica, self._num_steps = engine, replica, 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self):
        worked = self._engine.step()
        self._num_steps += worked
        if self._num_steps == HELD_AFTER:
            self._replica.goes_on.wait()
        if self._replica.dies:
            raise RuntimeError("broken by a test")
        return worked


class InProcess:
    """A replica in this process, whose spans a Tracing makes."""

    def __init__(self, kind, config, replica_id, tracing):
        setup = config.target_setup() if kind == "target" else config.draft_setup()
        self.server = engine_server(setup, replica_id=replica_id, observer=EngineSpans(tracing, kind, replica_id))
        self.replica_id, self.goes_on, self.dies = replica_id, threading.Event(), False
        build = self.server.host.factory
        self.server.host.factory = lambda emit: Held(build(emit), self)

    @property
    def member(self):
        return Member(self.replica_id, self.server.address)


@contextlib.asynccontextmanager
async def service(config, tracing_of, targets=1, **settings):
    """(router, replicas, pool of targets); ``tracing_of`` makes the Tracing of a process by its model."""
    names = [("target", i) for i in range(targets)] + [("draft", 0)]
    replicas = [InProcess(kind, config, f"{kind}-{i}", tracing_of(kind)) for kind, i in names]
    try:
        for replica in replicas:
            await replica.server.start()
            if targets == 1:
                replica.goes_on.set()
        async with routed(config, replicas[:targets], replicas[targets:], **settings) as (router, pool, _):
            await until(lambda: len(router.targets.open_links()) == targets and router.drafts.open_links())
            yield router, replicas, pool
    finally:
        for replica in replicas:
            replica.goes_on.set()
            await replica.server.stop()


def below(spans):
    """The spans directly below each span, the earliest first."""
    found = defaultdict(list)
    for span in spans:
        if span.parent is not None:
            found[span.parent.span_id].append(span)
    return found


def rounds_of(spans):
    return [span for span in spans if span.name == "round"]


def indices(spans):
    return [span.attributes["paceline.round.index"] for span in rounds_of(spans)]


def check_target(span, children, replica):
    """The shape of a session's spans on a target; returns those below."""
    assert span.attributes["gen_ai.request.model"] == "target"
    assert span.attributes["paceline.target"] == replica
    queue, prefill, *others = found = children[span.context.span_id]
    assert (queue.name, prefill.name) == ("queue", "prefill")
    assert span.start_time == queue.start_time
    assert queue.end_time == prefill.start_time
    assert {other.name for other in others} <= {"round"}
    assert all(prefill.end_time <= other.start_time <= other.end_time <= span.end_time for other in others)
    return found


def recording():
    """What is recorded, and makers of its Tracing for the processes of a service."""
    recorded = Recorded(first_rounds=FIRST, round_every=EVERY)
    return recorded, lambda model: Tracing(recorded.provider, model, first_rounds=FIRST, round_every=EVERY)


async def test_a_request_has_its_spans_on_target_and_draft_below_its_own(checkpoints, plain):
    recorded, tracing_of = recording()
    config = tiny_pair(checkpoints)

    def check(result):
        spans, children = recorded.spans, below(recorded.spans)
        (above,) = recorded.named("theirs")
        assert {span.context.trace_id for span in spans} == {above.context.trace_id}
        (own,) = children[above.context.span_id]
        assert own.name == REQUEST
        (target,), (draft,) = (
            [span for span in children[own.context.span_id] if span.name == name] for name in ("target", "draft")
        )
        assert own.start_time <= target.start_time <= target.end_time
        found = check_target(target, children, "target-0")
        assert found[1].attributes["paceline.cached_tokens"] == 0
        assert target.attributes["paceline.context_tokens"] == result.usage.prompt_tokens
        assert target.attributes["paceline.rounds"] == result.speculation.rounds
        wanted = [*range(1, FIRST + 1), *range(EVERY, result.speculation.rounds, EVERY)]
        assert indices(found) == wanted
        told = [dict(span.attributes) for span in rounds_of(children[own.context.span_id])]
        assert [dict(span.attributes) for span in rounds_of(found)] == told, "the router tells of the same rounds"

        assert draft.attributes["gen_ai.request.model"] == "draft"
        assert draft.attributes["paceline.draft"] == "draft-0"
        prefill, *rounds = children[draft.context.span_id]
        assert prefill.name == "prefill"
        assert {span.name for span in rounds} == {"round"}
        assert set(indices(rounds)) <= set(wanted)
        assert all(span.attributes["paceline.round.nodes"] > 0 for span in rounds)
        assert all(prefill.end_time <= span.start_time <= span.end_time <= draft.end_time for span in rounds)
        assert len(spans) == 2 + sum(
            map(len, map(children.get, (own.context.span_id, *(span.context.span_id for span in (target, draft)))))
        ), "there are no others"
        assert not {PROMPT, result.text} & set(map(str, values(spans)))

    theirs = recorded.provider.get_tracer("theirs")
    async with (
        service(config, tracing_of) as (router, _, _),
        opened(router, tracing=recorded.tracing) as address,
        AsyncClient(address) as client,
    ):
        with theirs.start_as_current_span("theirs"):
            stream = client.generate(PROMPT, SAMPLING, SpeculationParams(mode=Mode.SEQUENTIAL))  # no draft is late
        result = await stream.result
        assert result.token_ids == plain(PROMPT, SAMPLING)
        await until(lambda: recorded.named("draft"), what="the draft has heard of the end")
        check(result)


@pytest.mark.parametrize("how", ["failover", *slow(["drain"])])
async def test_a_session_that_goes_to_another_target_has_spans_on_both_in_one_trace(checkpoints, plain, how):
    recorded, tracing_of = recording()
    config = tiny_pair(checkpoints)

    def check(old):
        new = {"target-0": "target-1", "target-1": "target-0"}[old]
        children = below(recorded.spans)
        (own,) = recorded.named(REQUEST)
        assert {span.context.trace_id for span in recorded.spans} == {own.context.trace_id}
        first, second = recorded.named("target")
        assert {span.parent.span_id for span in (first, second)} == {own.context.span_id}
        before = indices(check_target(first, children, old))
        assert before in ([1], [1, 2], [1, 2, 3]), "the first rounds, of which one may have brought the tokens so far"
        assert indices(check_target(second, children, new))[:3] == [1, 2, 3]
        num_before, num_after = (span.attributes["paceline.context_tokens"] for span in (first, second))
        assert num_before == own.attributes["gen_ai.usage.input_tokens"]
        assert num_after >= num_before + 8, "it goes on from the tokens so far"
        (moved,) = recorded.named("migration")
        assert moved.parent.span_id == own.context.span_id
        assert dict(moved.attributes) == {"paceline.migration.reason": how, "paceline.target": new}
        assert moved.start_time <= second.start_time

    async with service(config, tracing_of, targets=2) as (router, replicas, pool):
        door, tokens = GenerationService(router, recorded.tracing), []
        moved = []
        async with contextlib.aclosing(door.run(Request("moved", PROMPT, SAMPLING))) as items:
            async for item in items:
                if isinstance(item, Result):
                    continue
                tokens += item.token_ids
                if len(tokens) >= 8 and not moved:
                    moved += [link.member.replica_id for link in router.targets.links.values() if link.sessions]
                    (old,) = [replica for replica in replicas if replica.replica_id in moved]
                    if how == "failover":
                        old.dies = True
                    else:
                        pool.set_members([r.member for r in replicas[:2] if r is not old])
                    for replica in replicas:
                        replica.goes_on.set()
        assert tuple(tokens) == plain(PROMPT, SAMPLING)
        await until(lambda: len(recorded.named("target")) == 2, what="the old target has heard of the end")
        check(moved[0])


class Stuck(SpanExporter):
    """An exporter that hangs, or fails, as long as it is not released."""

    def __init__(self, *, fails):
        self._fails, self.entered, self.released = fails, threading.Event(), threading.Event()

    def export(self, spans):
        self.entered.set()
        if self._fails:
            raise OSError("the collector is gone")
        self.released.wait()
        return SpanExportResult.SUCCESS

    def shutdown(self):
        self.released.set()


@pytest.mark.parametrize("fails", [False, *slow([True])])
def test_exporters_that_fail_or_hang_hold_no_stream_up(monkeypatch, checkpoints, plain, fails):
    """A stream that waited for one would never end: they are released after it. Their queues are full all the while."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    exporters = []

    def exporter(*_):
        exporters.append(Stuck(fails=fails))
        return exporters[-1]

    monkeypatch.setattr("paceline.metrics.tracing.build_exporter", exporter)
    opened_here = []

    def tracing_of(model):
        opened_here.append(Tracing.open(model, **TracingConfig(protocol="grpc", round_every=1).arguments))
        return opened_here[-1]

    config = tiny_pair(checkpoints)

    async def test():
        async with service(config, tracing_of) as (router, _, _):
            door = GenerationService(router, tracing_of("router"))
            for turn in range(2):  # the spans of the second have no room
                tokens = []
                async with contextlib.aclosing(door.run(Request(f"r{turn}", PROMPT, SAMPLING))) as items:
                    async for item in items:
                        tokens += () if isinstance(item, Result) else item.token_ids
                assert tuple(tokens) == plain(PROMPT, SAMPLING)
                for each in exporters:
                    assert await asyncio.to_thread(each.entered.wait, 60), "nothing was to be sent"
            assert not any(each.released.is_set() for each in exporters)

    try:
        run(test())
    finally:
        for each in exporters:
            each.released.set()
        for tracing in opened_here:
            tracing.close()
    assert len(exporters) == 3
