"""Peers that send what no peer of ours sends: dropped, counted, and nobody else is harmed.

Raw gRPC clients attack a target and a draft while a router's stream runs there, and a stand-in for a draft replica
answers a real router with garbage. The oracle is plain decoding in one process. Guards that are a single check have a
mutant: without the guard the same check fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import grpc
import pytest
from grpc import aio
from tests.service.support import _Slowed, collect, routed, run, tiny_pair, until
from tests.support import VOCAB

from paceline import replica, transport, wire
from paceline.draft.service import draft_server
from paceline.replica import EngineHost, ReplicaServer
from paceline.router.pool import Member
from paceline.router.session import Session
from paceline.speculation import MAX_NODES, SpeculationTree
from paceline.target.service import target_server
from paceline.transport import CHANNEL_OPTIONS, TOKEN_KEY, start_server
from paceline.types import Acceptance, CloseSession, Mode, OpenSession, SamplingParams, SpeculationParams
from paceline.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2

STEP_S = 0.01
PROMPT = "abcdefgh"
VICTIM = SamplingParams(max_tokens=80, temperature=1.0, seed=5, ignore_eos=True)
NAN, INF = math.nan, math.inf


# -- replicas in this process -----------------------------------------------------------------------------------------


@dataclass
class Served:
    """A started replica of this process."""

    server: ReplicaServer

    @property
    def host(self) -> EngineHost:
        return self.server.host

    @property
    def member(self) -> Member:
        return Member(self.host.kind, self.server.address)

    def count(self, name):
        return self.host.status().counters[name]


async def served(config, kind, pause_s=STEP_S, **options) -> Served:
    server = (target_server if kind == "target" else draft_server)(config, replica_id=kind, **options)
    build = server.host._factory
    server.host._factory = lambda emit: _Slowed(build(emit), pause_s)
    await server.start()
    return Served(server)


@contextlib.asynccontextmanager
async def both(config, **options):
    """A target and a draft."""
    started = []
    try:
        for kind, pause_s in (("target", STEP_S), ("draft", 0.0)):
            started.append(await served(config, kind, pause_s, **options))
        yield started
    finally:
        for one in started:
            await one.server.stop()


@pytest.fixture(scope="module")
def config(checkpoints):
    return tiny_pair(checkpoints)


@pytest.fixture(scope="module")
def shared(config):
    """A target and a draft for all attacks: what one leaves behind the next one meets."""
    stack = contextlib.AsyncExitStack()
    started = []

    async def start():
        started.extend(await stack.enter_async_context(both(config)))

    run(start)
    yield started
    run(stack.aclose)


# -- a raw client -----------------------------------------------------------------------------------------------------

KINDS = {
    "target": (target_pb2_grpc.TargetServiceStub, target_pb2.ToTarget, target_pb2.TargetCommand),
    "draft": (draft_pb2_grpc.DraftServiceStub, draft_pb2.ToDraft, draft_pb2.DraftCommand),
}


class Raw:
    """An internal stream without any of a router's care."""

    def __init__(self, served: Served, token="", reads=True):
        self._address, self._token, self._reads = served.server.address, token, reads
        self._stub, self._batch, self.command = KINDS[served.host.kind]
        self._num_echoes = 0
        self.events = []

    async def __aenter__(self):
        self._channel = aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        metadata = ((TOKEN_KEY, self._token),) if self._token else None
        self.call = self._stub(self._channel).Rounds(metadata=metadata)
        self._reader = asyncio.create_task(self._read()) if self._reads else None
        return self

    async def __aexit__(self, *_):
        self.call.cancel()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def _read(self):
        async for batch in self.call:
            self.events += batch.events

    async def send(self, *commands):
        await self.call.write(self._batch(commands=commands))

    async def heard(self):
        """Returns when the replica has taken in all that was sent."""
        self._num_echoes += 1
        echo = types_pb2.Echo(sent_ns=self._num_echoes)
        await self.send(self.command(echo=echo))
        await until(lambda: any(e.HasField("echo") and e.echo == echo for e in self.events), what="the echo")

    def failed(self):
        """Sessions that the replica said have failed."""
        return [e.session_failed.session_id for e in self.events if e.HasField("session_failed")]

    def tokens(self, session_id):
        """What a target has decided for a session."""
        mine = (e.outcome for e in self.events if e.HasField("outcome") and e.outcome.session_id == session_id)
        return tuple(t for outcome in mine for t in outcome.token_ids)


