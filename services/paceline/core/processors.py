"""The logit processors of a session, in the order in which they run, each on the previous one's logits x:

0. structured output    x[v] = -inf if no output of the form continues the row's tokens with v
1. allowed token ids    x[v] = -inf for all others
2. logit bias           x[v] += bias[v]
3. bad words            x[last] = -inf if the tokens before the row end with the sequence's other tokens
4. min tokens           x[v] = -inf for end-of-sequence and stop ids while fewer tokens have been emitted
5. repetition penalty   x[v] = x[v] / r if x[v] > 0 else x[v] * r, for v in prompt or output (1909.05858)
6. frequency, presence  x[v] -= frequency * count[v] + presence * (count[v] > 0), counts over the output only
7. temperature          x = (x - max x) / T
8. top-k                keep the k largest, and all that equal the k-th
9. top-p                p = softmax(x); keep v if the mass ranking before it is below top_p; of equal ones the lower
                        id ranks first
10. min-p               keep v if p[v] >= min_p * max p

A row is one position of a session. Its tokens are the committed tokens and the proposal's tokens before it, so "output"
and "emitted" above include these draft tokens. So a row is processed exactly as in plain decoding after they are
committed. Nothing depends on the other rows of the batch, not even the rounding.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core import rows as native
from paceline.core.deferred import Check, DeferredChecks, check_now, upload
from paceline.core.noise import seed_bits
from paceline.errors import InvalidRequestError
from paceline.types import LogprobsMode, SamplingParams

_MIN_TEMPERATURE = 1e-30
_MIN_REPETITION_PENALTY = 1e-20
"""Smaller ones are taken for it: logits that are divided by it stay finite in float32."""
TOP_P_CANDIDATES, _MORE_CANDIDATES = 256, 1024
"""Values that top-p looks at first where it may look at more if they are too few, and where it cannot check that."""
_UNIT_MASS = 2.0**44
"""The most likely token's mass in top-p, which counts in integers: their sums are exact in any order."""


class Grammar(Protocol):
    """The tokens that a structured output allows after the committed ones; ``checkpoint/grammar.py`` is one."""

    @property
    def failure(self) -> str:
        """Reason why some place could not be decided; empty if there was none."""
        ...

    def append(self, token_ids: Sequence[int]) -> bool:
        """Commits tokens; False if one of them was not allowed."""
        ...

    def ready(self) -> bool:
        """False while another thread computes the mask after the committed tokens; ``masks`` would wait for it."""
        ...

    def masks(self, suffixes: Sequence[tuple[int, ...]]) -> native.Masks:
        """Masks of the tokens that may follow the committed tokens and each suffix; ids beyond a mask may not."""
        ...


