"""Accepting or rejecting draft tokens, and drawing them under the rejection rule. Pure functions.

Coupled rule (and temperature 0 under both rules): the target samples its own token at every row and accepts a draft
token that equals it. So the text is the target's own, for any proposal: a chain, or a subtree, in which the path of
accepted tokens is followed.

Rejection rule (Leviathan, Kalman, Matias 2211.17192, theorem 1): with p the target's and q the draft's
distribution at a position, accept the draft token x with probability min(1, p(x) / q(x)), else draw from
norm(max(p - q, 0)). It takes chains only. For every token v, given x ~ q:

    P(v) = q(v) min(1, p(v) / q(v)) + (1 - sum_w min(p(w), q(w))) * norm(max(p - q, 0))(v)
         = min(p(v), q(v)) + max(p(v) - q(v), 0) = p(v)

This holds for any q, so q may be truncated, scaled (Saguaro) or one-hot, as long as x was really drawn from
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core import rows as native
from paceline.core.deferred import DeferredChecks, Download, upload
from paceline.core.logprobs import logprobs_at
from paceline.core.noise import Stream, gumbel_argmax, uniform
from paceline.core.processors import Row, digest
from paceline.core.sampling import (
    ProcessedRows,
    pick,
    pick_unprocessed,
    picked_on_cuda,
    process,
    sampled,
)
from paceline.core.sparse import TOLERANCE, Columns, normalized, packed, paired, probability
from paceline.core.tree import Proposal, num_equal
from paceline.errors import EngineError
from paceline.messages import SparseDistribution, record
from paceline.types import Acceptance, TopLogprobs


@record
class Verdict:
    """The target's decision about one proposal."""

    num_accepted: int
    token_ids: tuple[int, ...]
    """The accepted tokens, then the next token."""
    logprobs: tuple[float, ...]
    """Log-probability of each token, by the ``logprobs_mode`` of its session."""
    num_invalid: int = 0
    """Draft tokens that were ignored because the first of them has an invalid q."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """Likeliest tokens at the position of each token, if the session asks for them."""

    def rows(self, proposal: Proposal) -> list[int]:
        """Rows, within the session's, at which the tokens were decided."""
        return [0, *(1 + index for index in proposal.along(self.token_ids[: self.num_accepted]))]


class Choices(Protocol):
    """The target's random choices under the rejection rule."""

    def accept(self, row: int, probability: float) -> bool:
        """True with the given probability, independently for each row."""

    def draw(self, rows: Sequence[int], weights: Tensor) -> list[int]:
        """One token id per row from weights [len(rows), vocab] float64, which need not be normalized."""


class KeyedChoices:
    """Choices by keyed noise: identical at every repetition, on every device.

    The noise that draws a recovered or a bonus token is keyed by the text before it, too. A draft guesses these tokens
    by the same noise (``best_recovered``), so its next nodes and their time depend on the noise of one text. Its
    decision to propose a token after another text must not depend on that noise.
    """

    def __init__(self, processed: ProcessedRows) -> None:
        self._processed = processed
        self._uniforms = uniform(processed.seeds, processed.positions, Stream.ACCEPT).tolist()

    def accept(self, row: int, probability: float) -> bool:
        """``u < probability`` with u in [0, 1): never at 0, always at 1."""
        return bool(self._uniforms[row] < probability)

    def draw(self, rows: Sequence[int], weights: Tensor) -> list[int]:
        """The Gumbel-max trick, with noise by which nothing else is drawn."""
        index = upload(rows, weights.device)
        seeds, positions = self._processed.seeds[index], self._processed.positions[index]
        texts = upload([self._processed.rows[row].text_key for row in rows], weights.device)
        token_ids: list[int] = gumbel_argmax(weights.log(), seeds, positions, Stream.RECOVER, texts).tolist()
        return token_ids


