"""Clients that send what no peer of ours sends: dropped, counted, and nobody else is harmed.

Raw gRPC clients attack a target and a draft while a router's stream runs there. The oracle is plain decoding in one
process. Guards that are a single check have a mutant: without the guard the same check fails.
"""

import asyncio
from types import SimpleNamespace

import grpc
import pytest
from grpc import aio
from tests.service.hostile.raw import ATTACKS, Raw, foreign, malformed, opened, stale
from tests.service.hostile.replicas import INF, PROMPT, VICTIM, assert_free, both, served
from tests.service.support import collect, routed, until
from tests.support.mutants import mutant

from paceline.messages import CloseSession, OpenSession
from paceline.rpc import streams as wire
from paceline.rpc import transport
from paceline.rpc.transport import CHANNEL_OPTIONS
from paceline.runtime import host as replica
from paceline.runtime.host import EngineHost
from paceline.types import SamplingParams, SeedScope
from paceline.v1 import types_pb2


async def attacked(config, replicas, kind, attack, plain, patience_s=60.0):
    """A router's stream goes on beside an attack; then everything is free, and the replica serves others."""
    target, draft = replicas
    one = target if kind == "target" else draft
    async with routed(config, [target], [draft]) as (router, _, _):
        await collect(router, PROMPT, sampling=SamplingParams(max_tokens=2))  # both are up
        begun = asyncio.Event()
        victim = asyncio.create_task(
            collect(router, PROMPT, sampling=VICTIM, on_chunk=lambda chunks: len(chunks) == 3 and begun.set())
        )
        await asyncio.wait(
            (victim, asyncio.ensure_future(begun.wait())), return_when=asyncio.FIRST_COMPLETED, timeout=60
        )
        assert begun.is_set(), f"the stream has not begun: {router.statuses()}"
        (active,) = router.active.values()
        session = active.session
        epoch = session.target_epoch if kind == "target" else session.draft_epoch
        before = dict(one.host.status().counters)
        async with Raw(one) as raw:
            growth = await attack(raw, (session.session_id, epoch))
            await raw.heard()
            try:
                _, result = await asyncio.wait_for(victim, patience_s)
            finally:
                victim.cancel()
            assert result.token_ids == plain(PROMPT, VICTIM)
            assert result.speculation.accepted > 0
            for name, count in growth.items():
                await until(lambda: one.count(name) - before[name] >= count, patience_s, name)  # noqa: B023
                # a router's own messages may come late for a session, too; but none of them is malformed
                assert name != "messages_malformed" or one.count(name) - before[name] == count
            if attack is stale and kind == "target":
                own_key = VICTIM.model_copy(update={"seed_scope": SeedScope.GLOBAL})  # no router made another
                assert raw.tokens("mine") == plain((10, 11, 12), own_key)
            assert not raw.call.done(), "what makes no sense is no reason to end the stream"
        await assert_free(target, draft)
        _, result = await collect(router, "xy", sampling=VICTIM)
        assert result.token_ids == plain("xy", VICTIM)
        one.host.check()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("kind", ["target", "draft"])
async def test_what_makes_no_sense_is_dropped_and_counted_and_harms_nobody(config, shared, plain, kind, attack):
    await attacked(config, shared, kind, attack, plain)


@mutant(EngineHost, "admit")
def _anybody_may_end_a_session(_, self, stream, message):
    """The host does not look at who opened a session."""
    owner = self.owners.get(message.session_id)
    if owner is None and isinstance(message, OpenSession):
        self.owners[message.session_id] = (stream, message.epoch)
    elif owner is not None and isinstance(message, CloseSession) and message.epoch == owner[1]:
        del self.owners[message.session_id]
    return True


def _not_a_number_is_a_probability(monkeypatch):
    """The wire does not look for NaN: the tree still does, so that only the count shows it."""
    monkeypatch.setattr(wire, "math", SimpleNamespace(isnan=lambda _: False, inf=INF))


