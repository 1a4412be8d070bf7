"""Drafting with a smaller language model: one KV row per expanded node, all sessions in one forward.

A session's rows are not in the order of its text. Committed rows and tree rows lie in the same pages; a mask says
which rows a node sees, and its rotary position is its depth. So moving the root is bookkeeping only: rows of the
accepted path are marked as committed, and dropped rows go to a free list. Nothing is copied, and no surviving row is
computed again. Only whole prompt pages, written in order, are shared between sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from paceline.core.deferred import download
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import GREEDY_CANDIDATES, best_unprocessed, draft_candidates, reads_rows
from paceline.drafters.branch_rows import BranchPart, BranchSession
from paceline.drafters.growing.blame import call_for_each
from paceline.drafters.parts import parts_of
from paceline.drafters.protocol import Candidates, Chainer, DrafterSessionError, Leaf, OfSessions, Ranker
from paceline.drafters.rows import NO_TAIL, Part, RowSession, Tail, tree_step
from paceline.drafters.translation import Translation
from paceline.errors import ResourceExhaustedError
from paceline.model.chain import Chain, Draw, Ranked, Stop
from paceline.model.kv_cache import root_hash
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, least_states, pages_for


class ModelDrafter(OfSessions[RowSession]):
    """A draft model with the ``Drafter`` protocol, and the ``top_m`` likeliest candidates of q per node."""

    kind = "model"

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_leaves: int,
        max_prefill_tokens: int,
        top_m: int,
        translation: Translation | None = None,
        max_len: int = 1 << 30,
    ) -> None:
        """Keeps what every session needs.

        Args:
            runner: the model, and the cache of its keys and values.
            max_leaves: of one ``expand``.
            max_prefill_tokens: of one ``prefill``.
            top_m: candidates per node.
            translation: between the target's tokens and the model's; None: they are the same.
            max_len: the model's own tokens of the longest context, which may be more than the target's.
        """
        self.max_leaves = max_leaves
        self._translation = translation
        self._max_len = max_len
        self.runner = runner
        self.cache = runner.cache
        self._max_prefill_tokens = max_prefill_tokens
        self._top_m = top_m
        self.sessions: dict[str, RowSession] = {}

    @property
    def chainer(self) -> Chainer:
        """This drafter, which drafts paths for the sessions that ``chains`` names."""
        return self

    @property
    def ranker(self) -> Ranker:
        """This drafter."""
        return self

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Begins a session; refuses a context that the whole cache cannot hold."""
        if self._translation is not None:
            token_ids = self._translation.context(token_ids)
        if pages_for(len(token_ids)) > self.cache.num_pages or len(token_ids) > self._max_len:
            raise ResourceExhaustedError(self._too_long(len(token_ids)))
        kind = RowSession if self.cache.linear is None else BranchSession
        session = kind(list(token_ids), sampler, num_prefill=len(token_ids) - 1, root=root_hash(salt))
        if session.begun:
            session.begin(self.cache)
        self.sessions[session_id] = session

    def prefill(self) -> bool:
        """Computes a chunk of prompts; sessions without room for their prompt, or without a state, wait."""
        budget, begun = self._max_prefill_tokens, self._begin_waiting()
        chunks: dict[str, tuple[RowSession, int, SequenceStep]] = {}
        for session_id, session in self.sessions.items():
            stop = min(session.num_prefill, session.num_cached + budget)
            count = stop - session.num_cached
            if count <= 0 or not session.begun:
                continue
            try:
                chunks[session_id] = session, stop, session.chunk(self.cache, stop)
            except ResourceExhaustedError:
                continue
            budget -= count
        if not chunks:
            return begun
        failed: dict[str, Exception] = {}
        done = call_for_each(
            lambda names: self.runner.forward([chunks[name][2] for name in names]),
            [*chunks],
            session_of=str,
            on_failure=lambda error, names: failed.update(dict.fromkeys(names, error)),
        )
        for session, stop, _ in (chunks[name] for names, _ in done for name in names):
            session.take_chunk(self.cache, stop)
        for name in failed:
            session, _, _ = chunks[name]
            session.num_rows = session.num_cached  # the rows are free again
        if failed:
            name, error = failed.popitem()
            raise DrafterSessionError(name, f"{type(error).__name__}: {error}") from error
        return True

    def _begin_waiting(self) -> bool:
        """Begins sessions that wait for a state of linear layers, while there are free states. Each session needs one,
        and a second while it passes a boundary."""
        waiting = [session for session in self.sessions.values() if not session.begun]
        if not waiting:
            return False
        assert self.cache.linear is not None
        room = self.cache.linear.slots.states // least_states(1) - (len(self.sessions) - len(waiting))
        for session in waiting[:room]:
            session.begin(self.cache)
        return room > 0

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """Candidates of the leaves by one forward; a leaf without room for its row gets none."""
        return self.expand_best(leaves, best=False)

    def expand_best(self, leaves: Sequence[Leaf], *, best: bool = True) -> Candidates:
        """``expand``, with ``Candidates.ranked`` where one pass over the logits gives them, and with
        ``Candidates.unread`` where others do. ``best`` False: ``expand``."""
        best = best and self.tokens_per_leaf == 1
        tails: Sequence[Tail] = ()
        at: Sequence[int] = range(len(leaves))  # leaf of each row of logits,
        depths: Sequence[int] = ()  # and its depth
        plain = self.tokens_per_leaf == 1 and self._translation is None and self.cache.linear is None
        made = parts_of(leaves, self.sessions, self.cache) if plain else None
        parts: Sequence[Part | BranchPart]
        if made is not None:
            parts, rows = made
        else:
            tails = self._tails(leaves)
            parts, rows, at, depths = self._parts(leaves, tails)
        if not parts:
            return self.no_candidates(leaves, tails, self._num_candidates(leaves))
        try:
            steps = [step for part in parts for step in ((part.step,) if isinstance(part, Part) else part.steps)]
            logits = self.runner.forward(steps)
            if self._translation is not None:
                logits = self._translation.logits(logits)
            all_in_order = made is not None or (self.tokens_per_leaf == 1 and [*at] == [*range(len(leaves))])
            ranked = best_unprocessed(logits, rows) if best else None
            unread = best and ranked is None and reads_rows(logits)
            if ranked is None and not unread:
                ids, scores = draft_candidates(logits, rows, self._num_candidates(leaves))
        except BaseException:
            for part in parts:
                part.drop()
            raise
        for part in parts:
            part.keep()
        if unread:
            return Candidates(*_none((len(leaves), 0)), unread=(logits, at, self._num_candidates(leaves)))
        if ranked is not None:
            of_rows = [*zip(*ranked, strict=True)]
            if not all_in_order:
                found = dict(zip(at, of_rows, strict=True))
                of_rows = [found.get(i, ([], [])) for i in range(len(leaves))]
            return Candidates(*_none((len(leaves), 0)), ranked=of_rows)
        ids, scores = download(ids, scores)
        if all_in_order:
            return Candidates(ids, scores)
        everyone = self.no_candidates(leaves, tails, ids.shape[1])
        place = torch.tensor(at)
        of_leaves = (place,) if self.tokens_per_leaf == 1 else (place, torch.tensor(depths))
        everyone.token_ids[of_leaves], everyone.log_q[of_leaves] = ids, scores
        return everyone

    def _parts(
        self, leaves: Sequence[Leaf], tails: Sequence[Tail]
    ) -> tuple[list[Part | BranchPart], list[Row], list[int], list[int]]:
        """The parts of the sessions, and of each row of logits the position, its leaf and its depth. A leaf that cannot
        be computed, or has no room, is in none."""
        groups: dict[str, list[int]] = {}
        for index, leaf in enumerate(leaves):
            groups.setdefault(leaf.session_id, []).append(index)
        parts: list[Part | BranchPart] = []
        rows: list[Row] = []
        at: list[int] = []
        depths: list[int] = []
        try:
            for session_id, indices in groups.items():
                session = self._session(session_id)
                usable = self._usable(session, leaves, indices)
                if not usable:
                    continue
                try:
                    part = self.part_of(session, [(leaves[i], tails[i]) for i in usable])
                except ResourceExhaustedError:
                    continue
                parts.append(part)
                for i in usable if isinstance(part, Part) else [usable[place] for place in part.placed]:
                    for depth in range(1 + len(tails[i].inputs)):
                        at.append(i)
                        depths.append(depth)
                        rows.append(Row(session.sampler, (*leaves[i].path, *tails[i].path[:depth])))
        except BaseException:
            for part in parts:
                part.drop()
            raise
        return parts, rows, at, depths

    def chains(self, session_id: str) -> bool:
        """True if ``chain`` may be called for a session: its tokens are drawn from raw logits by native functions."""
        sampler = self._session(session_id).sampler
        return (
            self._translation is None
            and self.cache.linear is None
            and self.tokens_per_leaf == 1
            and sampler.picks_at_once
            and sampler.grammar is None
            and (sampler.greedy or sampler.num_ranked > 0)
            and self.runner.chains
        )

    def chain(self, leaf: Leaf, most: int, fan_out: int, stop: Stop) -> Ranked:
        """``expand`` of a leaf, of its first candidate, of that one's, .. by one call: at most ``most`` of them.

        ``keep`` comes next. ``chains`` comes first.

        Returns:
            of each the ``fan_out`` best candidates, and their scores under the coupled rule or at temperature 0; ():
            there is no room.
        """
        session = self._session(leaf.session_id)
        try:
            first = self.part_of(session, [(leaf, NO_TAIL)])
        except ResourceExhaustedError:
            return []
        assert isinstance(first, Part), "chains comes first"
        taken = list(first.step.rows)
        try:
            rows = session.take_rows(self.cache, most - 1)
            taken += rows
            position = len(session.tokens) + len(leaf.path)
            session.positions[rows] = range(position, position + most - 1)
            sampler = session.sampler
            draw = Draw(
                seed_bits=sampler.seed_bits,
                position=Row(sampler, leaf.path).position,
                temperature=0.0 if sampler.greedy else sampler.temperature,
                top_k=sampler.top_k,
                log_min_p=sampler.log_min_p,
                fan_out=min(fan_out, self.runner.vocab_size),
            )
            then = tree_step(session, [0], [position], rows[:1], [[*first.step.own_rows[-1], *rows[:1]]])
            plans = self.runner.plan([first.step]), self.runner.plan([then])
            writes = [session.pages[row // PAGE_SIZE] * PAGE_SIZE + row % PAGE_SIZE for row in rows]
            ranked = self.runner.run_chain(Chain(*plans, rows, writes, draw, stop))
        except BaseException as error:
            session.free_rows.extend(taken)
            if isinstance(error, ResourceExhaustedError):
                return []
            raise
        first.keep()
        session.chained = rows
        return ranked

    def keep(self, session_id: str, node_ids: Sequence[int]) -> None:
        """Keeps the rows of ``chain``'s tokens that became these nodes; drops the rest."""
        session = self._session(session_id)
        for node_id, row in zip(node_ids, session.chained, strict=False):
            session.node_rows[node_id] = row
        session.free_rows.extend(session.chained[len(node_ids) :])
        session.chained = []

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Marks the rows of committed nodes as committed, and frees rows of nodes that are not ``kept``."""
        session = self._session(session_id)
        pairs: Iterable[tuple[int, int]] = zip(token_ids, node_ids, strict=True)
        if self._translation is not None:
            pairs = self._translation.committed(token_ids, node_ids)
        is_ready = session.ready
        session.follow(self.cache, pairs, kept)
        if not is_ready:  # it may wait for long: all its tokens but the last are computed in chunks
            session.num_prefill = len(session.tokens) - 1
        if len(session.tokens) > self._max_len:
            raise ResourceExhaustedError(self._too_long(len(session.tokens)))

    def shutdown(self) -> None:
        """Leaves the other ranks of the model, if there are any."""
        self.runner.close()

    def close(self, session_id: str) -> None:
        """Frees the session's pages."""
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.end(self.cache)

    def check_integrity(self) -> None:
        """Asserts that every row of every session has exactly one use; O(rows)."""
        sessions = [*self.sessions.values()]
        states = [state for session in sessions for state in session.held_states]
        self.cache.check_integrity([session.held_pages for session in sessions], states)
        for session in sessions:
            session.check_integrity()

    def _too_long(self, num_tokens: int) -> str:
        room = min(self.cache.num_pages * PAGE_SIZE, self._max_len)
        return f"the context has {num_tokens} tokens: the draft's cache holds {room}"

    def _tails(self, leaves: Sequence[Leaf]) -> list[Tail]:
        """Tokens that follow each leaf in the forward, at most ``tokens_per_leaf`` - 1 tokens."""
        return [NO_TAIL] * len(leaves)

    def _num_candidates(self, leaves: Sequence[Leaf]) -> int:
        """Candidates per node: few are enough where no session samples, as q alone orders the children then."""
        greedy = all(self.sessions[leaf.session_id].sampler.greedy for leaf in leaves)
        vocabulary = self.runner if self._translation is None else self._translation
        return min(GREEDY_CANDIDATES if greedy else self._top_m, self._top_m, vocabulary.vocab_size)

    def no_candidates(self, leaves: Sequence[Leaf], tails: Sequence[Tail], m: int) -> Candidates:
        """No candidates for anything yet."""
        shape = (len(leaves), m) if self.tokens_per_leaf == 1 else (len(leaves), self.tokens_per_leaf, m)
        return Candidates(*_none(shape), tuple(tail.path for tail in tails) if any(tail.path for tail in tails) else ())

    def _own(self, token_id: int) -> int | None:
        """The model's id of a token of a tree; None if it has none."""
        return token_id if self._translation is None else self._translation.token(token_id)

    def _owned(self, token_ids: Sequence[int]) -> list[int]:
        """The model's ids of tokens that all have one (``_usable``)."""
        return [own for own in map(self._own, token_ids) if own is not None]

    def _usable(self, session: RowSession, leaves: Sequence[Leaf], indices: list[int]) -> list[int]:
        """The leaves that the model can compute: all tokens on the path are its own, and one is to be computed."""
        pending = session.num_cached < len(session.tokens)
        if self._translation is None:
            return indices if pending else [i for i in indices if leaves[i].path]
        return [
            i
            for i in indices
            if (leaves[i].path or pending) and None not in map(self._translation.token, leaves[i].path)
        ]

    def part_of(self, session: RowSession, leaves: Sequence[tuple[Leaf, Tail]]) -> Part | BranchPart:
        """Returns one session's part of the forward: pending tokens, nodes without rows above leaves, then every leaf
        and its tail, which have logits.

        This is one token per leaf if the drafter drafts one token per leaf. Then the engine gives only leaves as nodes,
        and pending tokens only with the anchor (``protocol.py``).

        Raises:
            ResourceExhaustedError: there is no room for the rows.
        """
        if isinstance(session, BranchSession):
            return session.part(
                self.cache, [(leaf.path_ids, self._owned(leaf.path), tail.inputs) for leaf, tail in leaves]
            )
        num_tokens, pending = len(session.tokens), session.tokens[session.num_cached :]
        missing: dict[int, tuple[Leaf, int]] = {}  # a leaf below, and the index in its path, by node: ancestors first
        for leaf, _ in leaves:
            for depth, node_id in enumerate(leaf.path_ids[:-1]):
                if node_id not in session.node_rows:
                    missing[node_id] = leaf, depth
        tokens, positions, num_logits = [*pending], [*range(session.num_cached, num_tokens)], 0
        for leaf, depth in missing.values():
            tokens += self._owned(leaf.path[depth : depth + 1])
            positions.append(num_tokens + depth)
        for leaf, tail in leaves:
            block = [*self._owned(leaf.path[-1:]), *tail.inputs]
            first = num_tokens + len(leaf.path) - bool(leaf.path)
            tokens += block
            positions += range(first, first + len(block))
            num_logits += 1 + len(tail.inputs)
        rows = session.take_rows(self.cache, len(tokens))
        num_pending, row_positions = len(pending), session.positions
        for row, position in zip(rows, positions, strict=True):
            row_positions[row] = position
        before, at = rows[:num_pending], num_pending + len(missing)
        own_rows = [rows[: i + 1] for i in range(num_pending)]  # that each token sees besides the committed ones
        kept = dict(zip(missing, rows[num_pending:at], strict=True))
        node_rows = session.node_rows | kept if kept else session.node_rows
        for leaf, depth in missing.values():
            own_rows.append([*before, *map(node_rows.__getitem__, leaf.path_ids[: depth + 1])])
        for leaf, tail in leaves:
            above = [*before, *map(node_rows.__getitem__, leaf.path_ids[:-1])]
            if leaf.path:
                kept[leaf.node_id] = rows[at]
            for row in rows[at : at + len(tail.inputs) + bool(leaf.path)]:
                above.append(row)
                own_rows.append([*above])
                at += 1
        return Part(session, tree_step(session, tokens, positions, rows, own_rows, num_logits), num_pending, kept)


def _none(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Token ids and log q of no candidates."""
    return torch.zeros(shape, dtype=torch.long), torch.full(shape, float("-inf"))
