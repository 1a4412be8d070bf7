"""A draft replica that answers a real router with garbage changes no text and holds no session up.

The oracle is plain decoding in one process. Guards that are a single check have a mutant: without the guard the same
check fails.
"""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
from tests.service.hostile.garbage import (
    GARBAGE,
    Counts,
    FakeDraft,
    confident_and_wrong,
    outside_the_vocabulary,
    thousands,
    unknown_parents,
)
from tests.service.hostile.replicas import PROMPT, VICTIM, assert_free, served
from tests.service.support import collect, routed, until
from tests.support.models import VOCAB
from tests.support.mutants import mutant
from tests.support.rings import slow

from paceline.core import native_tree
from paceline.core.tree import SpeculationTree
from paceline.router.pool import Member
from paceline.router.session import Session
from paceline.rpc.transport import start_server
from paceline.target import session as target_session
from paceline.types import Acceptance, Mode, SamplingParams, SpeculationParams
from paceline.v1 import draft_pb2_grpc

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=11, ignore_eos=True)
"""Few tokens: a sequential session waits for a mute draft in every round."""


async def answered_with(garbage, counted, config, target, plain, *, every_s=None, patience_s=30.0, attempts=30):
    """Streams of a real router whose draft is a fake; again while all that it sends comes too late to be looked at."""
    fake = FakeDraft(garbage, every_s)
    server, port = await start_server(
        lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(fake, server), "127.0.0.1"
    )
    draft = SimpleNamespace(member=Member("draft", f"127.0.0.1:{port}"))
    before = Counter(target.host.status().counters)
    counts = Counts()
    try:
        async with routed(config, [target], [draft]) as (router, _, _):
            router.metrics.dropped = lambda kind, count=1: counts.router.update({kind: count})
            (link,) = router.drafts.links.values()
            await until(lambda: link.up and router.ready, what="both are up")
            for _ in range(attempts):
                async with asyncio.timeout(patience_s):
                    greedy, sampled, drawn = await asyncio.gather(
                        collect(router, PROMPT, sampling=GREEDY),
                        collect(router, "xy", sampling=SAMPLED, speculation=SpeculationParams(mode=Mode.SEQUENTIAL)),
                        collect(
                            router,
                            "z",
                            sampling=SAMPLED,
                            speculation=SpeculationParams(acceptance=Acceptance.REJECTION),
                        ),
                    )
                assert greedy[1].token_ids == plain(PROMPT, GREEDY)
                assert sampled[1].token_ids == plain("xy", SAMPLED)
                assert drawn[1].usage.completion_tokens == SAMPLED.max_tokens
                assert all(0 <= t < VOCAB for t in drawn[1].token_ids)
                assert fake.num_sent > 0
                counts.target = Counter(target.host.status().counters)
                counts.target.subtract(before)
                counts.link = link.num_malformed
                if counted(counts):
                    break
            assert counted(counts) > 0
            assert router.active == {}
        await assert_free(target)
        target.host.check()
    finally:
        await server.stop(0)


_FAST = {"outside_the_vocabulary", "confident_and_wrong", "not_a_number", "impossible_distributions", "old_epoch"}


@pytest.mark.parametrize(
    ("garbage", "counted"),
    [
        *(case for case in GARBAGE if case[0].__name__ in _FAST),
        *slow(case for case in GARBAGE if case[0].__name__ not in _FAST),
    ],
    ids=lambda value: value.__name__.replace("<lambda>", ""),
)
async def test_a_draft_that_answers_with_garbage_changes_nothing(config, shared, plain, garbage, counted):
    await answered_with(garbage, counted, config, shared[0], plain)


async def test_a_fault_of_our_own_on_a_link_hangs_no_session(config, shared, plain, monkeypatch):
    """The link goes down and comes back; before, it stayed up without anybody reading it."""
    on_target, on_draft, calls = Session.on_target, Session.on_draft, Counter()

    def failing(name, method):
        def fail(self, event, actions=None):
            calls[name] += 1
            if calls[name] == 5:
                raise RuntimeError("broken by a test")
            return method(self, event, actions)

        return fail

    monkeypatch.setattr(Session, "on_draft", failing("draft", on_draft))
    monkeypatch.setattr(Session, "on_target", failing("target", on_target))
    async with routed(config, *([one] for one in shared)) as (router, _, _):
        _, result = await collect(router, PROMPT, sampling=VICTIM)
        assert result.token_ids == plain(PROMPT, VICTIM)
        assert min(calls.values()) > 5
        assert router.active == {}
    await assert_free(*shared)


@pytest.mark.slow
@pytest.mark.parametrize("garbage", [confident_and_wrong, unknown_parents], ids=lambda garbage: garbage.__name__)
async def test_a_draft_that_never_stops_talking_does_not_hold_a_session_up(config, plain, garbage):
    """It sends the same every few milliseconds, asked or not."""
    target = await served(config, "target")
    try:
        await answered_with(garbage, lambda c: 1, config, target, plain, every_s=0.005, patience_s=10.0)
    finally:
        await target.server.stop()


def _any_node_fits(monkeypatch):
    """The tree believes ids, tokens and probabilities."""
    monkeypatch.setattr(native_tree, "native_module", lambda: None)
    monkeypatch.setattr(SpeculationTree, "is_valid", lambda self, node, parent: True)


@mutant(target_session, "new_tree")
def _trees_have_no_end(make, *args, **options):
    return make(*args, **options | {"max_nodes": 10**9})


@pytest.mark.parametrize(
    ("mutant", "garbage"),
    [
        (_any_node_fits, outside_the_vocabulary),
        pytest.param(_trees_have_no_end, thousands, marks=pytest.mark.slow),
    ],
)
async def test_a_tree_without_the_guard_is_caught(config, plain, monkeypatch, mutant, garbage):
    mutant(monkeypatch)
    target = await served(config, "target")
    try:
        with pytest.raises(Exception):  # noqa: B017 - an engine that breaks is as good as a count that is missing
            await answered_with(garbage, dict(GARBAGE)[garbage], config, target, plain, patience_s=4.0, attempts=3)
    finally:
        await target.server.stop()