def opened(session_id="mine", epoch=5, token_ids=(10, 11, 12), num_prompt=None, sampling=VICTIM, **speculation):
    """A good OpenSession message."""
    num_prompt = len(token_ids) if num_prompt is None else num_prompt
    fields = SpeculationParams(**speculation)
    # the context is written as it is: nothing that the dataclass may check comes between
    message = OpenSession(session_id, epoch, tuple(token_ids), num_prompt, 5, sampling, fields, (7,))
    return wire.encode_to_target([message]).commands[0].open_session


def broken(**changes):
    """An OpenSession message with fields of its parameters changed; None clears one."""
    message = opened()
    for name, value in changes.items():
        part = message.sampling if hasattr(message.sampling, name) else message.speculation
        part = message if name in ("session_id", "num_prompt_tokens", "token_ids") else part
        if name == "token_ids":
            del message.token_ids[:]
            message.token_ids.extend(value)
        else:
            setattr(part, name, value)
    return message


def nodes(session_id="mine", epoch=5, context_len=3, **columns):
    given = {"node_ids": [1], "parent_ids": [0], "token_ids": [20], "probs": [0.5]} | columns
    return types_pb2.Nodes(session_id=session_id, epoch=epoch, context_len=context_len, **given)


def close(session_id, epoch):
    return types_pb2.CloseSession(session_id=session_id, epoch=epoch)


def without(message, name):
    message.ClearField(name)
    return message


# -- attacks on a replica ---------------------------------------------------------------------------------------------

SENSELESS_OPENS = [
    without(opened(), "sampling"),
    without(opened(), "speculation"),
    broken(session_id=""),
    broken(num_prompt_tokens=0),
    broken(num_prompt_tokens=9),
    broken(token_ids=[]),
    broken(temperature=-1.0),
    broken(temperature=NAN),
    broken(top_p=INF),
    broken(max_tokens=0),
    broken(max_tokens=2**32 - 1),
    broken(mode="nonsense"),
    broken(max_draft_tokens=2**31),
    broken(saguaro=NAN),
]
OUTSIDE_OPENS = [
    ("v0", {"token_ids": (VOCAB,)}),
    ("v1", {"token_ids": (10, 2**32 - 1), "num_prompt": 1}),
    ("v2", {"sampling": VICTIM.model_copy(update={"stop_token_ids": (VOCAB,)})}),
    ("v3", {"sampling": VICTIM.model_copy(update={"logit_bias": {VOCAB: 1.0}})}),
    ("v4", {"sampling": VICTIM.model_copy(update={"bad_words": ((11, VOCAB),)})}),
]


async def malformed(raw, victim):
    """Returns counters and by how much they have to grow."""
    commands = [raw.command(open_session=message) for message in SENSELESS_OPENS]
    commands += [raw.command(), raw.command(close_session=close("", 1))]
    if raw.command is target_pb2.TargetCommand:
        commands += [raw.command(draft_state=target_pb2.DraftState(epoch=1))]
        commands += [
            raw.command(nodes=message)
            for message in (
                nodes(session_id=""),
                nodes(probs=[NAN]),
                nodes(probs=[]),
                nodes(token_ids=[20, 21]),
                nodes(sampled=[True, True]),
                nodes(qs=[types_pb2.SparseDistribution(token_ids=[20], probs=[1.0])] * 2),
                nodes(qs=[types_pb2.SparseDistribution(token_ids=[20], probs=[])]),
                nodes(qs=[types_pb2.SparseDistribution(token_ids=[20], probs=[NAN])]),
                nodes(step_s=NAN),
                nodes(step_s=-1.0),
                nodes(step_s=INF),
            )
        ]
    else:
        commands += [raw.command(commit=draft_pb2.Commit(epoch=1, token_ids=[10]))]
    await raw.send(*commands)
    return {"messages_malformed": len(commands)}


