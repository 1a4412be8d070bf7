"""From logits to the next token: one pipeline for plain decoding and verification, approximated for drafting.

``processors.py`` defines the processors. This module runs them over a ragged batch and draws tokens; it keeps no state
between calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from paceline.core import cuda
from paceline.core import rows as native
from paceline.core.deferred import Check, check_now, upload
from paceline.core.noise import Stream, fast_gumbel_at, gumbel_argmax
from paceline.core.processors import Row, SamplerState, column, masks_of, truncate_
from paceline.core.tree import Proposal
from paceline.errors import EngineError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class RowKeys:
    """The values that the noise of each row depends on, on the device of the logits."""

    greedy: Tensor
    """[rows] bool: rows of temperature 0."""
    seeds: Tensor
    """[rows] int64 bit patterns."""
    positions: Tensor
    """[rows] int64."""
    num_greedy: int
    """Number of greedy rows, known without asking the device."""


@dataclass(frozen=True, slots=True)
class ProcessedRows(RowKeys):
    """The target's next-token distribution in each row."""

    scores: Tensor
    """[rows, vocab] float32: logits after all processors, shifted to a row maximum of 0; -inf where forbidden. Rows of
    temperature 0 are scaled by temperature 1."""
    rows: Sequence[Row] = ()
    """The rows themselves, which know the text before them."""
    undecidable: tuple[int, ...] = ()
    """Rows inside proposals that have no distribution (``scores`` are all 0): no token may be drawn there."""

    @property
    def log_probs(self) -> Tensor:
        """[rows, vocab] float32: the normalized scores. A pass over all rows at each call."""
        return torch.log_softmax(self.scores, -1)


def row_keys(rows: Sequence[Row], device: torch.device | str = "cpu") -> RowKeys:
    """Seeds, positions and greediness of rows, in one transfer to the device."""
    keys = [(row.state.greedy, row.state.seed_bits, row.position) for row in rows]
    greedy, seeds, positions = upload(torch.tensor(keys, dtype=torch.int64).view(-1, 3), device).unbind(-1)
    return RowKeys(greedy.bool(), seeds, positions, sum(key[0] for key in keys))


def process(logits: Tensor, rows: Sequence[Row], check: Check = check_now) -> ProcessedRows:
    """Applies every processor.

    Args:
        logits: [rows, vocab] of any float dtype; -inf forbids a token. Not modified.
        rows: one per row of ``logits``. Rows of one session next to each other share work.
        check: with ``DeferredChecks`` nothing is raised and no row is undecidable: a failed check remains instead.

    Raises:
        InvalidRequestError: the options of a session forbid every token.
        EngineError: a row of ``logits`` holds NaN or +inf.
        Both only for rows without a suffix, which plain decoding would reach too. A draft must not be able to
        make a session fail: other such rows become ``undecidable``.
    """
    x = _edited(logits, rows)  # [rows, vocab] float32, a copy
    top = x.amax(-1, keepdim=True) if len(rows) else x
    undecidable = _check_rows(top, logits, rows) if check(~top.isfinite().all()) else []
    if undecidable:
        x[undecidable], top[undecidable] = 0.0, 0.0
    # Always shift by the maximum, so that a row is rounded equally in every batch and no temperature overflows.
    x.sub_(top)
    if any(row.state.temperature != 1 for row in rows):
        x.div_(column([row.state.temperature for row in rows], x))
    truncate_(x, rows, check)
    keys = row_keys(rows, logits.device)
    return ProcessedRows(
        keys.greedy,
        keys.seeds,
        keys.positions,
        keys.num_greedy,
        scores=x,
        rows=rows,
        undecidable=tuple(undecidable),
    )


def sample_coupled(processed: ProcessedRows) -> Tensor:
    """The target's own token of each row: argmax_v(log p[v] + g[v]), g = 0 on greedy rows. [rows] int64.

    An exact sample of p (the Gumbel-max trick) that depends on p, the seed and the position only. Equal
    scores go to the lower id. The constant that normalizes a row is left out: it would only round.
    """
    scores = processed.scores
    if processed.num_greedy == len(scores):
        return scores.argmax(-1)
    drawn = gumbel_argmax(scores, processed.seeds, processed.positions, Stream.COUPLED)
    return torch.where(processed.greedy, scores.argmax(-1), drawn) if processed.num_greedy else drawn


