"""The state of one session's grammar: its masks, for any continuation of the committed tokens, and the way back."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher
    from numpy.typing import NDArray

FREE_S = 0.15
"""CPU time that each session may spend in its grammar, and further time for each of its tokens: see ``Matcher``."""
_FREE_S_PER_TOKEN = 0.005
STEP_S = 0.02
"""CPU time for the masks of all sessions in one step. One mask more may begin before it is spent."""
_MAX_REASON_CHARS = 400
_REPLAYED_AT_ONCE = 16


def reason_of(matcher: LLMatcher) -> str:
    """The fault that the library reports, in one line of bounded length."""
    text = re.sub(r"\s+", " ", matcher.get_error().split("<state>")[0]).strip()
    text = text.removesuffix(" <non-verbose/>")
    if text.startswith("NoExtension"):
        return "no text has this form"
    return text if len(text) <= _MAX_REASON_CHARS else text[:_MAX_REASON_CHARS] + "..."


class StepTime:
    """CPU time that masks have taken of the current step of an engine."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def begin(self) -> None:
        """Begins a step."""
        self.spent_s = 0.0

    def allows(self, expected_s: float = 0.0) -> bool:
        """True if a mask of ``expected_s`` may begin. Else it waits for a later step, or is left out."""
        return self.spent_s + expected_s < STEP_S


