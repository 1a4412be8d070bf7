"""Implements the ``Head`` protocol for all modules of this package: their sessions, in batches.

The states of a target's step are fed in one call. Their rows go through ``step`` at depth 0. The rows' keys and values
go to the session's own pages: row P + 1 for the state of P. Each session keeps its last state for its anchor. Nodes
below the anchor go through deeper steps. The session keeps the results of these steps until the target has decided
otherwise. Decided tokens are computed again from the target's own states.

A head drafts all depths when its anchor is expanded if it makes them in one pass, or if its depths do not depend on
tokens. Deeper nodes are then rows of that pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import draft_candidates
from paceline.drafters.heads.module import HeadModule
from paceline.drafters.heads.paged import Branches, Paged, Part
from paceline.drafters.protocol import Candidates, DrafterSessionError, Features, Fed, Leaf, OfSessions
from paceline.model.kv_cache import KVCache
from paceline.types import PAGE_SIZE

TOP_M = 256
"""Candidates of a leaf. The noise of a session that samples may choose any of them.

At temperature 1, a round of 4 tokens of the embedded MTP head brings 0.77 tokens with 16 candidates, 0.96 with 256, and
1.03 with all 4,096.
"""

LEAST_CONFIDENCE = 0.02
"""Least probability, by the head's own confidence (DSpark), that the next token and all before it are accepted.