def sampled(processed: ProcessedRows) -> tuple[Tensor, Tensor]:
    """The target's own token of each row and its log-probability, on the device: [rows] int64 and float32."""
    token_ids = sample_coupled(processed)
    return token_ids, processed.log_probs.gather(-1, token_ids.clamp(min=0)[:, None]).squeeze(-1)


def pick(processed: ProcessedRows) -> tuple[list[int], list[float]]:
    """The target's own token of each row (``sample_coupled``) and its log-probability, on the host."""
    if native.usable(processed.scores, torch.float32):
        greedy, nothing = processed.greedy.tolist(), torch.zeros_like(processed.seeds)
        keys = torch.stack((processed.seeds, processed.positions, nothing), dim=-1).flatten().tolist()
        picked, of_them = native.pick(processed.scores, [float(not cold) for cold in greedy], keys, Stream.COUPLED)
        return picked.squeeze(-1).tolist(), of_them.squeeze(-1).tolist()
    own, values = torch.stack([each.to(torch.float64) for each in sampled(processed)]).tolist()  # one transfer
    return [int(token) for token in own], values


def pick_unprocessed(
    logits: Tensor, rows: Sequence[Row], proposals: Sequence[Proposal] = ()
) -> tuple[list[int], list[float]] | None:
    """Picks the target's own tokens from raw logits in one pass, for sessions whose state ``picks_at_once``.

    None: another device or dtype, another processor, or a row without a distribution, which ``process`` reports.

    Args:
        logits: [rows, vocab].
        rows: one per row of ``logits``.
        proposals: the proposals that the rows verify, in order; rows after a rejected token get token -2, and
            nothing is computed there. (): all rows are picked.
    """
    if len(rows) != len(logits) or not native.usable(logits, torch.float32, torch.bfloat16):
        return None
    picked = _picked(logits, rows, 1, proposals)
    if picked is None:
        return None
    token_ids, logprobs = picked[0].squeeze(-1).tolist(), picked[1].squeeze(-1).tolist()
    return None if -1 in token_ids else (token_ids, logprobs)


def picked_on_cuda(logits: Tensor, rows: Sequence[Row]) -> Tensor | None:
    """Picks as ``pick_unprocessed``, on CUDA, without waiting: [rows, 2] float64, token ids and log-probabilities.

    Token -1: a row without a distribution. None: another device, or a session with another processor than the
    temperature, or a machine that cannot compile the kernels.
    """
    if len(rows) != len(logits) or not cuda.usable(logits) or not all(row.state.only_scales for row in rows):
        return None
    drawn = _drawn(rows)
    assert drawn is not None, "what only scales is picked at once"
    keys = np.array(drawn[1], dtype=np.int64).reshape(-1, 3)
    keys[:, 2] = np.array(drawn[0], dtype=np.float32).view(np.int32)
    from paceline.core import cuda_rows  # imports triton

    return cuda_rows.pick(logits, upload(torch.from_numpy(keys), logits.device), Stream.COUPLED)


def _picked(
    logits: Tensor, rows: Sequence[Row], num_best: int, proposals: Sequence[Proposal] = ()
) -> tuple[Tensor, Tensor] | None:
    """``native.pick`` of raw logits, with the cuts of each row's session; None: one has a processor that it lacks."""
    if (drawn := _drawn(rows)) is None:
        return None
    temperatures, keys, top_k, floors = drawn
    return native.pick(
        logits,
        temperatures,
        keys,
        Stream.COUPLED,
        masks=masks_of(rows, logits.shape[1]),
        top_k=top_k,
        floors=floors,
        num_best=num_best,
        behind=rows_followed(proposals) if len(rows) > len(proposals) > 0 else None,
    )


