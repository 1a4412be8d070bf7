"""Steps in flight: queued on the device, their verdicts not known to the host yet.

The engine launches a step, does what does not depend on its verdicts, and finishes it: waits, commits and sends. On an
asynchronous device it launches the next step before it finishes this one, from the tokens that the device has sampled::

    device   | step n          | step n + 1      | step n + 2
    host       launch n + 1, finish n ..   launch n + 2, finish n + 1 ..

So the host's work takes time only where it is longer than the device's. A step with drafts is awaited only after most
of its expected time, and messages are received until then. So drafts' tokens are in the trees when the outcome is
known, and no step waits for their messages to be read. What the next step does not need of this one is left for after
its launch: ``Finished`` has what sessions were when it was decided, so whatever happens to them until then does not
matter. It is settled as well where the next step fails or there is none.

At most two steps are in flight. The second is launched under one rule: it may depend on the outcome of the first only
by the values of tokens.

- The target runs on accelerators, has no head, sends no hidden states or hints, and shares no cores with a draft.
- The step in flight verifies no draft tokens, and no running session may have any in the next one: it has no draft, and
  prompt lookups have no expected gain, or pause because they were without result.
- No running session's next token needs earlier ones on the host, as structured output, penalties, bad words and the
  rejection rule do, nor rows of logits (log probabilities of other tokens or of the prompt).
- There are pages without a preemption.

Otherwise the step is finished first. A session that has ended meanwhile (stop token, cancellation) still has a row in
the step ahead. That row's verdict is dropped, and the session's pages are kept until the step is done. Where the device
cannot decide a step (``Drawn.verdicts``), the step ahead is dropped as a whole. Several ranks launch the same steps,
ahead or not. If one of them cannot run a step, the step ends before it is committed (``model/parallel/runner.py``).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from paceline.core.verification import Drawn
from paceline.messages import SessionFailed
from paceline.model.kv_cache import KVCache
from paceline.target.control.step_meter import DecidedRound, MeasuredStep, StepTimes
from paceline.target.runners import Forwarded
from paceline.target.scheduler import Scheduled
from paceline.target.session import TargetSession


@dataclass(slots=True)
class Flight:
    """A step in flight."""

    parts: Sequence[Scheduled]
    forwarded: Forwarded
    drawn: Drawn | None = None
    """The tokens that the device samples from whole rows of logits; None: it samples none, and the host decides."""
    token_ids: Tensor | None = None
    """[parts that verify] int64: all tokens that devices sample, ``Forwarded.sampled`` first; None: the next step
    needs more than these."""
    is_ahead: bool = False
    """It was launched before the step in front of it was finished."""
    awaited_from: float = 0.0
    """Time until which messages are received before the step is awaited; 0: it is awaited at once."""
    pages: list[int] = field(default_factory=list)
    """Pages of sessions that have ended since it was launched: it may still write to them."""

    def is_whole(self, part: Scheduled) -> bool:
        """True if a verifying part's tokens are sampled from whole rows of logits."""
        return not (self.forwarded.sampled and part.session.picks)

    def wait(self) -> None:
        """Waits until the step is done."""
        for sampled in self.forwarded.sampled:
            sampled.wait()
        if self.drawn is not None:
            self.drawn.wait()

    def keep_pages(self, session: TargetSession) -> None:
        """Holds the pages of a session that ends, if the step computes tokens of it."""
        if any(part.session is session for part in self.parts):
            self.pages += [*session.pages, *session.private_pages]
            session.pages, session.private_pages = array("q"), []

    def release_pages(self, cache: KVCache) -> None:
        """Releases the pages of sessions that ended. Only once the step is done."""
        cache.release(self.pages)
        self.pages = []


@dataclass(slots=True)
class Finished:
    """A step whose verdicts are known."""

    parts: Sequence[Scheduled]
    times: StepTimes
    open: Sequence[Scheduled] = ()
    """The parts of sessions that had not ended by then."""
    rounds: list[DecidedRound] = field(default_factory=list)
    """What was committed, in the order of the parts."""
    failed: list[SessionFailed] = field(default_factory=list)
    running: Sequence[TargetSession] = ()
    """Sessions that were served when it was decided."""
    step: MeasuredStep | None = None
    """None: it is not measured yet."""
    num_emitted: int = 0

    def __post_init__(self) -> None:
        self.open = self.parts
