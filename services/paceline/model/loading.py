"""From a checkpoint to a runner: what can be checked is checked first, and said in one sentence."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as hf_logging

from paceline.checkpoints import inspect_checkpoint
from paceline.config import ModelConfig, cache_dir
from paceline.errors import ConfigError
from paceline.model.compile import compiled_step
from paceline.model.graphs import CudaGraphs, make_backend, require_graphs
from paceline.model.kernels import Attention, kernel_for
from paceline.model.kv_cache import KVCache, LayerSpec
from paceline.model.runner import ModelRunner, StepFunction
from paceline.model.step import Step, probe_layers

_NUM_NAMED = 3
"""Parameters that a message names; of the others it gives the number."""

log = logging.getLogger(__name__)

_FROM_PRETRAINED = threading.Lock()
"""transformers builds models under a process-wide default device: two threads must not load at once."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: its step, and what a KV cache for it must hold."""

    step: StepFunction
    layers: list[LayerSpec]
    sliding_window: int | None
    vocab_size: int
    max_len: int
    """Positions the model was made for."""
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    cuda_graphs: CudaGraphs = "auto"
    max_cuda_graphs: int = 64

    def runner(self, num_pages: int) -> ModelRunner:
        """A runner over a new KV cache of ``num_pages`` pages."""
        cache = KVCache(self.layers, num_pages, self.dtype, self.device)
        backend = make_backend(cache, self.dtype, self.sliding_window, self.cuda_graphs, self.max_cuda_graphs)
        return ModelRunner(
            self.step,
            cache,
            dtype=self.dtype,
            sliding_window=self.sliding_window,
            vocab_size=self.vocab_size,
            backend=backend,
        )


def load_model(config: ModelConfig) -> LoadedModel:
    """Loads, checks and, if configured, compiles the model.

    Raises:
        ConfigError: nothing loadable at the path, not a causal language model, unsupported attention, or CUDA graphs
            demanded of another device.
    """
    device = torch.device(resolve_device(config.device))
    require_graphs(config.cuda_graphs, device)
    dtype = resolve_dtype(config.dtype, device)
    model = load_pretrained(config.path, dtype).to(device)
    compile = device.type == "cpu" if config.compile == "auto" else config.compile
    loaded = prepare(model, compile=compile, attention=config.attention)
    return replace(loaded, cuda_graphs=config.cuda_graphs, max_cuda_graphs=config.max_cuda_graphs)


def prepare(model: PreTrainedModel, *, compile: bool, attention: Attention = "auto") -> LoadedModel:
    """Makes a loaded transformers model runnable.

    Raises:
        ConfigError: the model cannot run on the paged attention, or on the ``attention`` kernel, or ``compile`` on a
            device other than the CPU.
    """
    model = model.eval()
    layers, window = probe_layers(model)
    text = model.config.get_text_config()
    kernel = kernel_for(attention, model.device, model.dtype, layers)
    log.info("attention of %s on %s: %s", type(model).__name__, model.device.type, kernel)
    step: StepFunction
    if compile:
        if model.device.type != "cpu":
            raise ConfigError(f"compile is for device cpu, this model is on {model.device.type}: set compile to false")
        step = compiled_step(model, layers, window, cache_dir() / "compiled")
    else:
        step = Step(model, kernel)
    return LoadedModel(
        step=step,
        layers=layers,
        sliding_window=window,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_len=int(getattr(text, "max_position_embeddings", None) or 1 << 20),
        dtype=model.dtype,
        device=model.device,
        num_parameters=sum(p.numel() for p in model.parameters()),
    )


def load_pretrained(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """Loads a causal language model with transformers. What its files hold beyond it is warned of.

    Raises:
        ConfigError: with the reason in one sentence; also for parameters that no weight file holds, which
            transformers would draw at random. Weights that are tied to others need not be there.
    """
    inspect_checkpoint(path)
    model: PreTrainedModel
    try:
        with _FROM_PRETRAINED, _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                Path(path).expanduser(), dtype=dtype, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"model {path!r} could not be loaded: {reason}") from error
    if missing := [name for name in model.state_dict() if name in info["missing_keys"]]:
        raise ConfigError(f"model {path!r} is not whole: no weight file holds {_named(missing)}")
    if unexpected := sorted(info["unexpected_keys"]):
        log.warning("model %r: its configuration has no place for %s", path, _named(unexpected))
    return model


def _named(parameters: Collection[str]) -> str:
    """The first few names, and how many there are beyond them."""
    names = [*parameters][:_NUM_NAMED]
    more = len(parameters) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bar of transformers, and the table of parameters that it prints instead of an error."""
    loader, progress = logging.getLogger("transformers.modeling_utils"), hf_logging.is_progress_bar_enabled()
    loader.addFilter(_is_no_report)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        loader.removeFilter(_is_no_report)
        if progress:
            hf_logging.enable_progress_bar()


def _is_no_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def resolve_device(name: str) -> str:
    """``auto`` is CUDA where there is a device, else the CPU.

    Raises:
        ConfigError: cuda was asked for and there is none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but no CUDA device was found: use 'cpu' or 'auto'")
    return name


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the device multiplies it natively, else float32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
