"""Heads: drafters of the target's hidden states, of its layers or of its text, in each target replica or, where states
suffice, in the draft pool."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from paceline.config.base import Strict
from paceline.config.devices import Device
from paceline.config.engines import DType, Growing
from paceline.config.loading import resolve
from paceline.config.methods import DRAFTERS, HEADS
from paceline.config.methods.entry import HeadMethod, PoolMethod
from paceline.config.methods.lookahead import LookaheadOptions
from paceline.config.methods.suffix import SuffixMatching
from paceline.config.replicas import Drafts
from paceline.errors.refusals import Fault
from paceline.types import MAX_DRAFT_TOKENS

if TYPE_CHECKING:
    HeadName = str
else:  # by the names of vLLM's ``speculative_config``
    HeadName = Literal[tuple(HEADS)]


class HeadOptions(Strict):
    """A head: a drafter inside each target replica. The keys are named as in vLLM's ``speculative_config``."""

    method: HeadName
    """``draft_model``: a smaller model with the target's tokenizer, in the target's process. ``early_exit``: the first
    layers of the target itself. ``speculative_streaming``: its last layers, on rows with weights of their own.
    ``gemma4_assistant``: the drafter that Google publishes for each Gemma 4.
    ``lookahead``: n-grams that the target generates on extra rows of its steps. ``suffix``: what followed the
    longest end of the text before. The others read the target's hidden states."""
    model: str | None = Field(default=None, min_length=1)
    """Directory of the head's checkpoint, or an id that transformers resolves; for ``early_exit`` an exit head that
    ``paceline train-head early_exit`` writes. None: the target's own files suffice; for ``mtp``, ``early_exit``,
    ``lookahead`` and ``suffix`` only."""
    boundaries: list[int] | None = Field(default=None, min_length=1)
    """Hidden states to read instead of the ones that the checkpoint names (``eagle3``, ``peagle``, ``dflash``,
    ``dspark``, ``jetspec``): b for the residual stream before layer b, the number of layers for the stream after the
    last one. ``early_exit`` needs one: the layers below it draft; None: its exit head's."""
    num_speculative_tokens: int = Field(default=4, ge=1, le=MAX_DRAFT_TOKENS)
    """Maximum tokens that the head proposes in a round. With ``adaptive`` it proposes only tokens with positive
    expected gain."""
    lookahead: LookaheadOptions | None = None
    """Sizes of method ``lookahead``. None: the defaults."""
    suffix: SuffixMatching | None = None
    """Texts of method ``suffix``. None: the session's own."""
    probe: bool = True
    """Test the head when the target starts, on some text that the target writes. A head that predicts almost none of
    it is refused. A warning names a setting with which the head would predict more. False: no test. Draft models, early
    exits, streams, Gemma 4's drafter, lookahead and suffixes are not tested."""
    probe_file: str | None = Field(default=None, min_length=1)
    """A text file from whose first four paragraphs the target goes on for this. None: sentences of our own."""

    @property
    def source(self) -> str | None:
        """Directory or id of the checkpoint. None: it comes with the target's."""
        return None if self.model is None else resolve(self.model)

    def __str__(self) -> str:
        if self.boundaries and self.model is None:
            return f"{self.method} at {self.boundaries[0]}"
        return self.method if self.model is None else f"{self.method} {self.model}"

    @property
    def entry(self) -> HeadMethod:
        """Entry of its method."""
        return HEADS[self.method]

    @model_validator(mode="after")
    def _of_method(self) -> Self:
        entry = self.entry
        if entry.boundaries == "one":
            self._check_exit()
        elif entry.model == "none":
            if self.model is not None:
                raise Fault("model", f"is {self.model!r} with method {self.method!r}, which has no weights")
        elif entry.model == "needed" and self.model is None:
            raise Fault("model", f"is null: method {self.method!r} needs the directory or id of its checkpoint")
        for method in ("lookahead", "suffix"):
            if getattr(self, method) is not None and self.method != method:
                raise Fault(method, f"is given with method {self.method!r}: it is for method {method!r}")
        if self.boundaries is not None and entry.boundaries == "none":
            choosing = ", ".join(name for name, other in HEADS.items() if other.boundaries != "none")
            raise Fault(
                "boundaries", f"is {self.boundaries} with method {self.method!r}: only {choosing} have them to choose"
            )
        if self.probe_file is not None and not (self.probe and entry.probed):
            why = "probe false" if entry.probed else f"method {self.method!r}, which is not asked"
            raise Fault("probe_file", f"is {self.probe_file!r} with {why}: leave it out")
        return self

    def _check_exit(self) -> None:
        if self.boundaries is None and self.model is not None:
            return
        if self.boundaries is None or len(self.boundaries) != 1 or self.boundaries[0] < 1:
            raise Fault("boundaries", f"is {self.boundaries}: method {self.method!r} needs one, of at least 1")