async def foreign(raw, victim):
    """For the session of another stream, and for one that nobody has opened."""
    session_id, epoch = victim
    commands = [
        raw.command(close_session=close(session_id, epoch)),
        raw.command(close_session=close(session_id, epoch + 1)),
        raw.command(close_session=close("nobody", 1)),
        raw.command(open_session=opened(session_id, epoch + 1)),
        raw.command(open_session=opened(session_id, epoch)),
    ]
    if raw.command is target_pb2.TargetCommand:
        state = {"session_id": session_id, "epoch": epoch, "available": True}
        commands += [
            raw.command(draft_state=target_pb2.DraftState(draft_epoch=epoch + 9, context_len=3, **state)),
            raw.command(nodes=nodes(session_id, epoch)),
            raw.command(nodes=nodes("nobody")),
        ]
    else:
        commands += [
            raw.command(commit=draft_pb2.Commit(session_id=session_id, epoch=epoch, context_len=9, token_ids=[10])),
            raw.command(commit=draft_pb2.Commit(session_id="nobody", epoch=epoch, context_len=9, token_ids=[10])),
        ]
    await raw.send(*commands)
    return {"messages_foreign": len(commands)}


async def stale(raw, victim):
    """Repeated, reordered and of other epochs: for a session of its own, which is served all the same."""
    await raw.send(raw.command(open_session=opened()))
    again = [raw.command(open_session=opened(epoch=epoch)) for epoch in (5, 3, 0)]
    if raw.command is target_pb2.TargetCommand:
        late = [
            raw.command(close_session=close("mine", 4)),
            raw.command(close_session=close("mine", 2**64 - 1)),
            raw.command(draft_state=target_pb2.DraftState(session_id="mine", epoch=4, available=True)),
            raw.command(
                draft_state=target_pb2.DraftState(
                    session_id="mine", epoch=5, available=True, draft_epoch=6, context_len=2**31
                )
            ),
            raw.command(draft_state=target_pb2.DraftState(session_id="mine", epoch=5, available=True, draft_epoch=5)),
            raw.command(nodes=nodes(epoch=4)),
            raw.command(nodes=nodes(epoch=2**63)),
        ]
        await raw.send(*again, *late)
        await until(lambda: len(raw.tokens("mine")) == VICTIM.max_tokens, 20, "the session's tokens")
        return {"messages_stale": len(again) + len(late)}
    commit = {"session_id": "mine", "token_ids": [10, 11]}
    await raw.send(
        *again,
        raw.command(commit=draft_pb2.Commit(epoch=4, context_len=3, **commit)),
        raw.command(commit=draft_pb2.Commit(epoch=5, context_len=3, **commit)),
        raw.command(commit=draft_pb2.Commit(epoch=5, context_len=3, **commit)),
        raw.command(commit=draft_pb2.Commit(epoch=5, context_len=0, **commit)),
        raw.command(commit=draft_pb2.Commit(epoch=2**63, context_len=5, **commit)),
        raw.command(commit=draft_pb2.Commit(epoch=2**63, context_len=5, **commit)),
        raw.command(close_session=close("mine", 4)),
    )
    await until(lambda: raw.failed() == ["mine"], what="it is told once that no such epoch is open")
    await raw.send(raw.command(commit=draft_pb2.Commit(epoch=5, context_len=9, **commit)))
    await until(lambda: raw.failed() == ["mine", "mine"], what="a gap ends the session")
    return {"stale_messages": len(again) + 4, "unknown_messages": 2, "lost_commits": 1}


