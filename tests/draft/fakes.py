"""A drafter and a target whose distributions are fixed functions of the text: cheap, and known exactly."""

import math
import random
from collections.abc import Sequence

import torch
from tests.support.noise import gumbel_at

from paceline.core.noise import Stream, seed_bits
from paceline.core.processors import SamplerState
from paceline.core.tree import Proposal, SpeculationTree
from paceline.draft.engine import DraftEngine
from paceline.drafters.protocol import Candidates, DrafterSessionError, Leaf, Plain
from paceline.messages import CloseSession, Commit, Nodes, OpenSession, SessionFailed
from paceline.types import Cause, SamplingParams, SpeculationParams

VOCAB = 12


def logits(text: Sequence[int], *, sharpness: float = 2.0, salt: int = 0) -> list[float]:
    """[VOCAB] logits that depend on the last three tokens."""
    rng = random.Random(hash((salt, *text[-3:])))
    return [sharpness * rng.gauss(0, 1) for _ in range(VOCAB)]


def draft_logits(text: Sequence[int]) -> list[float]:
    """The target's logits with some noise of their own."""
    own = logits(text, sharpness=0.7, salt=1)
    return [a + b for a, b in zip(logits(text), own, strict=True)]


def target_token(text: Sequence[int], seed: int, *, greedy: bool) -> int:
    """What plain decoding says next."""
    scores = torch.tensor(logits(text), dtype=torch.float64).log_softmax(-1)
    if not greedy:
        ids = torch.arange(VOCAB)[None]
        seeds, positions = torch.tensor([seed_bits(seed)]), torch.tensor([len(text)])
        scores += gumbel_at(seeds, positions, Stream.COUPLED, ids)[0]
    return int(scores.argmax())


class TableDrafter(Plain):
    """A `Drafter` with chunked prefill that checks what it is asked for and counts the rows it computes."""

    kind = "table"
    tokens_per_leaf = 1
    conditional = True

    def __init__(self, *, max_leaves: int = 8, prefill_chunk: int = 4, m: int = VOCAB) -> None:
        self.max_leaves = max_leaves
        self.m = m
        self.broken: set[str] = set()
        """Sessions for which `expand` raises."""
        self.anonymous_errors = False
        self.silent = False
        """No candidates for anything."""
        self.rows_computed: dict[str, int] = {}
        self.anchor_rows: list[int] = []
        """Pending tokens computed by each expansion of an anchor."""
        self._chunk = prefill_chunk
        self._texts: dict[str, list[int]] = {}
        self._cached: dict[str, int] = {}
        self._to_prefill: dict[str, int] = {}
        self._rows: dict[str, set[int]] = {}
        self._anchors: dict[str, int] = {}

    def open(self, session_id: str, token_ids: Sequence[int], sampler: SamplerState, salt: str = "") -> None:
        assert session_id not in self._texts
        self._texts[session_id] = list(token_ids)
        self._cached[session_id] = 0
        self._to_prefill[session_id] = len(token_ids) - 1
        self._rows[session_id] = set()
        self._anchors[session_id] = 0
        self.rows_computed[session_id] = 0

    def prefill(self) -> bool:
        for session_id, end in self._to_prefill.items():
            if self._cached[session_id] < end:
                self._cached[session_id] = min(end, self._cached[session_id] + self._chunk)
                return True
        return False

    def ready(self, session_id: str) -> bool:
        return self._cached[session_id] >= self._to_prefill[session_id]

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        assert 1 <= len(leaves) <= self.max_leaves
        at_fault = [leaf.session_id for leaf in leaves if leaf.session_id in self.broken]
        if at_fault:
            raise ValueError("boom") if self.anonymous_errors else DrafterSessionError(at_fault[0], "boom")
        ids = {(leaf.session_id, leaf.node_id) for leaf in leaves}
        rows = []
        for leaf in leaves:
            session_id, held = leaf.session_id, self._rows[leaf.session_id]
            text = self._texts[session_id]
            assert self.ready(session_id)
            if leaf.path:
                above = (self._anchors[session_id], *leaf.path_ids[:-1])
                assert leaf.path_ids[-1] == leaf.node_id
                assert self._cached[session_id] == len(text), "the anchor was not expanded before"
                assert set(above[1:]) <= held, "a node above the leaf has no row"
                assert leaf.node_id not in held, "computed twice"
                assert not ids & {(session_id, node_id) for node_id in above}
                held.add(leaf.node_id)
                self.rows_computed[session_id] += 1
            else:
                assert leaf.node_id == self._anchors[session_id]
                pending = len(text) - self._cached[session_id]
                assert pending >= 1, "the anchor was expanded before"
                self._cached[session_id] = len(text)
                self.rows_computed[session_id] += pending
                self.anchor_rows.append(pending)
            rows.append(draft_logits([*text, *leaf.path]))
        log_q, token_ids = torch.tensor(rows).log_softmax(-1).topk(self.m)
        return Candidates(token_ids, torch.full_like(log_q, -math.inf) if self.silent else log_q)

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Sequence[int], kept: Sequence[int]) -> None:
        text, held = self._texts[session_id], self._rows[session_id]
        assert len(token_ids) == len(node_ids) >= 1
        assert list(node_ids) == sorted(node_ids)
        for token_id, node_id in zip(token_ids, node_ids, strict=True):
            if node_id in held:
                assert self._cached[session_id] == len(text)
                self._cached[session_id] += 1
            text.append(token_id)
        assert set(kept) <= held - set(node_ids)
        self._rows[session_id] = set(kept)
        self._anchors[session_id] = node_ids[-1]

    def close(self, session_id: str) -> None:
        for table in (self._texts, self._cached, self._to_prefill, self._rows, self._anchors):
            table.pop(session_id, None)

    def check_integrity(self) -> None:
        assert self._texts.keys() == self._rows.keys() == self._cached.keys()


