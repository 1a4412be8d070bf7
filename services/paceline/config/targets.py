"""Options of a target engine. YAML holds them as ``engine_kwargs``, ``LocalConfig`` with a path."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Strict
from paceline.config.engines import ModelOptions
from paceline.config.heads import HeadOptions
from paceline.config.methods.lookahead import LookaheadOptions
from paceline.errors.refusals import Fault
from paceline.types import least_states

KVTransferBackend = Literal["auto", "nixl", "host"]


class HintOptions(Strict):
    """Hints to overlapped drafts while the target's upper layers run (Mirror speculative decoding): the likeliest
    tokens of an early exit. The draft then expands these sooner. The text does not depend on them."""

    boundary: int = Field(ge=1)
    """Layers below it run before the hint, by the final norm and the LM head; fewer than the target has."""
    model: str | None = Field(default=None, min_length=1)
    """Directory of an exit head of that boundary, which ``paceline train-head early_exit`` writes, or an id that
    transformers resolves: its output replaces the state before the final norm. None: the state as it is."""
    top: int = Field(default=8, ge=1, le=64)
    """Tokens for each place of a proposal."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight w of a hint: an outcome counts with q^(1 - w) e^w, q the draft's probability, e the hint's."""

    @property
    def head(self) -> HeadOptions | None:
        """The exit head, as if it drafted; None: there is none."""
        if self.model is None:
            return None
        return HeadOptions(method="early_exit", model=self.model, boundaries=[self.boundary])


class TargetOptions(ModelOptions):
    """Options of a target engine."""

    max_sessions: int = Field(default=16, ge=1, le=1024)
    """Sessions that are in progress at once on one replica; further ones wait."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest context in tokens. None: the trained length."""
    max_step_tokens: int = Field(default=256, ge=32, le=65536)
    """Tokens of one forward, prefill chunks and proposals together."""
    batch_invariant: Literal["auto", "require", "off"] = "auto"
    """Compare the bits of verification and of decoding when the target starts. ``auto``: and warn where they differ;
    ``require``: and refuse to start then; ``off``: start sooner, and promise nothing."""
    adaptive: bool = True
    """Verify the draft tokens per step with positive expected gain by measured times, and use no draft where none
    have. False: always the most that a request allows."""
    tree_verification: Literal["auto", "off"] = "auto"
    """Verify alternative tokens in addition to the likeliest one of a position. ``auto``: with ``adaptive``, where
    they have positive expected gain; ``off``: chains only. Sessions under the rejection rule always have chains."""
    kv_transfer_backend: KVTransferBackend = "auto"
    """How KV pages come from a draining target. ``nixl``: read by NIXL from the other target's memory, where both have
    it; ``host``: through the memory of both hosts and gRPC. ``auto``: NIXL where it is installed, unless
    ``internal_tls`` is set, since NIXL does not encrypt."""
    kv_pages: int | None = Field(default=None, ge=1)
    """KV pages of 64 tokens. None: kv_fraction, else enough for max_sessions at 1024 positions, or one at
    max_model_len."""
    kv_fraction: float | None = Field(default=None, gt=0, le=1)
    """Instead of kv_pages: the share of the memory that weights and workspace leave free which becomes KV pages."""
    state_slots: int | None = Field(default=None, ge=1)
    """States that linear layers keep, of sessions and of cached prefixes: at least 2 for each session. None: 8 more
    than that. Only for a model with linear layers."""
    heads: list[HeadOptions] = Field(default=[], max_length=8)
    """Drafters inside the target replica. A session whose draft has nothing, or that has no draft, is given the tokens
    of the first one that is ready for it."""
    mtp_modules: Literal["auto", "off"] = "auto"
    """MTP modules in the target's own files. ``auto``: with ``adaptive`` they are a head if no other is configured,
    here or in the draft pool; where that is impossible, the target runs without them, and the log says why. ``off``:
    only the heads of ``heads`` draft."""
    hints: HintOptions | None = None
    """Hints to the drafts while a step runs. None: none, and nothing is computed for them."""

    @model_validator(mode="after")
    def _fits_hints(self) -> Self:
        if self.hints is None:
            return self
        if self.tensor_parallel_size > 1:
            raise Fault(
                "hints", f"needs whole layers while tensor_parallel_size is {self.tensor_parallel_size}: 1 is allowed"
            )
        if self.quantization is not None:
            raise Fault("hints", f"needs plain weights while quantization is {self.quantization!r}: null is allowed")
        return self

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.kv_pages is not None and self.kv_fraction is not None:
            raise Fault("kv_fraction", f"is {self.kv_fraction} while kv_pages is {self.kv_pages}: give one of them")
        return self

    @model_validator(mode="after")
    def _fits_sessions(self) -> Self:
        if self.state_slots is not None and self.state_slots < (least := least_states(self.max_sessions)):
            raise Fault("state_slots", f"is {self.state_slots}: {self.max_sessions} sessions need {least} at least")
        return self

    @model_validator(mode="after")
    def _fits_heads(self) -> Self:
        if sum(head.method == "lookahead" for head in self.heads) > 1:
            raise Fault("heads", "has method 'lookahead' more than once: one is allowed")
        for head in self.heads:
            needed = (head.lookahead or LookaheadOptions()).num_tokens + 1
            if head.method == "lookahead" and needed > self.max_step_tokens:
                raise Fault("max_step_tokens", f"is {self.max_step_tokens}: method 'lookahead' needs {needed} at least")
        method = next((head.method for head in self.heads if head.entry.target_kv), None)
        if method is None:
            return self
        if self.tensor_parallel_size > 1:
            raise Fault(
                "tensor_parallel_size",
                f"is {self.tensor_parallel_size} with a head of method {method!r}, which needs whole layers: "
                "1 is allowed",
            )
        method = next((head.method for head in self.heads if head.entry.target_layers), None)
        if method is not None and self.quantization is not None:
            raise Fault(
                "quantization",
                f"is {self.quantization!r} with a head of method {method!r}, whose layers are plain weights: "
                "null is allowed",
            )
        return self
