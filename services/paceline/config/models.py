"""Models and how they are run: one model, the n-gram drafter, a pair with its limits, and the pair on one machine
that ``local.py`` wires. Knows nothing of Ray Serve and of files.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Config
from paceline.refusals import Fault

DType = Literal["auto", "float32", "bfloat16"]
"""``auto``: bfloat16 where the device multiplies it natively (AMX, AVX512-BF16, CUDA), else float32."""

Device = Literal["auto", "cpu", "cuda"]
"""``auto``: CUDA where there is a device, else the CPU."""

Quantization = Literal["int8"]
"""``int8``: the weights of linear layers as 8-bit integers with one scale for each output, rounded while they are
loaded; activations keep the dtype."""


class ModelSettings(Config):
    """How a model is run."""

    dtype: DType = "auto"
    compile: bool | Literal["auto"] = "auto"
    """Compile ahead of time, once per machine and checkpoint (half a minute to two). ``auto``: on CPU."""
    device: Device = "auto"
    quantization: Quantization | None = None
    """None: the weights as they are in the checkpoint, which may come quantised."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks that share the weights and the KV cache, each a process with a core or an accelerator of its own."""
    rank_timeout_s: float = Field(default=10.0, gt=0)
    """How much later than another a rank may come to an exchange before it counts as hung, and the engine as dead."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Record decoding and verification at start-up and replay them. ``auto``: on CUDA, where the model allows it."""
    max_cuda_graphs: int = Field(default=64, ge=1, le=1024)
    """Step shapes that are recorded, as far as the memory reaches; steps beyond run eagerly."""
    attention: Literal["auto", "sdpa", "native", "triton"] = "auto"
    """The attention kernel (``model/kernels.py``). ``auto``: native on CPUs that have it, else sdpa."""


class ModelConfig(ModelSettings):
    """A causal language model and how to run it."""

    path: str = Field(min_length=1)
    """Directory of a checkpoint, or an id that transformers resolves (cache, then hub)."""


class DraftModelConfig(ModelConfig):
    """A smaller model with the target's tokenizer."""

    kind: Literal["model"] = "model"


class NgramConfig(Config):
    """Continuations copied from earlier occurrences of the last tokens in the session's own context."""

    kind: Literal["ngram"] = "ngram"
    min_match: int = Field(default=1, ge=1, le=16)
    """The shortest suffix that is looked up, in tokens."""
    max_match: int = Field(default=4, ge=1, le=16)
    """The longest suffix that is looked up, in tokens; longer ones are tried first."""


DrafterConfig = Annotated[DraftModelConfig | NgramConfig, Field(discriminator="kind")]


class PairConfig(Config):
    """One target and at most one draft, and their limits: what the builders of both engines are given."""

    target: ModelConfig
    draft: DrafterConfig | None = None
    """None: plain decoding only."""

    max_sessions: int = Field(default=16, ge=1, le=1024)
    """Sessions that are in progress at once; further ones wait."""
    draft_max_sessions: int | None = Field(default=None, ge=1, le=16384)
    """Sessions that the draft's KV pages are sized for. None: max_sessions."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest context in tokens. None: what the target was trained for."""
    max_step_tokens: int = Field(default=256, ge=32, le=65536)
    """Tokens of one target forward, prefill chunks and proposals together."""
    adaptive: bool = True
    """As many draft tokens per step as pay by measured times, and no draft where none do. False: as many as a request
    allows, always."""
    kv_pages: int | None = Field(default=None, ge=1)
    """KV pages of the target. None: enough for max_sessions at 1024 positions, or one at max_model_len."""
    kv_fraction: float | None = Field(default=None, gt=0, le=1)
    """Instead of kv_pages: the share of the memory left beside weights and workspace that becomes KV pages."""

    tree_budget: int = Field(default=256, ge=1, le=4096)
    """Nodes that the draft keeps per session beyond the context."""
    tree_step_tokens: int | None = Field(default=None, ge=1, le=1024)
    """Tree nodes that the draft evaluates in one forward, all sessions together. None: as many as cost a draft
    model little more than one, measured at start-up."""
    fan_out: int = Field(default=6, ge=1, le=32)
    """F, alternative next tokens prepared at a position."""
    draft_top_m: int = Field(default=256, ge=1, le=65536)
    """Candidates of the draft's distribution that are ranked; the rest of its tail is never proposed."""

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        require_one_size(self.kv_pages, self.kv_fraction)
        return self

    @property
    def num_draft_sessions(self) -> int:
        """Sessions that the draft is made for."""
        return self.draft_max_sessions or self.max_sessions


class LocalConfig(PairConfig):
    """A pair on one machine (``local.py``)."""

    worker: Literal["process", "thread"] = "process"
    """Where the engines run. ``thread`` shares one interpreter lock between both: for debugging and tests."""
    pin_cores: bool = True
    """Give each engine a core of its own where there are at least two."""


def require_one_size(kv_pages: int | None, kv_fraction: float | None) -> None:
    """Raises Fault if both are given."""
    if kv_pages is not None and kv_fraction is not None:
        raise Fault("kv_fraction", f"is {kv_fraction} while kv_pages is {kv_pages}: give one of them")
