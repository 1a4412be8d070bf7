"""Options that several engines share, each declared here and nowhere else. Knows nothing of Ray Serve and of files.

ModelOptions ──▶ TargetOptions (targets.py)
     └─────────▶ DraftOptions ◀── Growing ──▶ the options of every other drafter (methods/)
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from paceline.config.base import Strict
from paceline.config.devices import Device
from paceline.errors.refusals import Fault

DType = Literal["auto", "float32", "bfloat16"]
"""``auto``: bfloat16 where the device multiplies it natively (AMX, AVX512-BF16, CUDA), else float32."""

KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
"""``auto``: the model's. The others are one: float8_e4m3fn, by either of the names that it has in vLLM."""

Quantization = Literal["int8", "int4"]
"""Weights of linear layers as integers of 8 or 4 bits, rounded while they are loaded. CPUs: in blocks of 32 inputs with
a scale each, multiplied by inputs that are rounded to 8 bits. GPUs: ``int8`` alone, with one scale for each output."""


class ModelOptions(Strict):
    """Options of a model's execution."""

    dtype: DType = "auto"
    """The number format. ``auto``: bfloat16 where the device multiplies it natively, else float32."""
    compile: bool | Literal["auto"] = "auto"
    """On the CPU, compile ahead of time, once per machine and checkpoint (half a minute to two); on CUDA, compile what
    lies between the matrix products. ``auto``: where it can be."""
    background_compilation: bool | Literal["auto", "detached"] = "auto"
    """Serve a model that is to be compiled eagerly at first, and compile it meanwhile in a process of low priority;
    later sessions are compiled. ``auto``: if ``compile`` is ``auto``, on one rank, with memory for both. ``detached``:
    as ``auto``; the process finishes even if the engine ends first."""
    device: Device = "auto"
    """``auto``, ``cpu``, ``cuda`` or ``cuda:N``. ``auto``: a GPU where there is one, else the CPU. ``cuda:N``: GPU N
    and, for several ranks, the GPUs after it; not under Ray, which chooses GPUs. A draft without a number
    takes the first GPU that its target leaves free."""
    quantization: Quantization | None = None
    """None: the weights as they are in the checkpoint, which may come quantized."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks that share the weights and the KV cache, each a process with a core or an accelerator of its own."""
    cpu_threads: int = Field(default=1, ge=1, le=64)
    """Cores that share the products and the attention of a compiled bfloat16 model on the CPU; no bit depends on their
    number."""
    rank_timeout_s: float = Field(default=10.0, gt=0)
    """Longest delay of a rank at an exchange; a rank that is later counts as hung, and the engine as dead."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Record decoding and verification at start-up and replay them. ``auto``: on CUDA, where the model allows it."""
    max_cuda_graphs: int = Field(default=256, ge=1, le=1024)
    """Step shapes that are recorded, as far as the memory reaches; steps beyond run eagerly."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint and its tokenizer (``auto_map``), with all rights of the
    service. False: such a checkpoint is refused, without a question."""
    attention: Literal["auto", "sdpa", "native", "triton", "flashinfer"] = "auto"
    """The attention kernel (``model/attention/kernels.py``). ``auto``: native on CPUs and triton on GPUs that can run
    it, else sdpa. ``flashinfer``, of targets: triton, and FlashInfer for whole blocks of 512 tokens of prompts."""
    kv_cache_dtype: KVCacheDType = "auto"
    """The dtype of keys and values in the KV cache. ``auto``: the model's. ``fp8``, or ``fp8_e4m3``: one byte a number.
    They are divided by the checkpoint's scales, else by 1, and rounded to float8_e4m3fn when they are written. This
    changes the model's output, which is then that of plain decoding with such a cache."""

    @model_validator(mode="after")
    def _has_products_to_share(self) -> Self:
        if self.cpu_threads == 1:
            return self
        if self.tensor_parallel_size > 1:
            raise Fault(
                "cpu_threads",
                f"is {self.cpu_threads} with tensor_parallel_size {self.tensor_parallel_size}: a model is shared by "
                "threads or by ranks, so one of them must be 1",
            )
        others = {"device": ("cuda", "auto' or 'cpu"), "dtype": ("float32", "auto' or 'bfloat16")}
        for key, (refused, allowed) in others.items():
            if (value := getattr(self, key)).startswith(refused):
                raise Fault("cpu_threads", f"is {self.cpu_threads} with {key} {value!r}: {key} must be '{allowed}'")
        if self.compile is False:
            raise Fault("cpu_threads", f"is {self.cpu_threads} with compile false: only compiled steps are shared")
        return self

    @model_validator(mode="after")
    def _can_compile_later(self) -> Self:
        if self.background_compilation is not True:
            return self
        if self.compile is False:
            raise Fault("background_compilation", "is true with compile false: leave one out")
        if self.tensor_parallel_size > 1:
            raise Fault(
                "background_compilation",
                f"is true with tensor_parallel_size {self.tensor_parallel_size}, whose ranks are compiled before they "
                "serve: 'auto' or false is allowed",
            )
        return self


class Growing(Strict):
    """Options of how any drafter grows its speculation trees."""

    tree_budget: int = Field(default=256, ge=1, le=4096)
    """Nodes kept per session beyond the context."""
    tree_step_tokens: int | None = Field(default=None, ge=1, le=1024)
    """Tree nodes in one step, all sessions together. None: 64 for n-grams; for a model, the number that costs little
    more per forward than one, measured at start-up."""
    fan_out: int = Field(default=6, ge=1, le=32)
    """F, alternative next tokens prepared at a position."""
    min_path_prob: float = Field(default=0.02, gt=0, lt=1)
    """The least probability of a path that best-first growth follows before the next outcome. Lower it if a step of the
    draft takes several milliseconds on a device of its own: fewer rounds then begin without a proposal. Every node also
    costs its target some microseconds."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that its models are configured for; (): it has no model."""
        return ()