class SamplerState:
    """Processor state of one session, derived from its context. Owned by one engine; ``append`` on commit."""

    __slots__ = (  # an instance dict of this size is slow to read; it holds only cached attributes
        "__dict__",
        "_bad_words",
        "_bias",
        "_bias_ids",
        "_counts",
        "_emitted",
        "_ids",
        "_others",
        "_repeats",
        "_repetition",
        "_slots",
        "_stop_ids",
        "_stop_index",
        "_tail",
        "_tail_len",
        "_text_key",
        "_undigested",
        "grammar",
        "greedy",
        "min_p",
        "num_guessed",
        "num_output_tokens",
        "num_ranked",
        "num_tokens",
        "params",
        "seed",
        "seed_bits",
        "temperature",
        "top_k",
        "top_p",
        "vocab_size",
    )

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        *,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int,
        device: str | torch.device = "cpu",
        grammar: Grammar | None = None,
        num_ranked: int = 0,
        num_guessed: int = 0,
    ) -> None:
        """Starts from a prompt, and after a failure from the tokens emitted since.

        ``grammar``: of ``params.structured_output``, after ``output_token_ids``. ``num_ranked``: maximum children per
        node of a draft that draws with the target's noise, or with none at temperature 0; 0: no such draft.
        ``num_guessed``: tokens that a draft guesses for the target's own draws under the rejection rule; 0: none.

        Raises:
            InvalidRequestError: an id outside the vocabulary, or a structured output without its grammar.
        """
        if params.structured_output is not None and grammar is None:
            raise InvalidRequestError(
                "structured_output is given: there is no tokenizer here whose tokens it could bind"
            )
        self.params = params
        self.grammar = grammar
        self.seed = seed
        self.seed_bits = seed_bits(seed)
        self.vocab_size = vocab_size
        self.num_tokens = len(prompt_token_ids) + len(output_token_ids)
        self.num_output_tokens = len(output_token_ids)
        self._text_key = digest(output_token_ids, digest(prompt_token_ids))
        self._undigested: list[int] = []  # the last tokens of the context, which it lacks
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        params.check_vocabulary(vocab_size)
        self._check("the prompt", prompt_token_ids)
        self._check("the output", output_token_ids)
        self.greedy = params.temperature == 0
        self.num_ranked = num_ranked
        self.num_guessed = 0 if self.greedy else num_guessed
        self.temperature = 1.0 if self.greedy else max(params.temperature, _MIN_TEMPERATURE)
        # Greedy rows are never truncated: it would not change the argmax, only what its logprob means.
        self.top_k = vocab_size if self.greedy or params.top_k == 0 else min(params.top_k, vocab_size)
        self.top_p = 1.0 if self.greedy else params.top_p
        self.min_p = 0.0 if self.greedy else params.min_p

        self._others: Tensor | None = None
        """[vocab] bool: the tokens that ``allowed_token_ids`` forbids."""
        if params.allowed_token_ids is not None:
            self._others = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self._others[upload(list(params.allowed_token_ids), device, torch.int64)] = False
        self._bias_ids = upload(list(params.logit_bias), device, torch.int64)
        self._bias = upload(list(params.logit_bias.values()), device, torch.float32)
        self._stop_ids = [t for t in sorted(stop_ids) if t < vocab_size] if params.min_tokens else []
        self._stop_index = upload(self._stop_ids, device, torch.int64)
        self._bad_words = BadWords(params.bad_words, device)
        self._tail_len = max((len(words) - 1 for words in params.bad_words), default=0)
        context = (*prompt_token_ids, *output_token_ids)
        self._tail = tuple(context[max(0, len(context) - self._tail_len) :])
        self._repeats = params.repetition_penalty != 1
        self._counts = bool(params.presence_penalty or params.frequency_penalty)
        # Penalties touch only tokens that have occurred: their ids, and how often each has been emitted.
        self._slots: dict[int, int] = {}
        self._ids = torch.zeros(0, dtype=torch.int64, device=device)
        self._emitted = torch.zeros(0, dtype=torch.float32, device=device)
        if self._repeats:
            penalty = max(params.repetition_penalty, _MIN_REPETITION_PENALTY)
            self._repetition = upload([penalty], device, torch.float32)
            self._touch(prompt_token_ids)
        self._count(output_token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Counts committed tokens. The target chose them, so their ids are inside the vocabulary."""
        self.num_tokens += len(token_ids)
        self.num_output_tokens += len(token_ids)
        self._undigested += token_ids
        if self._tail_len:
            self._tail = (*self._tail, *token_ids)[-self._tail_len :]
        if self._repeats or self._counts:
            self._count(token_ids)
        if self.grammar is not None:
            self.grammar.append(token_ids)

    @property
    def text_key(self) -> int:
        """``Row.text_key`` at the end of the context."""
        if self._undigested:
            self._text_key, self._undigested = digest(self._undigested, self._text_key), []
        return self._text_key

    @cached_property
    def only_scales(self) -> bool:
        """True if no processor but the temperature ever changes the logits of this session."""
        return self.picks_at_once and not (self.grammar is not None or self.top_k < self.vocab_size or self.min_p > 0)

    @cached_property
    def picks_at_once(self) -> bool:
        """True if a native function draws this session's tokens in one pass over the logits. This needs a session with
        no processors other than the temperature, structured output, top-k and min-p, which only leave out tokens."""
        return not (self._changes_all or self._stop_ids or self.top_p < 1)

    @cached_property
    def _changes_all(self) -> bool:
        """True if a processor between structured output and temperature may change any row's logits."""
        params, always = self.params, self._others is not None or self._repeats or self._counts
        return always or bool(params.logit_bias or params.bad_words)

    @cached_property
    def cuts(self) -> bool:
        """True if temperature, top-k, top-p or min-p changes the distributions of this session."""
        return self.temperature != 1 or self.top_k < self.vocab_size or self.top_p < 1 or self.min_p > 0

    @cached_property
    def log_min_p(self) -> float:
        """The least logit that min-p keeps, where the largest is 0: with the bits of ``truncate_``."""
        return float(torch.tensor([self.min_p], dtype=torch.float32).log_())

    @cached_property
    def wants_raw_logprobs(self) -> bool:
        """True if log probabilities are asked for that the processed distribution does not have."""
        return self.raw_logprobs and not (self.only_scales and self.temperature == 1)

    @cached_property
    def reads_tokens(self) -> bool:
        """True if the next token's distribution depends on the output by another processor than ``min_tokens``, which
        only counts it."""
        return bool(self.grammar is not None or self.params.bad_words or self._repeats or self._counts)

    @property
    def raw_logprobs(self) -> bool:
        """True if log probabilities are taken before all processors."""
        return self.params.logprobs_mode is LogprobsMode.RAW

    @property
    def wants_rows(self) -> bool:
        """True if log probabilities are asked for that only whole rows tell: of other tokens, or of raw logits."""
        return self.params.top_logprobs > 0 or bool(self.params.logprob_token_ids) or self.wants_raw_logprobs

    @property
    def edits(self) -> bool:
        """True if any processor before the temperature can change logits now."""
        return self.grammar is not None or self.changes

    @property
    def changes(self) -> bool:
        """True if any processor between structured output and temperature can change logits now."""
        return self._changes_all or bool(self._stop_ids and self.num_output_tokens < self.params.min_tokens)

    def edit_(self, logits: Tensor, suffixes: Sequence[tuple[int, ...]]) -> None:
        """Applies the processors before the temperature in place to [rows, vocab] float32, one suffix per row."""
        if self.grammar is not None:
            _forbid_(logits, self.grammar.masks(suffixes))
        self.change_(logits, suffixes)

    def change_(self, logits: Tensor, suffixes: Sequence[tuple[int, ...]]) -> None:
        """``edit_`` without structured output. What that forbids stays forbidden in any order: -inf remains -inf.

        Logits of a draft may be padded to more or fewer tokens than the target has; those beyond them never occur.
        """
        if (missing := self.vocab_size - logits.shape[1]) > 0:
            whole = F.pad(logits, (0, missing), value=-math.inf)
            self.change_(whole, suffixes)
            logits.copy_(whole[:, :-missing])
            return
        if missing < 0:
            logits[:, missing:] = -math.inf
            logits = logits[:, :missing]
        if self._others is not None:
            logits.masked_fill_(self._others, -math.inf)
        if self.params.logit_bias:
            logits[:, self._bias_ids] += self._bias
        if self.params.bad_words:
            self._bad_words.forbid_(logits, [(*self._tail, *suffix) for suffix in suffixes])
        if self._stop_ids:
            for row, suffix in enumerate(suffixes):
                if self.num_output_tokens + len(suffix) < self.params.min_tokens:
                    logits[row].index_fill_(0, self._stop_index, -math.inf)
        if self._repeats or self._counts:
            self._penalize_(logits, suffixes)

    def _penalize_(self, logits: Tensor, suffixes: Sequence[tuple[int, ...]]) -> None:
        # Slots [0, num_slots) are the tokens that occurred in the context; the draft tokens of this batch that did not
        # get the slots after them. Everything below is [rows, slots], never [rows, vocab].
        device, num_slots = logits.device, len(self._slots)
        # Draft tokens outside the vocabulary are never accepted, so the rows after them do not matter.
        drafted = {token for suffix in suffixes for token in suffix if 0 <= token < self.vocab_size}
        new = {token: num_slots + i for i, token in enumerate(sorted(drafted - self._slots.keys()))}
        ids = torch.cat((self._ids[:num_slots], upload(list(new), device, torch.int64)))
        if not len(ids):
            return
        added = [  # how often each row's suffix adds each slot
            (row, self._slots.get(token, new.get(token)), count)
            for row, suffix in enumerate(suffixes)
            for token, count in Counter(suffix).items()
            if token in drafted
        ]
        emitted = torch.cat((self._emitted[:num_slots], torch.zeros(len(new), device=device)))
        counts = emitted.repeat(len(suffixes), 1)
        row_index, slot_index, count_index = upload(added, device, torch.int64).view(-1, 3).unbind(-1)
        counts[row_index, slot_index] += count_index.to(torch.float32)
        x = logits[:, ids]
        if self._repeats:
            penalized = torch.where(x > 0, x / self._repetition, x * self._repetition)
            if new:  # occurs in some rows only
                seen = counts > 0
                seen[:, :num_slots] = True
                penalized = torch.where(seen, penalized, x)
            x = penalized
        if self._counts:
            present = (counts > 0).to(torch.float32).mul_(self.params.presence_penalty)
            x = x - counts.mul_(self.params.frequency_penalty).add_(present)
        logits[:, ids] = x

    def _count(self, token_ids: Sequence[int]) -> None:
        """Counts tokens of the output for the penalties."""
        if (self._repeats or self._counts) and token_ids:
            slots = upload(self._touch(token_ids), self._emitted.device, torch.int64)
            self._emitted.index_add_(0, slots, torch.ones_like(slots, dtype=torch.float32))

    def _touch(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the slots of tokens; assigns the next free slots to new tokens."""
        num_slots, slots = len(self._slots), self._slots
        indices = [slots.setdefault(token, len(slots)) for token in token_ids]
        if len(slots) > len(self._ids):
            more = 2 * len(slots) - len(self._ids)
            self._ids = torch.cat((self._ids, self._ids.new_zeros(more)))
            self._emitted = torch.cat((self._emitted, self._emitted.new_zeros(more)))
        if len(slots) > num_slots:
            fresh = list(islice(slots, num_slots, None))
            self._ids[num_slots : len(slots)] = upload(fresh, self._ids.device, torch.int64)
        return indices

    def _check(self, what: str, token_ids: Sequence[int]) -> None:
        worst = max(token_ids, default=0)
        if worst >= self.vocab_size or min(token_ids, default=0) < 0:
            bad = worst if worst >= self.vocab_size else min(token_ids)
            raise InvalidRequestError(f"{what} holds token id {bad}: ids in [0, {self.vocab_size}) are allowed")


def masks_of(rows: Sequence[Row], vocab_size: int) -> native.Masks | None:
    """The tokens that structured outputs allow in each row, one bit for each of the ids; None where none is asked for.

    Rows of one session next to each other are asked for in one call.
    """
    if len(rows) == 1 and (only := rows[0].state.grammar) is not None:  # nearly every call of a target
        masks = only.masks([rows[0].suffix])
        if 8 * masks.shape[1] >= vocab_size:
            return masks
    if all(row.state.grammar is None for row in rows):
        return None
    masks, start = np.full((len(rows), -(-vocab_size // 8)), 0xFF, np.uint8), 0
    for _, group in groupby(rows, key=lambda row: id(row.state)):
        same = list(group)
        if (grammar := same[0].state.grammar) is not None:
            allowed = grammar.masks([row.suffix for row in same])[:, : masks.shape[1]]
            masks[start : start + len(same), : allowed.shape[1]] = allowed
            masks[start : start + len(same), allowed.shape[1] :] = 0  # ids that no token has
        start += len(same)
    return masks


def _forbid_(logits: Tensor, allowed: native.Masks) -> None:
    """Forbids all tokens in [rows, vocab] that ``allowed`` lacks. Masks have one bit per token, the lowest of each byte
    first.
    """
    logits[:, 8 * allowed.shape[1] :] = -math.inf  # ids that no token has
    logits = logits[:, : 8 * allowed.shape[1]]
    if logits.device.type == "cpu":
        forbidden = np.unpackbits(~allowed, axis=-1, count=logits.shape[-1], bitorder="little")
        logits.masked_fill_(torch.from_numpy(forbidden.view(np.bool_)), -math.inf)
        return
    packed = upload(torch.from_numpy(~allowed), logits.device)
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)
    logits.masked_fill_(bits.bitwise_and_(1).flatten(1)[:, : logits.shape[-1]].bool(), -math.inf)


class BadWords:
    """The sequences of ``bad_words`` by what precedes their last tokens, read backwards from the row: a row costs no
    more than the longest match, however many sequences there are.
    """

    def __init__(self, bad_words: Sequence[tuple[int, ...]], device: str | torch.device) -> None:
        self._root = _Node()
        for *before, last in bad_words:
            node = self._root
            for token in reversed(before):
                node = node.earlier.setdefault(token, _Node())
            node.forbidden.add(last)
        self._device = device

    def forbid_(self, logits: Tensor, tails: Sequence[Sequence[int]]) -> None:
        """Forbids in each row of [rows, vocab] the last tokens of the sequences whose other tokens end its tail."""
        if self._root.forbidden:
            logits.index_fill_(1, self._root.index(self._device), -math.inf)
        for row, tail in enumerate(tails):
            node = self._root
            for token in reversed(tail):
                if (found := node.earlier.get(token)) is None:
                    break
                node = found
                if node.forbidden:
                    logits[row].index_fill_(0, node.index(self._device), -math.inf)


@dataclass(slots=True)
class _Node:
    """The sequences that agree in the tokens from here to their last one."""

    earlier: dict[int, _Node] = field(default_factory=dict)
    forbidden: set[int] = field(default_factory=set)
    """Last tokens of the sequences that begin here."""
    _index: Tensor | None = None

    def index(self, device: str | torch.device) -> Tensor:
        """The forbidden tokens on the device."""
        if self._index is None:
            self._index = upload(sorted(self.forbidden), device, torch.int64)
        return self._index


class Row(NamedTuple):
    """One position of a session whose next token the step decides. A tuple, since a step makes one for every token."""

    state: SamplerState
    suffix: tuple[int, ...] = ()
    """The uncommitted tokens between the context and this position."""

    @property
    def position(self) -> int:
        """The index of the token to be decided in the session's text."""
        return self.state.num_tokens + len(self.suffix)

    @property
    def text_key(self) -> int:
        """A digest of all tokens before this position, in [0, 2**32)."""
        return digest(self.suffix, self.state.text_key)


def digest(token_ids: Sequence[int], before: int = 0) -> int:
    """The CRC-32 of a text that goes on with these tokens, 64 bits each, after one whose CRC-32 is ``before``."""
    return zlib.crc32(array("q", token_ids).tobytes(), before)


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """The values as a [rows, 1] tensor with the dtype and device of ``like``."""
    return upload(values, like.device, like.dtype)[:, None]


def truncate_(x: Tensor, rows: Sequence[Row], check: Check = check_now) -> None:
    """Sets the tokens cut by top-k, top-p and min-p to -inf. x: [rows, vocab] with row maxima 0, modified in place.

    Top-k and top-p both keep a prefix of one ranking (value descending, equal ones by id ascending), so together they
    keep the shorter prefix. Its length needs only the top_k largest values, or the largest with mass top_p, and the
    number of ties with the k-th: top-k keeps all ties. With ``DeferredChecks`` a check fails where top_p needs more
    than ``_MORE_CANDIDATES``.
    """
    states = [row.state for row in rows]
    vocab_size = x.shape[-1]
    prefixed = [i for i, state in enumerate(states) if state.top_k < vocab_size or state.top_p < 1]
    if prefixed:
        every = len(prefixed) == len(rows)
        at = None if every else upload(prefixed, x.device)
        part = x if at is None else x[at]
        keep_prefix_(part, [states[i].top_k for i in prefixed], [states[i].top_p for i in prefixed], check)
        if at is not None:
            x[at] = part
    if any(state.min_p > 0 for state in states):
        limits = column([state.min_p for state in states], x).log_()
        if native.usable(x, torch.float32):
            native.cut_below_(x, limits.flatten().tolist())
        else:
            x.masked_fill_(x < limits, -math.inf)


def keep_prefix_(x: Tensor, top_k: Sequence[int], top_p: Sequence[float], check: Check, least: int = 0) -> None:
    """Applies top-k and top-p to every row, looking at no fewer than ``least`` values at first."""
    vocab_size = x.shape[-1]
    waits, is_native = isinstance(check, DeferredChecks), native.usable(x, torch.float32)
    k = upload(top_k, x.device)[:, None]
    cut = k < vocab_size
    # One value more than top-k keeps tells whether others tie with the last of these.
    num_values = min(vocab_size, max((value for value in top_k if value < vocab_size), default=0) + 1)
    all_mass = None  # of whole rows, needed where top-p acts without top-k
    if any(p < 1 and value == vocab_size for p, value in zip(top_p, top_k, strict=True)):
        all_mass = torch.log_softmax(x, -1).amax(-1, keepdim=True).to(torch.float64).neg_().exp_().mul_(_UNIT_MASS)
        candidates = _MORE_CANDIDATES if waits else TOP_P_CANDIDATES
        num_values = min(vocab_size, max(num_values, candidates, least))
    # values: [rows, num_values], the largest ones, descending; everything below is that or [rows, 1]
    values = native.largest(x, num_values)[0] if is_native else x.topk(num_values, dim=-1).values
    kth = values.gather(-1, (k - 1).clamp(max=num_values - 1)).masked_fill(~cut, -math.inf)
    last, room = kth, torch.full_like(k, vocab_size)
    if any(p < 1 for p in top_p):
        limit = upload(top_p, x.device, torch.float64)[:, None]
        in_top_k = values >= kth
        mass = _mass(values).mul_(in_top_k)
        sums = mass.cumsum(-1)
        sum_ = sums[:, -1:]
        # Tokens that tie with the k-th beyond the values that were looked at: their number, and the mass of each.
        others: Tensor | None = None
        total = sum_
        both = any(p < 1 and value < vocab_size for p, value in zip(top_p, top_k, strict=True))
        if both and num_values < vocab_size and (waits or bool((values[:, -1:] == kth).any())):
            others = (torch.count_nonzero(x == kth, -1) - torch.count_nonzero(values == kth, -1))[:, None] * cut
            total = sum_ + others * (each := _mass(kth))
        if all_mass is not None:
            total = torch.where(cut, total.to(torch.float64), all_mass)
        # A token stays if the mass ranking before it (sums - mass), an integer, is below top_p; the first always does.
        bound = limit.mul(total).ceil_().to(torch.int64)
        inside = ((sums - mass) < bound) & in_top_k
        inside[:, 0] = True
        num_kept = inside.sum(-1, keepdim=True)
        unresolved = ((num_kept == num_values) & ~cut & (limit < 1)).squeeze(-1)
        if num_values < vocab_size and check(unresolved.any()):
            for where, wanted in ((unresolved, num_values * 8), (~unresolved, num_values)):
                rows: list[int] = where.nonzero().squeeze(-1).tolist()
                if rows:
                    part = x[rows]
                    keep_prefix_(part, [top_k[i] for i in rows], [top_p[i] for i in rows], check, wanted)
                    x[rows] = part
            return
        acts = limit < 1
        last = torch.where(acts, values.gather(-1, num_kept - 1), kth)
        if others is not None:
            left = bound - sum_  # of that bound, for the others: the j-th stays if j * each < left
            more = torch.where(each > 0, (left + each - 1) // each.clamp(min=1), torch.where(left > 0, others, 0))
            num_kept += torch.minimum(more.clamp(min=0), others)
        room = torch.where(acts, num_kept - (values > last).sum(-1, keepdim=True), room)
    if is_native:
        native.keep_largest_(x, last.flatten().tolist(), room.flatten().tolist())
        return
    keep, equal = x >= last, x == last
    if waits or check((equal.sum(-1, keepdim=True) > room).any()):  # ties are too common to defer the check
        keep &= ~equal | (equal.cumsum(-1) <= room)
    x.masked_fill_(~keep, -math.inf)


def _mass(values: Tensor) -> Tensor:
    """Probability masses of values below a maximum of 0, in whole units."""
    return values.to(torch.float64).exp_().mul_(_UNIT_MASS).to(torch.int64)