def acceptance_probability(p: float, q: float) -> float:
    """min(1, p(x) / q(x)) for a draft token x with q(x) > 0."""
    return min(1.0, p / q)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), not normalized: the distribution of a recovered token. Any shape."""
    return (p - q).clamp(min=0.0)


def decide(
    logits: Tensor, rows: Sequence[Row], proposals: Sequence[Proposal], rules: Sequence[Acceptance]
) -> list[Verdict]:
    """Processes logits and verifies the proposals: in one pass on the CPU, with one wait on an accelerator.

    The general path, ``verify(process(...))``, may wait several times. It is used for the rejection rule on an
    accelerator, for both rules in one batch, and in rare cases: a row without a distribution, top-p over more tokens
    than expected.

    Args:
        logits: [rows, vocab], where session i owns ``len(proposals[i]) + 1`` consecutive rows.
        rows: one per row of ``logits``.
        proposals, rules: one per session.

    Raises:
        InvalidRequestError, EngineError: see ``process``.
    """
    # Session i owns rows [ends[i - 1], ends[i]).
    ends = [*accumulate([len(proposal.token_ids) + 1 for proposal in proposals])]
    by_ratio = any(
        rule is Acceptance.REJECTION and not rows[end - 1].state.greedy for rule, end in zip(rules, ends, strict=True)
    )
    if by_ratio:
        decided = _reject_on_host(logits, rows, proposals, rules, ends)
    elif logits.device.type != "cpu":
        decided = decide_at_once(logits, rows, proposals)
    else:
        decided = _decide_on_host(logits, rows, proposals, ends)
    verdicts = verify(process(logits, rows), proposals, rules) if decided is None else decided
    if any(rows[end - 1].state.wants_rows for end in ends):
        return with_logprobs(verdicts, proposals, logits, rows, [0, *ends])
    return verdicts


def _decide_on_host(
    logits: Tensor, rows: Sequence[Row], proposals: Sequence[Proposal], ends: Sequence[int]
) -> list[Verdict] | None:
    """Decides by the coupled rule in one pass over the logits; None where ``pick_unprocessed`` cannot.

    A session with a structured output is followed row by row. No mask is computed after its first token that was not
    proposed, since a mask costs more than a row.
    """
    states = [rows[end - 1].state for end in ends]
    if not all(state.picks_at_once for state in states):
        return None
    if all(state.grammar is None or not proposal.token_ids for state, proposal in zip(states, proposals, strict=True)):
        picked = pick_unprocessed(logits, rows, proposals)
        return None if picked is None else _matches(proposals, *picked)
    found: list[Verdict] = []
    for proposal, start, end in zip(proposals, (0, *ends), ends, strict=False):
        own = _followed(logits[start:end], rows[start:end], proposal)
        if own is None:
            return None
        found.append(own)
    return found


def _reject_on_host(
    logits: Tensor,
    rows: Sequence[Row],
    proposals: Sequence[Proposal],
    rules: Sequence[Acceptance],
    ends: Sequence[int],
) -> list[Verdict] | None:
    """Decides by the rejection rule in one pass over the logits; None where a session has another rule, or processors
    that the pass lacks, or reaches a row without a distribution."""
    states = [rows[end - 1].state for end in ends]
    if not native.usable(logits, torch.float32, torch.bfloat16) or not all(
        rule is Acceptance.REJECTION and state.picks_at_once and state.grammar is None and not state.greedy
        for rule, state in zip(rules, states, strict=True)
    ):
        return None
    keys: list[int] = []
    drafted: list[int] = []
    qs: list[tuple[bytes, bytes]] = []
    for proposal, end in zip(proposals, ends, strict=True):
        assert proposal.is_chain, "the rejection rule takes chains only"
        first, tokens = rows[end - 1 - len(proposal)], proposal.token_ids
        text_key, position = first.text_key, first.position
        for i, (token_id, q) in enumerate(zip_longest((*tokens, -1), proposal.qs[: len(tokens)])):
            keys += (first.state.seed_bits, position + i, text_key)
            text_key = digest((token_id,), text_key)
            drafted.append(token_id)
            qs.append((q.packed_ids, q.packed_probs) if q is not None and paired(q) else (b"", b""))
    by_row = [row.state for row in rows]
    decided = native.verify(
        logits,
        [state.temperature for state in by_row],
        keys,
        top_k=[state.top_k for state in by_row],
        floors=[state.log_min_p for state in by_row],
        starts=[0, *ends],
        drafted=drafted,
        qs=qs,
        tolerance=TOLERANCE,
        streams=(Stream.ACCEPT, Stream.RECOVER),
    )
    if decided is None:
        return None
    *of_sessions, logprobs = decided
    verdicts = []
    for proposal, start, accepted, token_id, rejected in zip(proposals, (0, *ends), *of_sessions, strict=False):
        values = tuple(logprobs[start : start + accepted + 1])
        num_invalid = 0 if rejected else len(proposal) - accepted
        verdicts.append(Verdict(accepted, (*proposal.token_ids[:accepted], token_id), values, num_invalid))
    return verdicts


def _followed(logits: Tensor, rows: Sequence[Row], proposal: Proposal) -> Verdict | None:
    """Decides one session, ``logits`` [rows, vocab], as far as its tokens were proposed."""
    if rows[0].state.grammar is None:
        picked = pick_unprocessed(logits, rows, [proposal])
        return None if picked is None else _match(proposal, *picked)
    token_ids: list[int] = []
    logprobs: list[float] = []
    at: int | None = -1
    while at is not None:
        picked = pick_unprocessed(logits[at + 1 : at + 2], rows[at + 1 : at + 2])
        if picked is None:
            return None
        token_ids += picked[0]
        logprobs += picked[1]
        at = proposal.after(at, token_ids[-1])
    return Verdict(len(token_ids) - 1, tuple(token_ids), tuple(logprobs))


def with_logprobs(
    verdicts: Sequence[Verdict],
    proposals: Sequence[Proposal],
    logits: Tensor,
    rows: Sequence[Row],
    starts: Sequence[int],
) -> list[Verdict]:
    """Verdicts with the log probabilities that their sessions ask for; ``starts``: their first rows."""
    wanting = [i for i in range(len(verdicts)) if rows[starts[i]].state.wants_rows]
    decided = [([starts[i] + row for row in verdicts[i].rows(proposals[i])], verdicts[i].token_ids) for i in wanting]
    found = list(verdicts)
    for i, (values, top) in zip(wanting, logprobs_at(logits, rows, decided), strict=True):
        found[i] = replace(verdicts[i], logprobs=values, top_logprobs=top)
    return found


class Drawn:
    """The target's own tokens by the coupled rule, one for each row, which the device draws while the host goes on."""

    def __init__(self, logits: Tensor, rows: Sequence[Row]) -> None:
        """Queues the draws, and their way to the host. Waits for nothing. ``logits``: [rows, vocab]."""
        self._picked = picked_on_cuda(logits, rows)
        if self._picked is not None:
            self._download = Download(self._picked)
            return
        checks = DeferredChecks()
        self._token_ids, logprobs = sampled(process(logits, rows, checks))
        self._download = Download(self._token_ids, logprobs, checks.any_failed(logits.device))

    @property
    def token_ids(self) -> Tensor:
        """[rows] int64 on the device, all inside the vocabulary. They mean nothing where ``verdicts`` has none."""
        return self._token_ids if self._picked is None else self._picked[:, 0].clamp(min=0).long()

    def wait(self) -> None:
        """Waits until the step is done."""
        self._download.wait()

    def verdicts(self, proposals: Sequence[Proposal]) -> list[Verdict] | None:
        """Waits for the draws, and verifies the proposals by them; None in a rare case, which ``decide`` handles."""
        found = self._download.wait()
        if self._picked is not None:
            token_ids, logprobs = found[0].unbind(-1)
            return None if (token_ids < 0).any() else _matches(proposals, token_ids.long().tolist(), logprobs.tolist())
        token_ids, logprobs, any_failed = found
        return None if any_failed else _matches(proposals, token_ids.tolist(), logprobs.tolist())