@pytest.mark.parametrize(
    ("mutant", "attack"),
    [
        (_anybody_may_end_a_session, foreign),
        pytest.param(_not_a_number_is_a_probability, malformed, marks=pytest.mark.slow),
    ],
)
async def test_a_host_without_the_guard_is_caught(config, plain, monkeypatch, mutant, attack):
    mutant(monkeypatch)
    async with both(config) as replicas:
        with pytest.raises((AssertionError, TimeoutError)):
            await attacked(config, replicas, "target", attack, plain, patience_s=2.5)


@pytest.mark.parametrize("kind", ["target", "draft"])
async def test_bytes_that_are_no_message_end_their_own_stream_only(config, shared, plain, kind):
    service = {"target": "Target", "draft": "Draft"}[kind]

    async def noise(raw, victim):
        async with aio.insecure_channel(raw._address, options=CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(f"/paceline.v1.{service}Service/Rounds")()
            await call.write(b"\xff\xff\xff\xff no message of ours")
            async with asyncio.timeout(60):
                while await call.read() is not aio.EOF:
                    pass
        return {}

    await attacked(config, shared, kind, noise, plain)


# -- the token --------------------------------------------------------------------------------------------------------


async def assert_only_the_token_opens(config, kind, patience_s=60.0):
    one = await served(config, kind, token="secret")
    try:
        async with Raw(one, token="secret") as raw:
            await raw.heard()
        for token in ("", "wrong", "secret "):
            async with Raw(one, token=token) as raw:
                assert await asyncio.wait_for(raw.call.code(), patience_s) is grpc.StatusCode.UNAUTHENTICATED
        assert one.host.num_sessions == 0
    finally:
        await one.server.stop()


@pytest.mark.parametrize("kind", ["target", "draft"])
async def test_a_stream_without_the_token_is_refused(config, kind):
    await assert_only_the_token_opens(config, kind)


async def test_a_door_that_takes_every_token_is_caught(config, monkeypatch):
    async def intercept(self, continuation, details):
        return await continuation(details)

    monkeypatch.setattr(transport._TokenCheck, "intercept_service", intercept)
    with pytest.raises((AssertionError, TimeoutError)):
        await assert_only_the_token_opens(config, "target", patience_s=2.0)


# -- a stream that is never read --------------------------------------------------------------------------------------


async def assert_a_deaf_stream_is_ended(config, plain, patience_s=15.0):
    async with both(config) as (target, draft), Raw(target, reads=False) as raw:
        endless = VICTIM.model_copy(update={"max_tokens": 2000})
        await raw.send(raw.command(open_session=opened(sampling=endless)))
        await until(lambda: target.host.num_sessions == 1)
        echoes = [raw.command(echo=types_pb2.Echo(sent_ns=2**60 + i)) for i in range(20_000)]
        flood = asyncio.create_task(_flood(raw, echoes))
        try:
            async with routed(config, [target], [draft]) as (router, _, _):
                _, result = await collect(router, PROMPT, sampling=VICTIM)
                assert result.token_ids == plain(PROMPT, VICTIM)
                await until(lambda: target.host.num_sessions == 0, patience_s, "the session is freed")
                await assert_free(target)
        finally:
            flood.cancel()
            await asyncio.gather(flood, return_exceptions=True)


async def _flood(raw, echoes):
    for _ in range(40):
        await raw.send(*echoes)
        await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_stream_that_takes_nothing_is_ended_and_its_sessions_are_freed(config, plain, monkeypatch):
    monkeypatch.setattr(replica, "WRITE_TIMEOUT_S", 0.7)
    await assert_a_deaf_stream_is_ended(config, plain)


@pytest.mark.slow
async def test_a_host_that_waits_for_ever_is_caught(config, plain, monkeypatch):
    monkeypatch.setattr(replica, "WRITE_TIMEOUT_S", 60.0)
    with pytest.raises(TimeoutError):
        await assert_a_deaf_stream_is_ended(config, plain, patience_s=2.0)
