"""A head that knows the future of its texts and checks everything that it is fed with, row by row.

On its row of the target's pages it keeps what it was given there: a signature of the state of P, and the token at P+1.
Asked for tokens it reads all rows of the session back through the page table. It answers with the true next tokens if
each row is what it must be, and with wrong ones if any is not: so its acceptance is 1 if states, tokens, positions and
pages are right, and falls if one of them is off by one anywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.processors import SamplerState
from paceline.drafters.protocol import Candidates, DrafterSessionError, Fed, Leaf, Plain
from paceline.model.features import Features
from paceline.model.kv_cache import KVCache, LayerSpec, flat_rows
from paceline.model.loading import LoadedModel
from paceline.model.step_plan import SequenceStep
from paceline.types import PAGE_SIZE, pages_for


def signature(states: Tensor) -> Tensor:
    """[n, width] -> [n]: one number of each state, which hardly any other state has."""
    weights = torch.linspace(1.0, 2.0, states.shape[1]).cos()
    return states.float() @ weights


def signatures(model: LoadedModel, text: Sequence[int]) -> Tensor:
    """[len(text)]: those of a text, computed at once."""
    runner = model.runner(pages_for(len(text)) + 1)
    pages, span = runner.cache.allocate(pages_for(len(text))), range(len(text))
    return signature(runner.forward_with_states([SequenceStep(list(text), span, span, pages, len(text))])[1])


@dataclass
class _Session:
    text: list[int]
    length: int
    pages: Sequence[int] = ()
    num_fed: int = 0
    holes: tuple[range, ...] = ()
    last: float = float("nan")
    """Signature of the last state."""


@dataclass
class Oracle(Plain):
    """Implements ``Head``. ``texts``: whole texts, by which prompts are recognized, and their signatures."""

    texts: list[tuple[list[int], Tensor]]
    features: Features | None
    paged: bool = True
    """It keeps rows on the pages; else it checks the last state alone."""
    tokens_per_leaf: int = 1
    kind: str = "oracle"
    max_leaves: int = 3
    conditional: bool = True
    vocab_size: int = 300
    sessions: dict[str, _Session] = field(default_factory=dict)
    rows_checked: int = 0
    rows_missed: int = 0
    """Rows of holes, each when it was first told of."""
    wrong: list[str] = field(default_factory=list)
    """What was not as it must be."""
    breaks_at: int = 1 << 30
    """Calls of ``feed`` after which it raises."""
    refuses: frozenset[str] = frozenset()
    """Sessions for which it raises when they are fed."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return (LayerSpec(1, 1, 1),) if self.paged else ()

    def bind(self, cache: KVCache, first_layer: int) -> None:
        self.cache, self.first_layer = cache, first_layer

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        assert session_id not in self.sessions
        text = next(text for text, _ in self.texts if text[: len(token_ids)] == list(token_ids))
        self.sessions[session_id] = _Session(text, len(token_ids))

    def ready(self, session_id: str) -> bool:
        session = self.sessions[session_id]
        return session.num_fed == session.length - 1

    def feed(self, fed: Sequence[Fed]) -> None:
        self.breaks_at -= 1
        if self.breaks_at < 0:
            raise RuntimeError("the head is broken")
        for item in fed:
            if item.session_id in self.refuses:
                raise DrafterSessionError(item.session_id, "is refused")
        for item in fed:
            session, n = self.sessions[item.session_id], len(item.token_ids)
            assert len(item.states) == n >= 1
            gap = item.holes[-1] if item.holes and item.holes[-1].stop == item.position + 1 else range(0)
            self.rows_missed += len(gap)
            session.pages, session.num_fed, session.holes = item.pages, item.position + n, item.holes
            assert session.num_fed < session.length <= session.num_fed + 1 or session.num_fed < session.length
            found = signature(item.states)
            session.last = float(found[-1])
            if self.paged:
                rows = torch.tensor(flat_rows(item.pages, item.position + 1, item.position + 1 + n))
                keys, values = (pool[self.first_layer].view(-1) for pool in (self.cache.keys, self.cache.values))
                keys[rows], values[rows] = found, torch.tensor(item.token_ids, dtype=torch.float32)

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        assert 1 <= len(leaves) <= self.max_leaves
        token_ids = torch.zeros(len(leaves), self.tokens_per_leaf, 2, dtype=torch.long)
        log_q = torch.full((len(leaves), self.tokens_per_leaf, 2), float("-inf"))
        for i, leaf in enumerate(leaves):
            session = self.sessions[leaf.session_id]
            right = self._holds(session, leaf.session_id)
            for d in range(self.tokens_per_leaf):
                at = session.length + len(leaf.path) + d
                if at < len(session.text):
                    token = session.text[at]
                    token_ids[i, d] = torch.tensor(
                        [token if right else (token + 1) % self.vocab_size, (token + 2) % 300]
                    )
                    log_q[i, d] = torch.tensor([-0.01, -40.0])
        if self.tokens_per_leaf == 1:
            token_ids, log_q = token_ids[:, 0], log_q[:, 0]
        return Candidates(token_ids, log_q)

    def _holds(self, session: _Session, name: str) -> bool:
        """True if everything that was fed of the session is as it must be."""
        if self.features is None:
            return True
        end = session.length - 1  # positions [0, end) have been fed
        expected = next(signs for text, signs in self.texts if text is session.text)[:end]
        if not self.paged:
            found, expected = torch.tensor([session.last]), expected[-1:]
        else:
            rows = torch.tensor(flat_rows(session.pages, 1, end + 1))
            keys, values = (pool[self.first_layer].view(-1) for pool in (self.cache.keys, self.cache.values))
            found = keys[rows]
            tokens = values[rows].long().tolist()
            for hole in session.holes:
                found[hole.start - 1 : hole.stop - 1] = expected[hole.start - 1 : hole.stop - 1]
                tokens[hole.start - 1 : hole.stop - 1] = session.text[hole.start : hole.stop]
            if tokens != session.text[1 : end + 1]:
                at = next(i for i, (a, b) in enumerate(zip(tokens, session.text[1:], strict=False)) if a != b)
                self.wrong.append(f"{name}: the token of row {at + 1} of {end}")
                return False
            self.rows_checked += end
        off = (found - expected).abs() > 1e-3
        if off.any():
            self.wrong.append(f"{name}: the state of row {int(off.nonzero()[0]) + 1} of {end} (page {PAGE_SIZE})")
        return not off.any()

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        session = self.sessions[session_id]
        assert session.text[session.length : session.length + len(token_ids)] == list(token_ids)
        assert len(token_ids) == len(node_ids)
        session.length += len(token_ids)

    def close(self, session_id: str) -> None:
        self.sessions.pop(session_id, None)