def decide_at_once(logits: Tensor, rows: Sequence[Row], proposals: Sequence[Proposal]) -> list[Verdict] | None:
    """Decides by the coupled rule with a single wait for the device; None in a rare case, which ``decide`` handles."""
    return Drawn(logits, rows).verdicts(proposals)


def verify(
    processed: ProcessedRows,
    proposals: Sequence[Proposal],
    rules: Sequence[Acceptance],
    choices: Choices | None = None,
) -> list[Verdict]:
    """Decides the proposals of a batch.

    Args:
        processed: session i owns the rows [starts[i], starts[i] + K_i + 1), K_i = ``len(proposals[i])``. Row
            starts[i] is the target's distribution after the context, row starts[i] + 1 + j the one after draft token j
            and its ancestors.
        proposals, rules: one per session.
        choices: the random choices of the rejection rule; position-keyed noise by default.

    Under the rejection rule a q is invalid if it is missing, NaN, negative, not normalized within 1e-6, or has no mass
    at its token (or the token is outside the vocabulary). The proposal is cut before that token, and the next token is
    drawn from p as if the proposal had been that long. This keeps the distribution: the cut at position j is known
    before the target's noise at j is used. So a token drawn after a cut is an exact sample of p_j. Where it is not cut,
    theorem 1 needs x_j ~ q_j given that. q_j was fixed before x_j was drawn, so its own validity says nothing about
    x_j, and a token without mass has probability zero under q_j.

    A verdict that reaches an undecidable row ends with the token before it: the next round meets the dead end as plain
    decoding does.
    """
    sizes = [len(proposal) + 1 for proposal in proposals]
    starts = [0, *accumulate(sizes)]  # one more than proposals: the last is the number of rows
    assert starts[-1] == len(processed.scores), f"{len(processed.scores)} rows for proposals that need {starts[-1]}"
    verdicts = _decide(processed, proposals, rules, choices, starts)
    if not processed.undecidable:
        return verdicts
    undecidable = frozenset(processed.undecidable)
    cut = []
    for verdict, proposal, start in zip(verdicts, proposals, starts, strict=False):
        rows = verdict.rows(proposal)  # the first one is never undecidable
        end = next((i for i, row in enumerate(rows) if start + row in undecidable), len(rows))
        cut.append(verdict if end == len(rows) else _cut(verdict, end))
    return cut


