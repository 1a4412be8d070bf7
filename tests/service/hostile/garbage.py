"""A stand-in for a draft replica, and the garbage that it answers a real router with."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from tests.service.hostile.replicas import INF, NAN
from tests.support.messages import tree_update
from tests.support.models import VOCAB

from paceline.core.tree import MAX_NODES
from paceline.messages import CloseSession, Echo, OpenSession, SparseDistribution
from paceline.rpc import streams as wire
from paceline.v1 import draft_pb2, draft_pb2_grpc, types_pb2


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
                for message in wire.decode_to_draft(batch)[0]:
                    await write(*self._answer(message))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _answer(self, message):
        if isinstance(message, Echo):
            return wire.encode_from_draft([message]).events
        session_id, events = message.session_id, []
        if isinstance(message, CloseSession):
            self._sessions.pop(session_id, None)
            return []
        if isinstance(message, OpenSession):
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
        tree_updates=tree_update(
            session_id,
            followed.epoch if epoch is None else epoch,
            followed.context_len if context_len is None else context_len,
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
        ([20, 21], [NAN, 1.0]),
    ]  # fmt: skip
    events = []
    for q in (SparseDistribution.of(ids, probs) for ids, probs in wrong):
        proto = types_pb2.SparseDistribution(token_ids=q.packed_ids, probs=q.packed_probs)
        events += _below(session_id, followed, [20], qs=[proto])
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