async def outside(raw, victim):
    """Token ids that no model has."""
    names = [name for name, _ in OUTSIDE_OPENS]
    await raw.send(*(raw.command(open_session=opened(name, **change)) for name, change in OUTSIDE_OPENS))
    if raw.command is draft_pb2.DraftCommand:
        commit = draft_pb2.Commit(session_id="v5", epoch=5, context_len=3, token_ids=[VOCAB])
        await raw.send(raw.command(open_session=opened("v5")), raw.command(commit=commit))
        names.append("v5")
    await until(lambda: sorted(raw.failed()) == names, what="each of them is refused")
    return {}


async def absurd(raw, victim):
    """Sizes beyond all measure: each costs its own session at most."""
    huge = [10] * 200_000
    endless = VICTIM.model_copy(update={"max_tokens": 2**31 - 1})
    await raw.send(
        raw.command(open_session=opened("long", token_ids=huge)),
        raw.command(open_session=opened("s" * 100_000, sampling=SamplingParams(max_tokens=1))),
        raw.command(open_session=opened("wide", sampling=endless)),
    )
    if raw.command is target_pb2.TargetCommand:
        size = 50_000
        chain = {"node_ids": range(1, size + 1), "parent_ids": range(size), "token_ids": [20] * size}
        await raw.send(
            raw.command(nodes=nodes("wide", probs=[0.5] * size, **chain)),
            raw.command(open_session=opened("over", token_ids=[10] * 2048)),
        )
    else:  # the commit fits no cache: its session ends
        commit = {"token_ids": huge, "in_flight": range(100_000)}
        await raw.send(raw.command(commit=draft_pb2.Commit(session_id="wide", epoch=5, context_len=3, **commit)))
    refused = {"long", "over"} if raw.command is target_pb2.TargetCommand else {"long", "wide"}
    await until(lambda: refused == set(raw.failed()), what="what does not fit is refused")
    return {}


ATTACKS = [malformed, foreign, stale, outside, absurd]


async def attacked(config, replicas, kind, attack, plain, patience_s=30.0):
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
            (victim, asyncio.ensure_future(begun.wait())), return_when=asyncio.FIRST_COMPLETED, timeout=30
        )
        assert begun.is_set(), f"the stream has not begun: {router.statuses()}"
        (live,) = router._live.values()
        session = live.session
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
                await until(lambda: one.count(name) - before[name] >= count, what=name)  # noqa: B023
                # a router's own messages may come late for a session, too; but none of them is malformed
                assert name != "messages_malformed" or one.count(name) - before[name] == count
            if attack is stale and kind == "target":
                assert raw.tokens("mine") == plain((10, 11, 12), VICTIM)
            assert not raw.call.done(), "what makes no sense is no reason to end the stream"
        await assert_free(target, draft)
        _, result = await collect(router, "xy", sampling=VICTIM)
        assert result.token_ids == plain("xy", VICTIM)
        one.host.check()


async def assert_free(*all_served):
    for one in all_served:
        await until(
            lambda: not one.host.num_sessions and not one.host.status().num_sessions,  # noqa: B023
            what=f"{one.host.kind} holds no session",
        )
        await until(lambda: not one.host.status().kv_pages_used, what="no page is used")  # noqa: B023


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("kind", ["target", "draft"])
def test_what_makes_no_sense_is_dropped_and_counted_and_harms_nobody(config, shared, plain, kind, attack):
    run(lambda: attacked(config, shared, kind, attack, plain), 40)