def _cut(verdict: Verdict, num_tokens: int) -> Verdict:
    return Verdict(num_tokens - 1, verdict.token_ids[:num_tokens], verdict.logprobs[:num_tokens], verdict.num_invalid)


def _decide(
    processed: ProcessedRows,
    proposals: Sequence[Proposal],
    rules: Sequence[Acceptance],
    choices: Choices | None,
    starts: Sequence[int],
) -> list[Verdict]:
    ratio = [rule is Acceptance.REJECTION for rule in rules]
    if any(ratio) and processed.num_greedy:
        greedy = processed.greedy.tolist()
        ratio = [by_ratio and not greedy[start] for by_ratio, start in zip(ratio, starts, strict=False)]
    if not any(ratio):
        return _matches(proposals, *pick(processed))
    verdicts: dict[int, Verdict] = {}
    matched = [i for i, by_ratio in enumerate(ratio) if not by_ratio]
    if matched:
        part = _take(processed, [row for i in matched for row in range(starts[i], starts[i + 1])])
        matched_rules = [Acceptance.COUPLED] * len(matched)
        verdicts |= dict(zip(matched, verify(part, [proposals[i] for i in matched], matched_rules), strict=True))
    rejecting = [i for i, by_ratio in enumerate(ratio) if by_ratio]
    decided = _reject(
        processed,
        [proposals[i] for i in rejecting],
        [starts[i] for i in rejecting],
        choices or KeyedChoices(processed),
    )
    verdicts |= dict(zip(rejecting, decided, strict=True))
    return [verdicts[i] for i in range(len(proposals))]


def _matches(proposals: Sequence[Proposal], own: list[int], logprobs: list[float]) -> list[Verdict]:
    verdicts, start = [], 0
    for proposal in proposals:
        end = start + len(proposal.token_ids) + 1
        verdicts.append(_match(proposal, own[start:end], logprobs[start:end]))
        start = end
    return verdicts