class Matcher:
    """The state of one session's grammar after its committed tokens. Owned by one engine.

    Its work has a budget of CPU time, which grows with each token. Beyond it the masks after drafted tokens are not
    computed, so the session is decoded plainly; a session whose committed tokens alone exceed it fails.
    """

    def __init__(
        self,
        prototype: LLMatcher,
        anew: Callable[[], LLMatcher],
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        lenient: bool = False,
        step: StepTime | None = None,
    ) -> None:
        """``prototype``: its copies share their caches. ``anew``: makes one with empty caches. ``step``: a budget that
        pays for masks after drafted tokens; once it is spent, they are not computed."""
        import numpy  # engines have it; the command line is up without it

        self._numpy = numpy
        self.failure = ""
        """Reason why some place could not be decided; empty while none exceeded the bounds."""
        self._anew, self._vocab_size, self._lenient = anew, vocab_size, lenient
        self._eos_token_ids, self._step = eos_token_ids, step
        self._tokens: list[int] = []
        self._path: tuple[int, ...] = ()
        """Tokens after the committed ones that the state has consumed, too."""
        self._known: dict[tuple[int, ...], NDArray[np.uint8]] = {}
        """Masks of continuations of the committed tokens."""
        self._state = prototype.deep_copy()
        self._lost = False
        self.in_step = False
        """True: a state that exceeded a bound is not made again now, which may take long; its mask stays undecided."""
        self._drafted_s = self._committed_s = self._last_s = 0.0
        self._num_bytes = 4 * -(-vocab_size // 32)
        self._unused_mask = self._numpy.empty(self._num_bytes, self._numpy.uint8)

    def append(self, token_ids: Sequence[int]) -> bool:
        """Commits tokens; False if one of them was not allowed, after which none is.

        What comes with or after the end-of-sequence token of a complete output is not looked at.
        """
        began = time.thread_time()
        allowed = self._append(tuple(token_ids))
        self._committed_s += time.thread_time() - began
        return allowed

    def replay(self, token_ids: Sequence[int]) -> bool:
        """``append`` of a whole output, which is left within the budget of its session: then the next mask fails."""
        for start in range(0, len(token_ids), _REPLAYED_AT_ONCE):
            if not self.append(token_ids[start : start + _REPLAYED_AT_ONCE]):
                return False
            if self._exceeds_budget(()):
                break
        return True

    def _append(self, tokens: tuple[int, ...]) -> bool:
        followed = self._path[: len(tokens)] == tokens
        num_consumed = len(tokens) if followed else self._move(tokens)
        self._known.clear()
        self._tokens += tokens
        self._path = self._path[len(tokens) :] if followed else ()
        if self.is_intact:
            self._check(len(tokens) - num_consumed)
        elif self.in_step:
            self._path = ()
        else:
            self._check(self._restart())
        return not self._lost

    def _check(self, num_lacking: int) -> None:
        """Fails if the first committed token that was not consumed is not allowed; the next mask reports an error."""
        if num_lacking and self.is_intact and not self._ends(self._tokens[-num_lacking]):
            self._lost, self.failure = True, "a token came that it does not allow"

    def _ends(self, token_id: int) -> bool:
        return token_id in self._eos_token_ids and bool(self._state.is_accepting() or self._state.is_stopped())

    def masks(self, suffixes: Sequence[tuple[int, ...]]) -> NDArray[np.uint8]:
        """The tokens that may follow each of ``suffixes`` after the committed tokens.

        Suffixes with a common beginning share its work, across calls too; masks stay cached until tokens are committed.
        A suffix that the grammar forbids is left unconstrained: no row below a forbidden token matters. After a suffix
        that exceeds a bound nothing is allowed, so verification ends there.

        Returns:
            [rows, bytes] with bit v % 8 of byte v // 8 set if token v is allowed; at least one byte per 8 tokens.
            Read-only.
        """
        count, num_bytes = len(suffixes), self._num_bytes
        masks: NDArray[np.uint8] = self._numpy.empty((count, num_bytes), self._numpy.uint8)
        place = masks.__array_interface__["data"][0]
        for row in sorted(range(count), key=suffixes.__getitem__) if count > 1 else range(count):
            suffix = suffixes[row]
            if (known := self._known.get(suffix)) is not None:
                masks[row] = known
            elif self._lost or self._exceeds_budget(suffix) or (suffix and not self.is_intact):
                masks[row] = 0xFF if self._lenient else 0
            else:
                began = time.thread_time()
                if self._mask_at(place + row * num_bytes, suffix):
                    self._known[suffix] = masks[row]
                elif self.is_intact:
                    masks[row] = 0xFF
                elif suffix or self.in_step:
                    masks[row] = 0xFF if self._lenient else 0
                else:
                    self._known[suffix] = masks[row] = self._again()
                taken_s = self._last_s = time.thread_time() - began
                if suffix:
                    self._drafted_s += taken_s
                    if self._step is not None:
                        self._step.spent_s += taken_s
                else:
                    self._committed_s += taken_s
        return masks

    def ready(self) -> bool:
        """True: nothing has to be awaited before a mask is requested."""
        return True

    @property
    def is_intact(self) -> bool:
        """False if a bound was exceeded, so that the state must be made again from the committed tokens."""
        return not self._state.is_error()

    @property
    def is_decided(self) -> bool:
        """True if the mask after the committed tokens costs nothing more: it is known, or there is none."""
        return () in self._known or self._lost or bool(self.failure)

    def _exceeds_budget(self, suffix: tuple[int, ...]) -> bool:
        """True if the budget allows no mask after ``suffix``; without a suffix, the session then fails."""
        if suffix and self._step is not None and not self._step.allows(self._last_s):
            return True
        budget_s = FREE_S + _FREE_S_PER_TOKEN * len(self._tokens)
        if self._committed_s + self._drafted_s <= budget_s or (not suffix and self._committed_s <= budget_s):
            return False
        if not suffix and not self.failure:
            self._lost = self._lenient
            self.failure = (
                f"its masks take {round(self._committed_s * 1000)} ms of work for {len(self._tokens)} tokens: at most "
                f"{round(FREE_S * 1000)} ms and {round(_FREE_S_PER_TOKEN * 1000)} ms a token are allowed"
            )
        return True

    def _mask_at(self, place: int, suffix: tuple[int, ...]) -> bool:
        """Writes a mask to a place in memory; False if there is none: the suffix is forbidden, or exceeds a bound."""
        if self._move(suffix) < len(suffix):
            return False
        self._state.unsafe_compute_mask_ptr(place, self._num_bytes)
        return not self._state.is_error()

    def _move(self, suffix: tuple[int, ...]) -> int:
        """Goes to a continuation of the committed tokens, as far as the grammar allows: the number of its tokens."""
        path = self._path
        count = len(path)
        if suffix[:count] != path:
            count = next((i for i, (a, b) in enumerate(zip(path, suffix, strict=False)) if a != b), len(suffix))
            self._state.rollback(len(path) - count)
            if count < len(suffix):  # or the library, which keeps its last mask, may take it for another place's
                place = self._unused_mask.__array_interface__["data"][0]
                self._state.unsafe_compute_mask_ptr(place, self._num_bytes)
        if count < len(suffix):
            count += self._consume(suffix[count:], known=suffix[:count])
        self._path = suffix[:count]
        return count

    def _consume(self, token_ids: Sequence[int], known: tuple[int, ...] | None = None) -> int:
        """Consumes tokens until one is not allowed or the state is an error; returns the number consumed.

        The library stops without an error if the work of all tokens exceeds its bound of one step, or if the shared
        automaton is full. So only the mask decides if a token is not allowed.

        Args:
            token_ids: the tokens.
            known: the tokens between the committed ones and these; None: the masks of these places are not kept.
        """
        num_in_range = next((i for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size), len(token_ids))
        given, count = [*token_ids[:num_in_range]], 0
        while count < len(given):
            num_taken = int(self._state.try_consume_tokens(given[count:] if count else given))
            count += num_taken
            if count == len(given) or not self.known_to_allow(
                given[count], None if known is None else (*known, *given[:count])
            ):
                break
            if not num_taken:
                self._state.consume_token(given[count])  # makes the state the error that it is
                break
        return count

    def known_to_allow(self, token_id: int, place: tuple[int, ...] | None) -> bool:
        """True if the mask of the state, which is kept for ``place``, allows a token; False if there is no mask."""
        mask = None if place is None else self._known.get(place)
        if mask is None:
            mask = self._numpy.empty(self._num_bytes, self._numpy.uint8)
            self._state.unsafe_compute_mask_ptr(mask.__array_interface__["data"][0], self._num_bytes)
            if self._state.is_error():
                return False
            if place is not None:
                self._known[place] = mask
        return bool(mask[token_id // 8] >> (token_id % 8) & 1)

    def _again(self) -> NDArray[np.uint8]:
        """Computes the mask after the committed tokens again with empty caches, after a bound was exceeded. So the
        result depends on the session's tokens alone, as in plain decoding.
        """
        num_lacking = self._restart()
        self._check(num_lacking)
        mask: NDArray[np.uint8] = self._numpy.full(self._num_bytes, 0xFF, self._numpy.uint8)
        if not num_lacking:
            self._mask_at(mask.__array_interface__["data"][0], ())
        if not self.is_intact:
            self.failure = reason_of(self._state) or "it exceeds the bounds of a step"
            self._lost = self._lenient
            self._restart()
        if self.failure:
            mask[:] = 0xFF if self._lenient else 0
        return mask

    def _restart(self) -> int:
        """Comes to the committed tokens again, sharing nothing with other sessions: how many were not consumed."""
        self._state, self._path = self._anew(), ()
        return len(self._tokens) - self._consume(self._tokens)