def _anybody_may_end_a_session(monkeypatch):
    """The host does not look at who opened a session."""

    def admit(self, stream, message):
        owner = self._owners.get(message.session_id)
        if owner is None and isinstance(message, OpenSession):
            self._owners[message.session_id] = (stream, message.epoch)
        elif owner is not None and isinstance(message, CloseSession) and message.epoch == owner[1]:
            del self._owners[message.session_id]
        return True

    monkeypatch.setattr(EngineHost, "_admit", admit)


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
def test_a_host_without_the_guard_is_caught(config, plain, monkeypatch, mutant, attack):
    mutant(monkeypatch)

    async def test():
        async with both(config) as replicas:
            with pytest.raises((AssertionError, TimeoutError)):
                await attacked(config, replicas, "target", attack, plain, patience_s=5.0)

    run(test)


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_bytes_that_are_no_message_end_their_own_stream_only(config, shared, plain, kind):
    service = {"target": "Target", "draft": "Draft"}[kind]

    async def noise(raw, victim):
        async with aio.insecure_channel(raw._address, options=CHANNEL_OPTIONS) as channel:
            call = channel.stream_stream(f"/paceline.v1.{service}Service/Rounds")()
            await call.write(b"\xff\xff\xff\xff no message of ours")
            async with asyncio.timeout(10):
                while await call.read() is not aio.EOF:
                    pass
        return {}

    run(lambda: attacked(config, shared, kind, noise, plain))


# -- the token --------------------------------------------------------------------------------------------------------


async def assert_only_the_token_opens(config, kind):
    one = await served(config, kind, token="secret")
    try:
        async with Raw(one, token="secret") as raw:
            await raw.heard()
        for token in ("", "wrong", "secret "):
            async with Raw(one, token=token) as raw:
                assert await asyncio.wait_for(raw.call.code(), 5) is grpc.StatusCode.UNAUTHENTICATED
        assert one.host.num_sessions == 0
    finally:
        await one.server.stop()


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_a_stream_without_the_token_is_refused(config, kind):
    run(lambda: assert_only_the_token_opens(config, kind))


def test_a_door_that_takes_every_token_is_caught(config, monkeypatch):
    async def intercept(self, continuation, details):
        return await continuation(details)

    monkeypatch.setattr(transport._TokenCheck, "intercept_service", intercept)

    async def test():
        with pytest.raises((AssertionError, TimeoutError)):
            await assert_only_the_token_opens(config, "target")

    run(test)


# -- a stream that is never read --------------------------------------------------------------------------------------


async def assert_a_deaf_stream_is_ended(config, plain, patience_s=8.0):
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


def test_a_stream_that_takes_nothing_is_ended_and_its_sessions_are_freed(config, plain, monkeypatch):
    monkeypatch.setattr(replica, "_WRITE_TIMEOUT_S", 0.7)
    run(lambda: assert_a_deaf_stream_is_ended(config, plain))


@pytest.mark.slow
def test_a_host_that_waits_for_ever_is_caught(config, plain, monkeypatch):
    monkeypatch.setattr(replica, "_WRITE_TIMEOUT_S", 60.0)

    async def test():
        with pytest.raises(TimeoutError):
            await assert_a_deaf_stream_is_ended(config, plain, patience_s=2.0)

    run(test)


# -- a draft replica that answers with garbage ------------------------------------------------------------------------


@dataclass
class _Followed:
    """What a draft has to know of a session to hang nodes where the target takes them."""

    epoch: int
    context_len: int
    anchor: int = 0
    next_id: int = 1

    def take(self, count):
        first, self.next_id = self.next_id, self.next_id + count
        return list(range(first, self.next_id))