def _drawn(rows: Sequence[Row]) -> tuple[list[float], list[int], list[int], list[float]] | None:
    """Temperatures (0: greedy), keys, top k and floors of rows, for native functions. None: a row has a processor that
    these lack."""
    options: list[tuple[float, int, float]] = []
    keys: list[int] = []
    previous = None
    for state, suffix in rows:
        if state is not previous:
            if not state.picks_at_once:
                return None
            previous, seed, num_tokens = state, state.seed_bits, state.num_tokens
            option = 0.0 if state.greedy else state.temperature, state.top_k, state.log_min_p
        options.append(option)
        keys += (seed, num_tokens + len(suffix), 0)  # three numbers per row, flat
    temperatures, top_k, floors = zip(*options, strict=True) if options else ((), (), ())
    return [*temperatures], keys, [*top_k], [*floors]


def rows_followed(proposals: Sequence[Proposal]) -> tuple[list[int], list[int]]:
    """The draft token that each row of the proposals follows, and the row that this token follows; -1: the context."""
    tokens: list[int] = []
    parents: list[int] = []
    for proposal in proposals:
        start = len(tokens)
        tokens += (-1, *proposal.token_ids)
        parents.append(-1)
        if proposal.parents:
            parents += [start + 1 + parent for parent in proposal.parents]
        else:
            parents += range(start, start + len(proposal.token_ids))
    return tokens, parents


GREEDY_CANDIDATES = 48
"""Candidates of a row of temperature 0, whose children q alone orders: no configuration publishes more of them than
32."""


def draft_candidates(logits: Tensor, rows: Sequence[Row], m: int) -> tuple[Tensor, Tensor]:
    """Candidates for the next token of a draft, in each row the m most likely ones; an approximation of ``process``.

    Temperature, top-k, top-p and min-p act within the m most likely tokens. Where a native function draws the tokens of
    a session with ``num_ranked``, candidates are the ``num_ranked`` tokens with the largest log q + noise of the whole
    vocabulary. No others can rank first, while the m most likely tokens of a flat distribution may hold only nine
    tenths of its mass. Any difference to ``process`` costs acceptance, never correctness.

    Args:
        logits: [rows, vocab] of any float dtype, not modified.
        m: candidates per row, at most the vocabulary size; ``GREEDY_CANDIDATES`` at most for rows of temperature 0.

    Returns:
        token_ids [rows, at most m] int64 and log_q float32, sorted by log_q descending; cut candidates are -inf.
    """
    noisy = [i for i, row in enumerate(rows) if (s := row.state).num_ranked and not s.greedy and s.picks_at_once]
    if all(row.state.greedy for row in rows):
        m = min(m, GREEDY_CANDIDATES)
    if not noisy or not native.usable(logits, torch.float32, torch.bfloat16):
        return _likeliest(logits, rows, m)
    if len(noisy) == len(rows):
        return _noisiest(logits, rows, m)
    token_ids = torch.zeros(len(rows), min(m, logits.shape[-1]), dtype=torch.int64)
    log_q = torch.full(token_ids.shape, -math.inf)
    others = sorted({*range(len(rows))} - {*noisy})
    for made, indices in ((_noisiest, noisy), (_likeliest, others)):
        ids, values = made(logits[indices], [rows[i] for i in indices], m)
        token_ids[indices, : ids.shape[1]], log_q[indices, : ids.shape[1]] = ids, values
    return token_ids, log_q


def _noisiest(logits: Tensor, rows: Sequence[Row], m: int) -> tuple[Tensor, Tensor]:
    """The tokens of each row with the largest log q + noise, as ``draft_candidates`` returns them."""
    most = max(row.state.num_ranked for row in rows)
    picked = _picked(logits, rows, min(m, most, logits.shape[-1]))
    assert picked is not None, "only for sessions whose state picks at once"
    log_q, order = picked[1].sort(dim=-1, descending=True, stable=True)
    return picked[0].clamp_(min=0).gather(-1, order), log_q