def verify_picked(proposal: Proposal, token_ids: Sequence[int], logprobs: Sequence[float]) -> Verdict:
    """Decides one session by the coupled rule from the target's own tokens, where they are known already.

    Args:
        proposal: the session's K draft tokens.
        token_ids, logprobs: the target's own token after the context and after each draft token, [K + 1], and its
            log-probability, which is not finite where the model gave no distribution.

    Raises:
        EngineError: the first row is one without distribution. Later ones end the verdict, as in ``verify``.
    """
    verdict = _match(proposal, token_ids, logprobs)
    end = next((i for i, logprob in enumerate(verdict.logprobs) if not math.isfinite(logprob)), len(verdict.logprobs))
    if end == 0:
        raise EngineError("the logits of the next token are not finite")
    return verdict if end == len(verdict.logprobs) else _cut(verdict, end)


def _match(proposal: Proposal, own: Sequence[int], logprobs: Sequence[float]) -> Verdict:
    if proposal.is_chain:
        num_accepted = num_equal(proposal.token_ids, own)
        return Verdict(num_accepted, tuple(own[: num_accepted + 1]), tuple(logprobs[: num_accepted + 1]))
    rows = [0, *(1 + index for index in proposal.follow(own))]
    return Verdict(len(rows) - 1, tuple(own[row] for row in rows), tuple(logprobs[row] for row in rows))


def _reject(
    processed: ProcessedRows, proposals: Sequence[Proposal], starts: Sequence[int], choices: Choices
) -> list[Verdict]:
    """Decides by the rejection rule: accepts on the host, draws the next tokens of all sessions in one batch.

    ``starts``: the first row of each session.
    """
    assert all(proposal.is_chain for proposal in proposals), "the rejection rule takes chains only"
    log_probs = processed.log_probs  # [rows, vocab]
    # The row that decides draft token j of a session is starts + j; a token outside the vocabulary is read as token 0
    # here, and never accepted, because its q is invalid.
    drafted = [(start + j, x) for p, start in zip(proposals, starts, strict=True) for j, x in enumerate(p.token_ids)]
    log_p = _gather(log_probs, [(row, x if 0 <= x < log_probs.shape[-1] else 0) for row, x in drafted])
    log_p_by_row = {row: value for (row, _), value in zip(drafted, log_p, strict=True)}

    ends: list[int] = []  # the row that each session's next token is drawn from
    rejected: list[Columns | None] = []  # q there, if its draft token was rejected
    invalid: list[int] = []
    for proposal, start in zip(proposals, starts, strict=True):
        num_accepted, q_rejected = 0, None
        for x, q in zip(proposal.token_ids, proposal.qs, strict=False):
            q_x = 0.0 if q is None else probability(q, x, log_probs.shape[-1])
            if q is None or not q_x:
                break
            p_x = math.exp(log_p_by_row[start + num_accepted])
            if not choices.accept(start + num_accepted, acceptance_probability(p_x, q_x)):
                q_rejected = normalized(q)
                break
            num_accepted += 1
        ends.append(start + num_accepted)
        rejected.append(q_rejected)
        invalid.append(len(proposal) - num_accepted if q_rejected is None else 0)

    # p where all valid tokens were accepted, the residual max(p - q, 0) where one was rejected: [sessions, vocab]
    weights = log_probs[upload(ends, log_probs.device)].to(torch.float64).exp_()
    subtract_(weights, rejected)
    next_ids = choices.draw(ends, weights)
    next_log_p = _gather(log_probs, list(zip(ends, next_ids, strict=True)))
    return [
        Verdict(
            end - start,
            (*proposal.token_ids[: end - start], next_id),
            (*(log_p_by_row[row] for row in range(start, end)), next_logprob),
            num_invalid,
        )
        for proposal, start, end, next_id, next_logprob, num_invalid in zip(
            proposals, starts, ends, next_ids, next_log_p, invalid, strict=True
        )
    ]


def subtract_(weights: Tensor, rejected: Sequence[Columns | None]) -> None:
    """Turns p into the residual, in place, in the rows whose draft token was rejected."""
    found = [(i, *q) for i, q in enumerate(rejected) if q is not None]
    if not found:
        return
    rows = np.concatenate([np.full(len(ids), i) for i, ids, _ in found])
    ids, probs = (np.concatenate(parts) for parts in list(zip(*found, strict=True))[1:])
    row, token = (upload(torch.from_numpy(index.astype(np.int64)), weights.device) for index in (rows, ids))
    q = upload(torch.from_numpy(probs), weights.device)
    p = weights[row, token]
    weights[row, token] = residual(p, q)
    # p and q equal up to rounding leave no residual; a rejection, then of probability 1e-7, falls back to p.
    empty = weights.sum(-1) <= 0
    if bool(empty.any()):
        back = empty[row]
        weights[row[back], token[back]] = p[back]