class FakeTarget:
    """One session on the target's side under the coupled rule, with its own copy of the tree."""

    def __init__(self, open_: OpenSession) -> None:
        self.text = list(open_.token_ids)
        self.open = open_
        self.k = open_.speculation.max_draft_tokens
        self.tree = SpeculationTree(VOCAB, len(self.text))
        self.idle = False
        self.proposals: list[Proposal] = []
        self.causes: list[Cause] = []

    def receive(self, message: Nodes) -> None:
        added = self.tree.add(message.nodes)
        assert not added.invalid
        assert not added.dropped
        if message.context_len == len(self.text):
            self.idle = message.idle
            assert not self.tree.lost

    def begin(self) -> Proposal:
        """The proposal whose verification starts."""
        proposal = self.tree.proposal(self.k)
        self.proposals.append(proposal)
        return proposal

    def end(self, proposal: Proposal) -> tuple[int, ...]:
        """Verifies it: the accepted tokens and the next one."""
        tokens: list[int] = []
        greedy = self.open.sampling.temperature == 0
        for drafted in (*proposal.token_ids, None):
            token = target_token([*self.text, *tokens], self.open.seed, greedy=greedy)
            tokens.append(token)
            if token != drafted:
                break
        self.text += tokens
        self.causes.append(self.tree.walk(tokens).cause)
        self.tree.check_integrity()
        self.idle = False
        return tuple(tokens)


def open_session(
    session_id: str = "s",
    *,
    epoch: int = 0,
    text: Sequence[int] = (1, 2, 3),
    seed: int = 7,
    temperature: float = 1.0,
    **speculation: object,
) -> OpenSession:
    """A session to open on both sides."""
    return OpenSession(
        session_id,
        epoch,
        tuple(text),
        len(text),
        seed,
        SamplingParams(temperature=temperature),
        SpeculationParams.model_validate({"max_draft_tokens": 4, **speculation}),
    )


class Harness:
    """A draft engine and the targets of its sessions, in sequence."""

    def __init__(self, drafter: TableDrafter | None = None, **options: int) -> None:
        self.drafter = drafter or TableDrafter()
        self.sent: list[Nodes | SessionFailed] = []
        self.emits = 0
        # Time stands still: what is sent with what does not depend on the machine.
        self.engine = DraftEngine(self.drafter, self._emit, vocab_size=VOCAB, clock=lambda: 0.0, **options)
        self.targets: dict[str, FakeTarget] = {}

    def open(self, message: OpenSession) -> None:
        self.targets[message.session_id] = FakeTarget(message)
        self.engine.receive([message])

    def close(self, session_id: str) -> None:
        target = self.targets.pop(session_id)
        self.engine.receive([CloseSession(session_id, target.open.epoch)])

    def round(self, draft_steps: int) -> None:
        """Every target verifies what it has while the draft takes some steps; then the outcomes commit."""
        chains = {}
        for session_id, target in self.targets.items():
            chains[session_id] = target.begin()
            commit = Commit(session_id, target.open.epoch, len(target.text), (), chains[session_id].node_ids)
            self.engine.receive([commit])
        self.steps(draft_steps)
        for session_id, target in self.targets.items():
            context_len = len(target.text)
            tokens = target.end(chains[session_id])
            self.engine.receive([Commit(session_id, target.open.epoch, context_len, tokens)])
        self.engine.check_integrity()

    def steps(self, count: int) -> int:
        """At most `count` steps; how many did something."""
        done = 0
        while done < count and self.engine.step():
            done += 1
            self.engine.check_integrity()
        return done

    def _emit(self, messages: Sequence[Nodes | SessionFailed]) -> None:
        self.emits += 1
        self.sent += messages
        for message in messages:
            target = self.targets.get(message.session_id)
            if target and isinstance(message, Nodes) and message.epoch == target.open.epoch:
                target.receive(message)


def plain(open_: OpenSession, num_tokens: int) -> list[int]:
    """The text without any draft."""
    text = list(open_.token_ids)
    for _ in range(num_tokens):
        text.append(target_token(text, open_.seed, greedy=open_.sampling.temperature == 0))
    return text
