"""Configuration: parsed once, frozen, handed down by the slice.

The only module that reads or sets environment variables. A misspelt key is an error that names itself.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, TextIO

from pydantic import BaseModel, ConfigDict, Field

DType = Literal["auto", "float32", "bfloat16"]
"""``auto``: bfloat16 where the device multiplies it natively (AMX, AVX512-BF16, CUDA), else float32."""

WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""What a worker process sets before it imports torch: a multi-threaded region stalls whenever anything else
wants one of its cores, so parallelism comes from processes."""


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(_Config):
    """A causal language model and how to run it."""

    path: str = Field(min_length=1)
    """Directory of a checkpoint, or an id that transformers resolves (cache, then hub)."""
    dtype: DType = "auto"
    compile: bool | Literal["auto"] = "auto"
    """Compile ahead of time, once per machine and checkpoint (half a minute to two). ``auto``: on CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"


class DraftModelConfig(ModelConfig):
    """A smaller model with the target's tokenizer."""

    kind: Literal["model"] = "model"


class NgramConfig(_Config):
    """Continuations copied from earlier occurrences of the last tokens in the session's own context."""

    kind: Literal["ngram"] = "ngram"
    min_match: int = Field(default=1, ge=1, le=16)
    """The shortest suffix that is looked up, in tokens."""
    max_match: int = Field(default=4, ge=1, le=16)
    """The longest suffix that is looked up, in tokens; longer ones are tried first."""


DrafterConfig = Annotated[DraftModelConfig | NgramConfig, Field(discriminator="kind")]


class LocalConfig(_Config):
    """One target and at most one draft on one machine (``local.py``). Both engines get all of it."""

    target: ModelConfig
    draft: DrafterConfig | None = None
    """None: plain decoding only."""

    worker: Literal["process", "thread"] = "process"
    """Where the engines run. ``thread`` shares one interpreter lock between both: for debugging and tests."""
    pin_cores: bool = True
    """Give each engine a core of its own where there are at least two."""

    max_sessions: int = Field(default=16, ge=1, le=1024)
    """Sessions that are in progress at once; further ones wait."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest context in tokens. None: what the target was trained for."""
    max_step_tokens: int = Field(default=256, ge=32, le=65536)
    """Tokens of one target forward, prefill chunks and proposals together."""
    kv_pages: int | None = Field(default=None, ge=1)
    """KV pages of the target. None: enough for max_sessions at 1024 positions, or one at max_model_len."""

    tree_budget: int = Field(default=256, ge=1, le=4096)
    """Nodes that the draft keeps per session beyond the context."""
    tree_step_tokens: int | None = Field(default=None, ge=1, le=1024)
    """Tree nodes that the draft evaluates in one forward, all sessions together. None: as many as cost a draft
    model little more than one, measured at start-up."""
    fan_out: int = Field(default=6, ge=1, le=32)
    """F, alternative next tokens prepared at a position."""
    draft_top_m: int = Field(default=256, ge=1, le=65536)
    """Candidates of the draft's distribution that are ranked; the rest of its tail is never proposed."""


def cache_dir() -> Path:
    """Where compiled models are kept: PACELINE_CACHE, else the user's cache directory."""
    own = os.environ.get("PACELINE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(own).expanduser() if own else Path(base).expanduser() / "paceline"


def apply_worker_environment() -> None:
    """Sets ``WORKER_ENVIRONMENT`` for this process. Must run before torch is imported to take full effect."""
    os.environ.update(WORKER_ENVIRONMENT)


def wants_colour(stream: TextIO) -> bool:
    """True if ``stream`` is a terminal whose user did not ask for plain text (NO_COLOR, TERM=dumb)."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