class FakeDraft(draft_pb2_grpc.DraftServiceServicer):
    """Follows each session as a draft does, then adds what ``garbage(session_id, followed, rng)`` returns."""

    def __init__(self, garbage, every_s=None):
        self._garbage, self._every_s = garbage, every_s
        self._sessions: dict[str, _Followed] = {}
        self._rng = random.Random(3)
        self.num_sent = 0

    async def Rounds(self, request_iterator, context):
        lock = asyncio.Lock()
        self._sessions.clear()
        status = types_pb2.ReplicaStatus(replica_id="draft", kind="draft", incarnation=1, max_sessions=2**32 - 1)

        async def write(*events, status=None):
            async with lock:
                self.num_sent += len(events)
                await context.write(draft_pb2.FromDraft(events=events, status=status))

        async def beat():
            while True:
                await write(status=status)
                await asyncio.sleep(0.2)

        async def trickle():
            while True:
                await asyncio.sleep(self._every_s)
                for session_id, followed in list(self._sessions.items()):
                    await write(*self._garbage(session_id, followed, self._rng))

        tasks = [asyncio.create_task(beat())] + ([asyncio.create_task(trickle())] if self._every_s else [])
        try:
            async for batch in request_iterator:
                for command in batch.commands:
                    await write(*self._answer(command))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _answer(self, command):
        kind = command.WhichOneof("command")
        message = getattr(command, kind)
        if kind == "echo":
            return [draft_pb2.DraftEvent(echo=message)]
        session_id, events = message.session_id, []
        if kind == "close_session":
            self._sessions.pop(session_id, None)
            return []
        if kind == "open_session":
            self._sessions[session_id] = _Followed(message.epoch, len(message.token_ids))
        elif session_id not in self._sessions:
            return []
        elif message.token_ids:
            followed = self._sessions[session_id]
            size = len(message.token_ids)
            followed.context_len = message.context_len + size
            ids = followed.take(size)
            events.append(
                node_event(
                    session_id, followed, node_ids=ids, parent_ids=[followed.anchor, *ids[:-1]],
                    token_ids=message.token_ids, probs=[1.0] * size, sampled=[False] * size,
                )
            )  # fmt: skip
            followed.anchor = ids[-1]
        return events + self._garbage(session_id, self._sessions[session_id], self._rng)


def node_event(session_id, followed, *, epoch=None, context_len=None, **columns):
    return draft_pb2.DraftEvent(
        nodes=types_pb2.Nodes(
            session_id=session_id,
            epoch=followed.epoch if epoch is None else epoch,
            context_len=followed.context_len if context_len is None else context_len,
            **columns,
        )
    )


def _below(session_id, followed, token_ids, probs=None, **columns):
    """Children of the anchor."""
    size = len(token_ids)
    given = {"node_ids": followed.take(size), "parent_ids": [followed.anchor] * size, "token_ids": token_ids}
    return [node_event(session_id, followed, **(given | {"probs": probs or [0.5] * size} | columns))]


def outside_the_vocabulary(session_id, followed, rng):
    return _below(session_id, followed, [VOCAB, VOCAB + 1, 2**31, 2**32 - 1], [1.0, 0.9, 0.8, 0.7])


def impossible_probabilities(session_id, followed, rng):
    return _below(session_id, followed, [20, 21, 22, 23], [-0.5, 2.0, INF, -1e308])


def ids_that_do_not_grow(session_id, followed, rng):
    anchor = followed.anchor
    return _below(session_id, followed, [20, 21], node_ids=[anchor, anchor], parent_ids=[anchor, anchor])


def duplicates(session_id, followed, rng):
    (node_id,) = followed.take(1)
    return _below(session_id, followed, [20, 20, 21], node_ids=[node_id] * 3)


def unknown_parents(session_id, followed, rng):
    return _below(session_id, followed, [20, 21], parent_ids=[2**32 - 2, 2**31], node_ids=[2**32 - 1] * 2)


def thousands(session_id, followed, rng):
    """A wrong chain far longer than a tree may be."""
    ids = followed.take(2 * MAX_NODES)
    token_ids = [rng.randrange(10, VOCAB) for _ in ids]
    return _below(session_id, followed, token_ids, node_ids=ids, parent_ids=[followed.anchor, *ids[:-1]])


def confident_and_wrong(session_id, followed, rng):
    ids = followed.take(16)
    columns = {"node_ids": ids, "parent_ids": [followed.anchor, *ids[:-1]]}
    return _below(session_id, followed, [rng.randrange(10, VOCAB) for _ in ids], [1.0] * 16, **columns)