def _likeliest(logits: Tensor, rows: Sequence[Row], m: int) -> tuple[Tensor, Tensor]:
    """The m most likely tokens of each row, as ``draft_candidates`` returns them."""
    m = min(m, logits.shape[-1])
    states = [row.state for row in rows]
    if native.usable(logits, torch.float32, torch.bfloat16):
        changes = any(not state.picks_at_once and state.changes for state in states)
        changed = _edited(logits, rows, bind=False) if changes else logits
        x, token_ids = native.largest(changed, m, masks_of(rows, logits.shape[1]))
    else:
        edited = _edited(logits, rows) if any(state.edits for state in states) else logits
        top, token_ids = edited.topk(m, dim=-1)
        x = top.float()
    x = x - x[:, :1]
    if m > GREEDY_CANDIDATES and any(state.greedy for state in states):
        x[[i for i, state in enumerate(states) if state.greedy], GREEDY_CANDIDATES:] = -math.inf
    if any(state.cuts for state in states):
        _cut_(x, states)
    return token_ids, torch.log_softmax(x, -1)


def _cut_(x: Tensor, states: Sequence[SamplerState]) -> None:
    """Applies temperature, top-k, top-p and min-p in place to candidates [rows, m], descending from 0 in each row."""
    m = x.shape[1]
    if any(state.temperature != 1 for state in states):
        x.div_(column([state.temperature for state in states], x))
    if any(state.top_k < m for state in states):
        last = upload([min(state.top_k, m) - 1 for state in states], x.device)[:, None]
        x.masked_fill_(x < x.gather(-1, last), -math.inf)
    if any(state.top_p < 1 for state in states):
        probs = torch.softmax(x, -1)
        before = probs.cumsum(-1).sub_(probs)
        before[:, 0] = -1  # the first candidate always stays
        x.masked_fill_(before >= column([state.top_p for state in states], x), -math.inf)
    if any(state.min_p > 0 for state in states):
        x.masked_fill_(x < column([state.min_p for state in states], x).log_(), -math.inf)


def rank_coupled(
    token_ids: Tensor, log_q: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor
) -> tuple[Tensor, Tensor]:
    """Ranks candidates by log q + g with the target's noise: the first is the draft's token.

    Args:
        token_ids, log_q: [rows, m]. seeds, positions, greedy: [rows] (``row_keys``).

    Returns:
        token_ids and scores, [rows, m] int64 and float64, by score descending, equal scores by id.
    """
    if bool(greedy.all()):
        scores = log_q.double()
    else:
        noise = fast_gumbel_at(seeds, positions, Stream.COUPLED, token_ids)
        scores = noise.masked_fill_(greedy[:, None], 0.0).add_(log_q)
    by_id = token_ids.argsort(-1)  # stable sort of the id order: equal scores end up by id
    scores, order = scores.gather(-1, by_id).sort(stable=True, dim=-1, descending=True)
    return token_ids.gather(-1, by_id.gather(-1, order)), scores