def _gather(log_probs: Tensor, pairs: Sequence[tuple[int, int]]) -> list[float]:
    if not pairs:
        return []
    row, token = upload(pairs, log_probs.device).unbind(-1)
    values: list[float] = log_probs[row, token].tolist()
    return values


def _take(processed: ProcessedRows, rows: Sequence[int]) -> ProcessedRows:
    index = upload(rows, processed.log_probs.device)
    greedy = processed.greedy[index]
    return ProcessedRows(
        greedy,
        processed.seeds[index],
        processed.positions[index],
        int(greedy.sum()),
        scores=processed.scores[index],
        rows=[processed.rows[i] for i in rows] if processed.rows else (),
    )


@dataclass(frozen=True, slots=True)
class DraftSample:
    """A token drawn by the draft under the rejection rule."""

    token_id: int
    q: SparseDistribution
    """The distribution that the token was really drawn from."""


def draft_distributions(log_q: Tensor, saguaro: Sequence[float], num_predicted: Sequence[int]) -> Tensor:
    """The distributions to draw draft tokens from: [rows, m] float64, each row of sum 1.

    Saguaro sampling ("Speculative speculative decoding"): q of the F = ``num_predicted`` most likely tokens
    is scaled by C = ``saguaro`` and renormalized, so that the residual, and with it the recovered token,
    concentrates on these. The price is acceptance; 1 is off.

    Args:
        log_q: [rows, m], sorted descending, -inf where cut (``draft_candidates``).
        saguaro, num_predicted: one per row.
    """
    weights = log_q.double().exp_()
    if any(scale != 1.0 for scale in saguaro):
        scales, top = upload(saguaro, weights.device, weights.dtype), upload(num_predicted, weights.device)
        scaled = torch.arange(weights.shape[-1], device=weights.device) < top.unsqueeze(-1)
        weights = torch.where(scaled, weights * scales.unsqueeze(-1), weights)
    return weights / weights.sum(-1, keepdim=True)


def sample_draft(
    token_ids: Tensor,
    log_q: Tensor,
    seeds: Tensor,
    positions: Tensor,
    nonces: Tensor,
    saguaro: Sequence[float],
    num_predicted: Sequence[int],
) -> list[DraftSample]:
    """Draws a draft token per row under the rejection rule (temperature 0: ``rank_coupled``, without q).

    Args:
        token_ids, log_q: [rows, m] from ``draft_candidates``.
        seeds, positions: [rows] int64 (``row_keys``).
        nonces: [rows] int64, different whenever a position is drafted again (the node id): no value is drawn twice.
        saguaro, num_predicted: one per row, see ``draft_distributions``.
    """
    if native.usable(log_q, torch.float32) and native.usable(token_ids, torch.int64):
        keys = torch.stack((seeds, positions, nonces), dim=-1).flatten().tolist()
        drawn_at_once = native.sample(token_ids, log_q, keys, Stream.DRAFT, saguaro, num_predicted)
        return [DraftSample(token, SparseDistribution(ids, probs)) for token, ids, probs in drawn_at_once]
    q = draft_distributions(log_q, saguaro, num_predicted)
    # Noise is keyed by rank here, not by token: any choice among the support with these probabilities will do.
    drawn = gumbel_argmax(q.log(), seeds, positions, Stream.DRAFT, nonces)
    tokens = token_ids.gather(-1, drawn.unsqueeze(-1)).squeeze(-1).tolist()
    all_ids, all_probs = token_ids.cpu().numpy(), q.cpu().numpy()
    support = all_probs > 0
    ends = support.sum(-1).cumsum().tolist()
    ids, probs = all_ids[support], all_probs[support]
    samples = []
    for token, start, end in zip(tokens, [0, *ends], ends, strict=False):
        samples.append(DraftSample(token, packed(ids[start:end], probs[start:end])))
    return samples