def not_a_number(session_id, followed, rng):
    return _below(session_id, followed, [20], [NAN]) + _below(session_id, followed, [21], step_s=NAN)


def uneven_columns(session_id, followed, rng):
    return _below(session_id, followed, [20, 21], [0.5]) + _below(session_id, followed, [20], sampled=[True] * 3)


def impossible_distributions(session_id, followed, rng):
    """For the rejection rule; the coupled one has no use for them."""
    wrong = [
        ([20, 21], [0.5, 0.1]), ([21], [1.0]), ([20, 20], [0.5, 0.5]), ([20, VOCAB], [0.5, 0.5]),
        ([20, 21], [1e308, 1e308]), ([20, 21], [2.0, -1.0]), ([20, 21], [0.0, 1.0]),
    ]  # fmt: skip
    qs = [types_pb2.SparseDistribution(token_ids=ids, probs=probs) for ids, probs in wrong]
    events = []
    for q in qs:
        events += _below(session_id, followed, [20], qs=[q])
    return events


def old_epoch(session_id, followed, rng):
    return [node_event(session_id, followed, epoch=epoch) for epoch in (followed.epoch + 1, 2**64 - 1)]


def contexts_to_come(session_id, followed, rng):
    return [node_event(session_id, followed, context_len=length) for length in (0, 2**32 - 1)]


def somebody_else(session_id, followed, rng):
    failed = types_pb2.SessionFailed(session_id="nobody", epoch=1, message="not yours")
    return [node_event("nobody", followed), draft_pb2.DraftEvent(session_failed=failed)]


def empty_events(session_id, followed, rng):
    return [draft_pb2.DraftEvent(), node_event("", followed)]


def gives_up(session_id, followed, rng):
    failed = types_pb2.SessionFailed(session_id=session_id, epoch=followed.epoch, message="no")
    return [draft_pb2.DraftEvent(session_failed=failed)] * 3


def echoes(session_id, followed, rng):
    """Of nothing that was sent."""
    return [draft_pb2.DraftEvent(echo=types_pb2.Echo(sent_ns=sent_ns)) for sent_ns in (0, 1, 1, 2**64 - 1)]


def absurd_times(session_id, followed, rng):
    """Steps that took longer than the universe, and a promise of more."""
    return [*_below(session_id, followed, [20], step_s=1e300), node_event(session_id, followed, step_s=1e-300)]


@dataclass
class Counts:
    """What became of messages: at the target, at the router, on the link."""

    target: Counter = field(default_factory=Counter)
    router: Counter = field(default_factory=Counter)
    link: int = 0


GARBAGE = [
    (outside_the_vocabulary, lambda c: c.target["nodes_invalid"]),
    (impossible_probabilities, lambda c: c.target["nodes_invalid"]),
    (ids_that_do_not_grow, lambda c: c.target["nodes_invalid"]),
    (duplicates, lambda c: c.target["nodes_invalid"]),
    (unknown_parents, lambda c: c.target["nodes_stale"]),
    (thousands, lambda c: c.target["nodes_dropped"]),
    (confident_and_wrong, lambda c: c.target["draft_rows"]),
    (not_a_number, lambda c: c.target["messages_malformed"]),
    (uneven_columns, lambda c: c.target["messages_malformed"]),
    (impossible_distributions, lambda c: c.target["nodes_invalid"]),
    (old_epoch, lambda c: c.router["relay"]),
    (contexts_to_come, lambda c: c.router["relay"]),
    (somebody_else, lambda c: c.router["unknown"]),
    (empty_events, lambda c: c.link),
    (gives_up, lambda c: c.router["relay"] + c.router["unknown"]),  # whether it has another draft by then is chance
    (echoes, lambda c: 1),
    (absurd_times, lambda c: c.target["nodes_added"]),
]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=1.0, seed=11, ignore_eos=True)
"""Few tokens: a sequential session waits for a mute draft in every round."""