A proposal ends where the probability is lower. It does not depend on tokens that are drawn later, so the rejection rule
stays exact.
"""


@dataclass(slots=True)
class _Session:
    sampler: SamplerState
    num_tokens: int
    """Length of the context; the anchor is its last token."""
    num_fed: int = 0
    """Positions whose states have come, or lie on cached pages: those below it."""
    anchor: int = 0
    """The last token that came with these states."""
    pages: Sequence[int] = ()
    holes: tuple[range, ...] = ()
    """Rows on the pages that hold nothing of this session (``Fed.holes``)."""
    states: list[Tensor] = field(default_factory=list)
    """[state_size] after the last fed token, for each variant of the module."""
    ahead: Tensor | None = None
    """Results of one pass for all depths: states [max_depth, state_size] of a ``parallel`` head, logits [max_depth,
    draft vocabulary] of another unconditional one; None: not computed since the last feed, or of no such head."""
    nodes: dict[int, Tensor] = field(default_factory=dict)
    """[state_size] after each expanded node below the anchor."""
    branches: dict[int, Branches] = field(default_factory=dict)
    """Keys and values of these nodes, by layer."""

    @property
    def ready(self) -> bool:
        return bool(self.states) and self.num_fed == self.num_tokens - 1


class HeadDrafter(OfSessions[_Session]):
    """Implements ``paceline.drafters.protocol.Head`` for every ``HeadModule``."""

    def __init__(
        self,
        module: HeadModule,
        *,
        kind: str,
        features: Features,
        vocab_size: int,
        max_leaves: int = 64,
        num_candidates: int = TOP_M,
        fused: bool = False,
    ) -> None:
        """Makes a drafter of a loaded module.

        Args:
            module: the head, on the target's device.
            kind: its method, as the configuration names it.
            features: the target's states that it reads.
            vocab_size: of the target.
            max_leaves: the most leaves of one ``expand``.
            num_candidates: candidates of each leaf.
            fused: True: its input states are fused already (``HeadModule.fuse``).
        """
        self._fused = fused
        self.module = module.eval().requires_grad_(False)
        self.kind, self.features, self.max_leaves = kind, features, max_leaves
        self.layers, self.conditional = module.layers_kv, module.conditional
        self._vocab_size, self._top_m = vocab_size, min(num_candidates, vocab_size)
        self.sessions: dict[str, _Session] = {}
        self.cache: KVCache | None = None
        self._first_layer = 0

    def bind(self, cache: KVCache, first_layer: int) -> None:
        """Keeps keys and values in ``cache.keys[first_layer:]``, one entry per layer of the head; one that is
        ``on_target`` reads the target's own."""
        self.cache, self._first_layer = cache, 0 if self.module.on_target else first_layer

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        """Opens any session. It is ready once it has been fed."""
        self.sessions[session_id] = _Session(sampler, len(token_ids))

    def feed(self, fed: Sequence[Fed]) -> None:
        """Computes the rows of new committed tokens from the target's states.

        Raises:
            DrafterSessionError: states of a session do not continue its earlier ones; nothing was changed.
        """
        for each in fed:
            session = self._session(each.session_id)
            if len(each.states) != len(each.token_ids) or not each.token_ids:
                raise DrafterSessionError(
                    each.session_id, f"fed {len(each.states)} states and {len(each.token_ids)} tokens"
                )
            resumed = (each.position + 1) % PAGE_SIZE == 0  # after a prefix that was found in the cache
            resumed |= bool(each.holes) and each.holes[-1].stop == each.position + 1
            if self.features.every_position and session.states and each.position > session.num_fed and not resumed:
                raise DrafterSessionError(
                    each.session_id,
                    f"fed states from position {each.position}; the states from {session.num_fed} are missing",
                )
        if not fed:
            return
        part_of = slice(None) if self.features.every_position else slice(-1, None)
        parts: list[Part] = []
        tokens: list[int] = []
        for each in fed:
            positions = list(range(each.position + 1, each.position + 1 + len(each.token_ids)))[part_of]
            start = len(tokens)
            tokens.extend(each.token_ids[part_of])
            num_rows = positions[-1] + 1
            part = Part(start, len(tokens), positions, each.pages, 1, num_rows, each.holes, write=True)
            parts.append(keyless_part(part) if self.module.keyless else part)
        made: list[Tensor] = []
        with torch.inference_mode():
            given = torch.cat([each.states[part_of] for each in fed])
            states = (given if self._fused else self.module.fuse(given))[None]
            ids = torch.tensor([tokens], device=states.device)
            at = _positions(parts, states.device)
            for variant in range(self.module.num_variants if self.layers else 1):
                if variant:
                    states = self._shifted(fed, parts, made[-1], variant)
                    for part in parts:
                        part.first_row = 1 + variant
                made.append(self.module.step(ids, states, at, self._attend(parts), variant))
        for each, part in zip(fed, parts, strict=True):
            session = self.sessions[each.session_id]
            session.states = [states[0, part.stop - 1].clone() for states in made]
            session.num_fed, session.pages = each.position + len(each.token_ids), each.pages
            session.holes, session.anchor, session.ahead = each.holes, each.token_ids[-1], None

    def _shifted(self, fed: Sequence[Fed], parts: Sequence[Part], states: Tensor, variant: int) -> Tensor:
        """For each row, the state after the previous row, which the next module takes; zeros where there is none."""
        out = torch.roll(states, 1, 1)
        for each, part in zip(fed, parts, strict=True):
            session = self.sessions[each.session_id]
            known = session.states if each.position == session.num_fed else []
            out[0, part.start] = known[variant - 1] if known else 0
        return out

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """Candidates of the leaves; none for a session that is not ready and beyond the depths that the head has."""
        most = self.module.max_depth
        usable = [
            index
            for index, leaf in enumerate(leaves)
            if self._session(leaf.session_id).ready and (most is None or len(leaf.path) < most)
        ]
        with torch.inference_mode():
            if self.module.parallel:
                self._look_ahead({leaves[i].session_id for i in usable})
                usable = self._trusted(leaves, usable)
            elif self.conditional:
                self.expand_nodes([leaves[i] for i in usable if leaves[i].path])
            else:
                self._predict_all({leaves[i].session_id for i in usable})
            groups: dict[int, list[int]] = {}
            for index in usable:
                groups.setdefault(self._variant(len(leaves[index].path)), []).append(index)
            made = [(indices, *self._candidates([leaves[i] for i in indices], v)) for v, indices in groups.items()]
        return Candidates.of_some(len(leaves), made)

    def _candidates(self, leaves: Sequence[Leaf], variant: int) -> tuple[Tensor, Tensor]:
        """Ids and log q of leaves of one variant, on the host."""
        logits = self.module.to_target_ids(self._logits(leaves, variant), self._vocab_size)
        ids, scores = draft_candidates(logits, [self._row(leaf) for leaf in leaves], self._top_m)
        return ids.cpu(), scores.cpu()

    def continue_to(self, leaves: Sequence[Leaf]) -> None:
        """Computes the states of nodes whose parents have theirs, without candidates; not of a head of ``parallel``
        or unconditional depths, which needs none."""
        if self.conditional and not self.module.parallel:
            with torch.inference_mode():
                self.expand_nodes(leaves)

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        """Moves the anchor on; of nodes that are not ``kept`` nothing stays."""
        session = self._session(session_id)
        session.num_tokens += len(token_ids)
        keep = set(kept)
        session.nodes = {node: state for node, state in session.nodes.items() if node in keep}
        for branches in session.branches.values():
            branches.keep(keep)

    def check_integrity(self) -> None:
        """Asserts that every node has one state and one row per layer that computed it."""
        for session in self.sessions.values():
            for branches in session.branches.values():
                assert set(branches.nodes) <= session.nodes.keys(), "a row of a node that is gone"
                assert len(set(branches.nodes)) == len(branches.nodes), "two rows of one node"
                assert branches.keys is None or len(branches.keys) == len(branches.nodes)

    def _attend(self, parts: Sequence[Part]) -> Paged:
        return Paged(self.cache, self._first_layer, parts)

    def _row(self, leaf: Leaf) -> Row:
        """Returns the row that decides how the token after a leaf is chosen. Tokens that the sampler already knows are
        context.
        """
        session = self.sessions[leaf.session_id]
        return Row(session.sampler, leaf.path[session.sampler.num_tokens - session.num_tokens :])

    def _variant(self, depth: int) -> int:
        """The weights of a depth."""
        return min(depth, self.module.num_variants - 1)

    def _state(self, leaf: Leaf) -> Tensor:
        """[state_size] from which the leaf's logits come; of a head of ``_predict_all`` the logits."""
        session = self.sessions[leaf.session_id]
        if session.ahead is not None:
            return session.ahead[len(leaf.path)]
        return session.nodes[leaf.node_id] if leaf.path else session.states[0]

    def _logits(self, leaves: Sequence[Leaf], variant: int) -> Tensor:
        """[num_leaves, draft vocabulary] of leaves of one variant."""
        states = torch.stack([self._state(leaf) for leaf in leaves])
        if not (self.conditional or self.module.parallel):
            return states
        last = torch.tensor([self._tokens(leaf)[-1] for leaf in leaves], device=states.device)
        return self.module.predict(states, last, variant)

    def expand_nodes(self, leaves: Sequence[Leaf]) -> None:
        """Computes the rows of nodes below anchors, one call per variant of the module."""
        groups: dict[int, list[Leaf]] = {}
        for leaf in leaves:
            if leaf.node_id not in self.sessions[leaf.session_id].nodes:
                groups.setdefault(self._variant(len(leaf.path)), []).append(leaf)
        for variant, group in groups.items():
            group.sort(key=lambda leaf: leaf.session_id)
            parts: list[Part] = []
            owners: list[tuple[_Session, list[Leaf]]] = []
            states: list[Tensor] = []
            for leaf in group:
                session = self.sessions[leaf.session_id]
                states.append(session.nodes[leaf.path_ids[-2]] if len(leaf.path) > 1 else session.states[0])
                if not owners or owners[-1][0] is not session:
                    owners.append((session, []))
                owners[-1][1].append(leaf)
            start = 0
            for session, own in owners:
                positions = [session.num_tokens - 1 + len(leaf.path) for leaf in own]
                first = 1 + variant if self.layers else 1
                part = Part(start, start + len(own), positions, session.pages, first, session.num_tokens, session.holes)
                part.above, part.branches = [list(leaf.path_ids[:-1]) for leaf in own], session.branches
                parts.append(keyless_part(part) if self.module.keyless else part)
                start = part.stop
            device = states[0].device
            ids = torch.tensor([[leaf.path[-1] for _, own in owners for leaf in own]], device=device)
            at = _positions(parts, device)
            made = self.module.step(ids, torch.stack(states)[None], at, self._attend(parts), variant)[0]
            for (session, own), part in zip(owners, parts, strict=True):
                nodes = [leaf.node_id for leaf in own]
                session.nodes.update(zip(nodes, made[part.start : part.stop].clone(), strict=True))
                for layer, (keys, values) in part.made.items():
                    session.branches.setdefault(layer, Branches()).append(nodes, part.positions, keys, values)

    def _without_ahead(self, session_ids: set[str]) -> list[_Session]:
        return [s for name in sorted(session_ids) if (s := self.sessions[name]).ahead is None]

    def _predict_all(self, session_ids: set[str]) -> None:
        """The logits of all depths of sessions in one pass (Medusa)."""
        if not (sessions := self._without_ahead(session_ids)):
            return
        made = self.module(torch.stack([session.states[0] for session in sessions]))
        for session, ahead in zip(sessions, made.unbind(1), strict=True):
            session.ahead = ahead

    def _look_ahead(self, session_ids: set[str]) -> None:
        """All depths of sessions in one pass over rows that the head fills in by itself (P-EAGLE, streams)."""
        if not (sessions := self._without_ahead(session_ids)):
            return
        parts: list[Part] = []
        rows = self.module.ahead_rows
        for index, session in enumerate(sessions):
            first, num_rows = (0, session.num_tokens - 1) if self.module.on_target else (1, session.num_tokens)
            start, positions = index * rows, [num_rows + i for i in range(rows)]
            part = Part(start, start + rows, positions, session.pages, first, num_rows, session.holes)
            part.chain, part.bidirectional = True, self.module.bidirectional
            parts.append(part)
        states = torch.stack([session.states[0] for session in sessions])
        anchors = torch.tensor([session.anchor for session in sessions], device=states.device)
        made = self.module.ahead(anchors, states, _positions(parts, states.device), self._attend(parts))
        for session, ahead in zip(sessions, made, strict=True):
            session.ahead = ahead

    def _trusted(self, leaves: Sequence[Leaf], indices: list[int]) -> list[int]:
        """Leaves below which the head expects a token to be accepted, by its own confidence; all if it has none."""
        if not indices:
            return indices
        states: list[Tensor] = []
        tokens: list[int] = []
        for i in indices:
            ahead = self.sessions[leaves[i].session_id].ahead
            assert ahead is not None
            tokens += self._tokens(leaves[i])
            states.append(ahead[: len(leaves[i].path) + 1])
        stacked = torch.cat(states)
        confidence = self.module.confidence(stacked, torch.tensor(tokens, device=stacked.device))
        if confidence is None:
            return indices
        by_leaf = torch.split(confidence.float().cpu(), [len(part) for part in states])
        return [i for i, each in zip(indices, by_leaf, strict=True) if float(each.prod()) >= LEAST_CONFIDENCE]

    def _tokens(self, leaf: Leaf) -> list[int]:
        """The anchor and the tokens below it."""
        return [self.sessions[leaf.session_id].anchor, *leaf.path]


def keyless_part(part: Part) -> Part:
    """The rows of a ``keyless`` head: at the anchor's position, over the target's rows before it."""
    anchor = part.num_rows - 1
    positions = [anchor] * len(part.positions)
    return Part(part.start, part.stop, positions, part.pages, 0, anchor, alone=True)


def _positions(parts: Sequence[Part], device: torch.device) -> Tensor:
    """[1, rows] of a call."""
    return torch.tensor([[position for part in parts for position in part.positions]], device=device)