def best_coupled(
    token_ids: Tensor, log_q: Tensor, rows: Sequence[Row], num_best: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The first ``num_best`` candidates of each row in the order of ``rank_coupled``, on the host: ids and scores.

    Candidates whose log q is not finite have the score -inf.
    """
    num_best = min(num_best, token_ids.shape[-1])
    if native.usable(log_q, torch.float32) and native.usable(token_ids, torch.int64):
        keys = [part for row in rows for part in (row.state.seed_bits, row.position, 0)]
        return native.rank(token_ids, log_q, keys, [row.state.greedy for row in rows], Stream.COUPLED, num_best)
    on_device = row_keys(rows, log_q.device)
    finite = log_q.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    token_ids, scores = rank_coupled(token_ids, finite, on_device.seeds, on_device.positions, on_device.greedy)
    return token_ids[:, :num_best].tolist(), scores[:, :num_best].tolist()


def best_unprocessed(logits: Tensor, rows: Sequence[Row]) -> tuple[list[list[int]], list[list[float]]] | None:
    """``best_coupled`` of ``draft_candidates`` in one pass; each row has the maximum that any session ranks.

    None: a session ranks none (``num_ranked``) or has another processor, or no native function takes these logits.

    Args:
        logits: [rows, vocab], not modified.

    Returns:
        ids and scores, best first, without the constant of each row that normalizes; -inf: there are fewer tokens.
    """
    states = {id(row.state): row.state for row in rows}.values()
    if not all(state.num_ranked for state in states) or not native.usable(logits, torch.float32, torch.bfloat16):
        return None
    if (drawn := _drawn(rows)) is None:
        return None
    temperatures, keys, top_k, floors = drawn
    vocab_size = logits.shape[1]
    return native.best(
        logits,
        temperatures,
        keys,
        Stream.COUPLED,
        masks=masks_of(rows, vocab_size),
        top_k=top_k,
        floors=floors,
        num_best=min(max(state.num_ranked for state in states), vocab_size),
    )


def reads_rows(logits: Tensor) -> bool:
    """True if native functions read logits [rows, vocab] as they are."""
    return native.usable(logits, torch.float32, torch.bfloat16)


def best_recovered(
    token_ids: Tensor, log_q: Tensor, rows: Sequence[Row], num_best: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The first ``num_best`` candidates of each row by log q + g. With the noise g the target draws a recovered
    or a bonus token (``Stream.RECOVER``), on the host: ids and scores.

    The guess improves as q approaches the distribution that the target draws from.

    Args:
        token_ids, log_q: [rows, m], on the CPU; candidates whose log q is not finite have the score -inf.
    """
    num_best = min(num_best, token_ids.shape[-1])
    keys = [(row.state.seed_bits, row.position, row.text_key) for row in rows]
    if native.usable(log_q, torch.float32) and native.usable(token_ids, torch.int64):
        flat = [part for key in keys for part in key]
        return native.rank(token_ids, log_q, flat, [False] * len(rows), Stream.RECOVER, num_best)
    seeds, positions, texts = torch.tensor(keys, dtype=torch.int64).view(-1, 3).unbind(-1)
    finite = log_q.nan_to_num(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    scores, order = fast_gumbel_at(seeds, positions, Stream.RECOVER, token_ids, texts).add_(finite).topk(num_best)
    return token_ids.gather(-1, order).tolist(), scores.tolist()


def _edited(logits: Tensor, rows: Sequence[Row], *, bind: bool = True) -> Tensor:
    """A float32 copy of the logits after the processors that come before the temperature.

    ``bind``: structured outputs among them.
    """
    if len(rows) != len(logits):
        raise ValueError(f"{len(rows)} rows for {len(logits)} rows of logits")
    x = logits.to(torch.float32, copy=True)
    if any(row.state.edits for row in rows):
        start = 0
        for _, group in groupby(rows, key=lambda row: id(row.state)):
            same = list(group)
            edit = same[0].state.edit_ if bind else same[0].state.change_
            if same[0].state.edits:
                edit(x[start : start + len(same)], [row.suffix for row in same])
            start += len(same)
    return x


def _check_rows(top: Tensor, logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Returns indices of the undecidable rows; raises if plain decoding would reach one (see ``process``).

    ``top``: [rows, 1] maxima before the temperature, NaN where a row holds one.
    """
    undecidable = []
    for index, value in enumerate(top.squeeze(-1).tolist()):
        if math.isfinite(value):
            continue
        if rows[index].suffix:
            undecidable.append(index)
            continue
        params = rows[index].state.params
        raw = logits[index].amax().item()
        position = rows[index].position
        if value == -math.inf and math.isfinite(raw):
            if (grammar := rows[index].state.grammar) is not None and grammar.failure:
                raise InvalidRequestError(f"structured_output cannot go on at position {position}: {grammar.failure}")
            names = ("structured_output", "allowed_token_ids", "logit_bias", "bad_words", "min_tokens")
            options = [name for name in names if getattr(params, name)]
            raise InvalidRequestError(f"{' and '.join(options)} forbid every token at position {position}")
        raise EngineError(f"row {index} of the logits (position {position}) has maximum {raw}: not finite")
    return undecidable
