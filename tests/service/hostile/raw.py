"""A raw client, what it sends, and attacks on a replica made of it."""

import asyncio

from grpc import aio
from tests.service.hostile.replicas import INF, NAN, VICTIM, Served
from tests.service.support import until
from tests.support.messages import tree_update
from tests.support.models import VOCAB

from paceline.messages import OpenSession, Outcome
from paceline.rpc import streams as wire
from paceline.rpc.transport import CHANNEL_OPTIONS, TOKEN_KEY
from paceline.types import SamplingParams, SpeculationParams
from paceline.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, types_pb2

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
        messages = wire.decode_from_target(target_pb2.FromTarget(events=self.events))[0]
        mine = (m for m in messages if isinstance(m, Outcome) and m.session_id == session_id)
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
    return tree_update(session_id, epoch, context_len, **given)


def close(session_id, epoch):
    return types_pb2.CloseSession(session_id=session_id, epoch=epoch)


def without(message, name):
    message.ClearField(name)
    return message


MALFORMED_OPENS = [
    without(opened(), "sampling"),
    without(opened(), "speculation"),
    broken(session_id=""),
    broken(num_prompt_tokens=0),
    broken(num_prompt_tokens=9),
    broken(token_ids=[]),
]
SENSELESS_OPENS = [  # whose parameters cannot be followed: they are answered
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
    await raw.send(*(raw.command(open_session=message) for message in SENSELESS_OPENS))
    await raw.heard()
    assert raw.failed() == ["mine"] * len(SENSELESS_OPENS)
    commands = [raw.command(open_session=message) for message in MALFORMED_OPENS]
    commands += [raw.command(), raw.command(close_session=close("", 1))]
    if raw.command is target_pb2.TargetCommand:
        commands += [raw.command(draft_state=target_pb2.DraftState(epoch=1))]
        commands += [
            raw.command(tree_updates=message)
            for message in (
                nodes(session_id=""),
                nodes(probs=[NAN]),
                nodes(probs=[]),
                nodes(token_ids=[20, 21]),
                nodes(sampled=[True, True]),
                nodes(qs=[types_pb2.SparseDistribution(token_ids=bytes(4), probs=bytes(8))] * 2),
                nodes(qs=[types_pb2.SparseDistribution(token_ids=bytes(4))]),
                nodes(qs=[types_pb2.SparseDistribution(token_ids=bytes(5), probs=bytes(10))]),
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
            raw.command(tree_updates=nodes(session_id, epoch)),
            raw.command(tree_updates=nodes("nobody")),
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
            raw.command(tree_updates=nodes(epoch=4)),
            raw.command(tree_updates=nodes(epoch=2**63)),
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
            raw.command(tree_updates=nodes("wide", probs=[0.5] * size, **chain)),
            raw.command(open_session=opened("over", token_ids=[10] * 2048)),
        )
    else:  # the commit fits no cache: its session ends
        commit = {"token_ids": huge, "in_flight": range(100_000)}
        await raw.send(raw.command(commit=draft_pb2.Commit(session_id="wide", epoch=5, context_len=3, **commit)))
    refused = {"long", "over"} if raw.command is target_pb2.TargetCommand else {"long", "wide"}
    await until(lambda: refused == set(raw.failed()), what="what does not fit is refused")
    return {}


ATTACKS = [malformed, foreign, stale, outside, absurd]