_ATTEMPTS = 3
"""On a busy machine all of a draft's messages may come too late to be looked at."""


async def answered_with(garbage, counted, config, target, plain, *, every_s=None, patience_s=30.0):
    """Streams of a real router whose draft is a fake."""
    fake = FakeDraft(garbage, every_s)
    server, port = await start_server(
        lambda server: draft_pb2_grpc.add_DraftServiceServicer_to_server(fake, server), "127.0.0.1"
    )
    draft = SimpleNamespace(member=Member("draft", f"127.0.0.1:{port}"))
    before = Counter(target.host.status().counters)
    counts = Counts()
    try:
        async with routed(config, [target], [draft]) as (router, _, _):
            router._metrics.dropped = lambda kind, count=1: counts.router.update({kind: count})
            (link,) = router._drafts.links.values()
            await until(lambda: link.up and router.ready, what="both are up")
            for _ in range(_ATTEMPTS):
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
            assert router._live == {}
        await assert_free(target)
        target.host.check()
    finally:
        await server.stop(0)


@pytest.mark.parametrize(("garbage", "counted"), GARBAGE, ids=[garbage.__name__ for garbage, _ in GARBAGE])
def test_a_draft_that_answers_with_garbage_changes_nothing(config, shared, plain, garbage, counted):
    run(lambda: answered_with(garbage, counted, config, shared[0], plain))


def test_a_fault_of_our_own_on_a_link_hangs_no_session(config, shared, plain, monkeypatch):
    """The link goes down and comes back; before, it stayed up without anybody reading it."""
    on_target, on_draft, calls = Session.on_target, Session.on_draft, Counter()

    def failing(name, method):
        def fail(self, event):
            calls[name] += 1
            if calls[name] == 5:
                raise RuntimeError("broken by a test")
            return method(self, event)

        return fail

    monkeypatch.setattr(Session, "on_draft", failing("draft", on_draft))
    monkeypatch.setattr(Session, "on_target", failing("target", on_target))

    async def test():
        async with routed(config, *([one] for one in shared)) as (router, _, _):
            _, result = await collect(router, PROMPT, sampling=VICTIM)
            assert result.token_ids == plain(PROMPT, VICTIM)
            assert min(calls.values()) > 5
            assert router._live == {}
        await assert_free(*shared)

    run(test, 40)


@pytest.mark.parametrize("garbage", [confident_and_wrong, unknown_parents], ids=lambda garbage: garbage.__name__)
def test_a_draft_that_never_stops_talking_does_not_hold_a_session_up(config, plain, garbage):
    """It sends the same every few milliseconds, asked or not."""

    async def test():
        target = await served(config, "target")
        try:
            await answered_with(garbage, lambda c: 1, config, target, plain, every_s=0.005, patience_s=10.0)
        finally:
            await target.server.stop()

    run(test, 40)


def _any_node_fits(monkeypatch):
    """The tree believes ids, tokens and probabilities."""
    monkeypatch.setattr(SpeculationTree, "_valid", lambda self, node, parent: True)


def _trees_have_no_end(monkeypatch):
    add = SpeculationTree.add

    def boundless(self, nodes):
        self._max_nodes = 10**9
        return add(self, nodes)

    monkeypatch.setattr(SpeculationTree, "add", boundless)


@pytest.mark.parametrize(
    ("mutant", "garbage"),
    [
        (_any_node_fits, outside_the_vocabulary),
        pytest.param(_trees_have_no_end, thousands, marks=pytest.mark.slow),
    ],
)
def test_a_tree_without_the_guard_is_caught(config, plain, monkeypatch, mutant, garbage):
    mutant(monkeypatch)

    async def test():
        target = await served(config, "target")
        try:
            with pytest.raises(Exception):  # noqa: B017 - an engine that breaks is as good as a count that is missing
                await answered_with(garbage, dict(GARBAGE)[garbage], config, target, plain, patience_s=10.0)
        finally:
            await target.server.stop()

    run(test)