class HeadDraftOptions(Growing):
    """Options of a head in the draft pool: a drafter that reads the target's hidden states, which the target sends
    after every outcome."""

    method: HeadName
    """``mtp``, ``eagle``, ``eagle3``, ``peagle``, ``dflash``, ``dspark`` or ``jetspec``; the others are served in the
    target only (``target_config.engine_kwargs.heads``)."""
    model: str | None = Field(default=None, min_length=1)
    """Directory of the head's checkpoint, or an id that transformers resolves, on the machines of targets and of
    drafts. None, for ``mtp`` only: the modules are in the target's own files."""
    boundaries: list[int] | None = Field(default=None, min_length=1)
    """Hidden states to read instead of the ones that the checkpoint names, as for a head in the target."""
    num_speculative_tokens: int = Field(default=16, ge=1, le=MAX_DRAFT_TOKENS)
    """Maximum tokens that a head predicts by one pass after the last token with a received state (``peagle``,
    ``dflash``, ``dspark``, ``jetspec``)."""
    ahead: bool | Literal["auto"] = "auto"
    """Draft for future outcomes, with the head's own guesses of their states. ``auto``: if the measured share of
    tokens that is still accepted then outweighs the time saved; False: only once an outcome and its states have
    arrived."""
    dtype: DType = "auto"
    """The number format of the head."""
    device: Device = "auto"
    """As of a model."""
    max_sessions: int | None = Field(default=None, ge=1, le=16384)
    """Sessions that the KV pages are sized for; one draft may serve several targets. None: the target's number."""
    draft_top_m: int = Field(default=256, ge=1, le=65536)
    """Candidates of the distribution that are ranked; the rest of its tail is never proposed."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Returns the device of the head, as the only one."""
        return (self.device,)

    @property
    def head(self) -> HeadOptions:
        """Returns the same head inside a target, where ``method`` allows it."""
        return HeadOptions(
            method=self.method,
            model=self.model,
            boundaries=self.boundaries,
            num_speculative_tokens=self.num_speculative_tokens,
        )

    @model_validator(mode="after")
    def _of_method(self) -> Self:
        if not HEADS[self.method].remote:
            allowed = ", ".join(repr(method) for method, entry in HEADS.items() if entry.remote)
            needs = "needs the target's keys and values and " if HEADS[self.method].target_kv else ""
            raise Fault(
                "method",
                f"is {self.method!r}, which {needs}is served in the target only (target_config.engine_kwargs.heads): "
                f"in the draft pool {allowed} are allowed",
            )
        try:
            self.head  # noqa: B018
        except ValidationError as error:
            fault = error.errors()[0]["ctx"]["error"]
            raise fault if isinstance(fault, Fault) else error from None
        return self


class HeadDraftConfig(Drafts):
    """The pool of drafts: a head that reads the hidden states which the targets send it."""

    kind: Literal["head"] = "head"
    engine_kwargs: HeadDraftOptions
    accelerator_type: str | None = Field(default=None, min_length=1)
    """Kind of GPU by Ray's name, such as ``L4``."""

    def deployment_options(self) -> dict[str, Any]:
        """Keyword arguments of ``serve.deployment``."""
        wants_gpu = self.accelerator_type is not None or self._wants_gpu
        return self._options(self.accelerator_type, wants_gpu=wants_gpu)

    @property
    def drafter_name(self) -> str:
        """Method and checkpoint of the head."""
        return str(self.engine_kwargs.head)


def _with_model(tree: dict[str, Any], model: str) -> None:
    tree["engine_kwargs"]["model"] = model


IN_POOL = PoolMethod(
    config=HeadDraftConfig,
    build="paceline.draft.build:build_head",
    host_bytes=lambda options: 0,
    examine="paceline.drafters.available:of_states",
    with_model=_with_model,
    pool="paceline.preflight.service:pool_of_head",
    acceptance={},  # that of its method
    rows=tuple(
        replace(
            row,
            name=f"{row.name}, in the pool",
            when="targets whose devices have no room for it, or no time",
            options={"method": entry.method},
        )
        for entry in HEADS.values()
        if entry.remote
        for row in entry.rows
    ),
)
"""Any head that the states of each position suffice for, in the draft pool."""
POOL: dict[str, PoolMethod] = {**DRAFTERS, IN_POOL.kind: IN_POOL}
"""Every drafter of the pool by ``draft_config.kind``."""
