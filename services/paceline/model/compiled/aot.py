"""Ahead-of-time compilation of a step on CPU (AOTInductor), cached by everything that shapes the artifact.

One model has several graphs: the *bare* one, and one for each choice of hidden states that leave it. All must give the
same logits. The compiler is told to round after each operator, as eager steps do. Otherwise it would keep what it fuses
in float32, and a state that leaves the graph, which ends a fusion, would change the bits. Each graph is compared with
the bare one before it enters the cache.

Weights are frozen into the artifact as packed oneDNN matrices. At one token per step this reaches the memory bandwidth;
eager bf16 reaches half of it. Autotuning is off because it picks kernels by a noisy timing. The packed oneDNN kernels
were measured to be batch-invariant (``shapes.py``).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim
from transformers import PreTrainedModel

from paceline.checkpoint.kv_scales import UNSCALED
from paceline.checkpoint.linear import LinearSpec, Slots
from paceline.errors import ConfigError, EngineError
from paceline.model import layer_callback
from paceline.model.attention import native as cpu_attention
from paceline.model.attention.kernels import Kernel
from paceline.model.compiled import linear as cpu_linear
from paceline.model.compiled.backend import StepFunction, run_plan
from paceline.model.compiled.joined import replace_linears
from paceline.model.compiled.package import load_package
from paceline.model.features import Features
from paceline.model.kv_cache import KVCache, LayerSpec
from paceline.model.layer_callback import LayerCallback
from paceline.model.linear import native as linear_attention
from paceline.model.linear.layers import linear_indices
from paceline.model.linear.plan import LinearSlots
from paceline.model.logit_rows import LogitRows
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.model import share_of
from paceline.model.quantized import parameter_counts, plain_tensors
from paceline.model.selftest import num_different_rows
from paceline.model.states import StateTaps
from paceline.model.step import Step, name_of
from paceline.model.step_plan import SequenceStep, StepPlan
from paceline.types import PAGE_SIZE

VERSION = 4  # raise when the traced signature or its lowering changes
COMPILER: dict[str, Any] = {"freezing": True, "max_autotune": False, "emulate_precision_casts": True}
"""Options of Inductor. The last one makes it round after each operator, in fused kernels too."""
_COMPILE_LIMIT_S = 3600.0
"""A rank may compile this much longer than another."""
log = logging.getLogger(__name__)


class NoCompilerError(ConfigError):
    """The model has not been compiled for this machine before, and there is no compiler to do it now."""


def find_compiler() -> str | None:
    """The C++ compiler that torch takes; None: there is none."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return str(get_cpp_compiler())
    except InvalidCxxCompiler:
        return None


def artifact_key(
    model: PreTrainedModel,
    sliding_window: int | None,
    kernel: Kernel = "sdpa",
    features: Features | None = None,
    callback_boundary: int | None = None,
    *,
    layers: Sequence[LayerSpec] = (),
) -> str:
    """Digest of all that shapes the artifact.

    That is: weights, configuration, library versions, instruction set, kernel, whether its pages are in FP8 and by
    which scales, the states that the step returns or passes to a listener, and for a rank its exchange.
    """
    digest = hashlib.blake2b(digest_size=16)
    share = share_of(model)
    facts = {
        "version": VERSION,
        "torch": torch.__version__,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "config": model.config.to_json_string(use_diff=False),
        "dtype": str(model.dtype),
        "window": sliding_window,
        "page": PAGE_SIZE,
    }
    if kernel != "sdpa":
        facts["attention"] = kernel
    if any(layer.is_fp8 for layer in layers):
        facts["pages"] = f"fp8 {[layer.scales for layer in layers if layer.scales != UNSCALED]}"
    if features is not None:
        facts["states"] = [*features.boundaries, features.every_position]
    if callback_boundary is not None:
        facts["callback"] = [callback_boundary, layer_callback.key()]
    if model.dtype == torch.bfloat16:
        facts["linear"] = cpu_linear.key()
    if (key := cpu_linear.blocks_key(model)) is not None:
        facts["blocks"] = key
    if _logit_rows(model, kernel, features) is not None:
        facts["rows"] = "wanted"
    if linear_indices(model):
        facts["linear attention"] = linear_attention.key()
    if share is not None:
        facts["share"] = f"{share.vocab} {share.group.compiled_key()}"
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        for part in plain_tensors(tensor):
            digest.update(part.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class StepGraph:
    """What a step is compiled from."""

    model: PreTrainedModel
    layers: list[LayerSpec]
    sliding_window: int | None
    kernel: Kernel
    taps: StateTaps | None = None
    callback: LayerCallback | None = None
    linear: Mapping[int, LinearSpec] | None = None
    """The model's linear layers."""

    @property
    def features(self) -> Features | None:
        """The states that it returns."""
        return None if self.taps is None else self.taps.features

    def path(self, cache_dir: Path) -> Path:
        """The file of the compiled step."""
        boundary = None if self.callback is None else self.callback.boundary
        key = artifact_key(self.model, self.sliding_window, self.kernel, self.features, boundary, layers=self.layers)
        return cache_dir / f"{key}.pt2"


def cached_step(graph: StepGraph, cache_dir: Path) -> StepFunction | None:
    """The compiled step of a model, which is no rank's, from the cache; None: the cache does not hold it.

    Raises:
        EngineError: what is in the cache cannot be loaded here.
    """
    if not any(cache_dir.glob("*.pt2")):  # without reading every weight
        return None
    path = graph.path(cache_dir)
    return _load(path, graph.kernel) if path.exists() else None


def compiled_step(graph: StepGraph, cache_dir: Path) -> StepFunction:
    """Returns the compiled step, from the cache or built now (about half a minute to two).

    For a rank, it returns when all ranks have theirs. With ``taps`` or ``callback`` the bare step is built as well, if
    it is not in the cache, to compare the bits of both.

    Raises:
        ConfigError: the ranks exchange in a way that a compiled model cannot, or the step has other logits than the
            bare one.
        NoCompilerError: it is not in the cache and cannot be built.
        EngineError: another rank has failed.
    """
    share, name = share_of(graph.model), _name(graph.model)
    if share is not None and share.group.compiled_shims() is None:
        raise ConfigError(
            "a compiled model exchanges over shared memory, which these ranks do not: set compile to false"
        )
    path = graph.path(cache_dir)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")):
        if not path.exists():
            if find_compiler() is None:
                raise NoCompilerError("compile is true, but there is no C++ compiler: set compile to auto or false")
            started = time.perf_counter()
            logging.getLogger("paceline.startup").info("compiling for this machine, which takes about a minute once")
            log.warning("compiling %s for this machine (once; later starts load it)", name)
            for left in path.parent.glob(f"{path.stem}.*.pt2"):  # by a process that was ended
                left.unlink()
            temporary = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
            compile_step(graph, temporary)
            if share is None and (graph.taps is not None or graph.callback is not None):
                bare = compiled_step(replace(graph, taps=None, callback=None), cache_dir)
                _require_same_logits(_load(temporary, graph.kernel), bare, graph, temporary)
            temporary.rename(path)
            log.warning("compiled %s in %.0f s", name, time.perf_counter() - started)
    step = _load(path, graph.kernel)
    if share is None:
        return step
    share.group.barrier(timeout_s=_COMPILE_LIMIT_S)
    return _RankStep(step, share.group)


def _require_same_logits(step: StepFunction, bare: StepFunction, graph: StepGraph, path: Path) -> None:
    """Compares a step's logits with the bare one's. Raises ConfigError if any differ, and removes ``path``."""
    model = graph.model
    vocab_size = model.get_output_embeddings().out_features
    cache = KVCache(graph.layers, num_pages=4, dtype=model.dtype, device="cpu", linear=graph.linear)
    with torch.no_grad():
        different, num_rows = num_different_rows(step, bare, cache, model.dtype, graph.sliding_window, vocab_size)
    if different:
        path.unlink()
        raise ConfigError(
            f"compile is true, but the compiled step of {name_of(model)} with hidden states for hints or heads has "
            f"other logits than without in {different} of {num_rows} rows: set compile to false, or leave hints and "
            "heads out"
        )
    log.info("the compiled step of %s with hidden states has the logits of the step without", name_of(model))


def _load(path: Path, kernel: Kernel) -> StepFunction:
    """The step of a package; threads that help with its products help with its attention, too."""
    if kernel == "native" and cpu_linear.usable():
        cpu_attention.share_by(cpu_linear.sharer())
        if linear_attention.is_built() and linear_attention.unavailable() is None:
            linear_attention.share_by(cpu_linear.sharer())
    return load_package(path)


class _RankStep:
    """A compiled step that says why an exchange within it failed."""

    def __init__(self, step: StepFunction, group: Collectives) -> None:
        self.step_function, self._group = step, group
        self.is_native = getattr(step, "is_native", False)

    def __call__(self, *inputs: Any) -> Tensor | tuple[Tensor, Tensor]:
        with self._explained():
            return self.step_function(*inputs)

    def run_plan(self, plan: StepPlan, cache: KVCache, dtype: torch.dtype, window: int | None) -> Any:
        """The step by its plan, which is the same for all ranks (``backend.run_plan``)."""
        with self._explained():
            return run_plan(self.step_function, plan, cache, dtype, window)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            raise EngineError(self._group.failure() or str(error)) from error


def compile_step(graph: StepGraph, path: Path) -> None:
    """Exports and compiles a step, and writes the artifact to ``path``."""
    model, layers, kernel, linear, callback = graph.model, graph.layers, graph.kernel, graph.linear, graph.callback
    cache = KVCache(layers, num_pages=16, dtype=model.dtype, device="cpu", linear=linear, slots=Slots.of(8))
    example = [
        SequenceStep(list(range(1, 6)), list(range(70, 75)), list(range(70, 75)), [1, 2], num_logits=3),
        SequenceStep(
            list(range(1, 6)), list(range(200, 205)), list(range(200, 205)), [3, 4, 5, 6], 4, also=((0, 500),)
        ),
    ]
    plan = StepPlan.of(example, cache.scratch_row)
    if linear:
        plan = plan._replace(linear=LinearSlots(Slots.of(8)).plan([replace(step, rows=range(5)) for step in example]))
    inputs = plan.inputs(cache, model.dtype, graph.sliding_window)
    tokens, logits = Dim("tokens", min=1, max=1 << 16), Dim("logits", min=1, max=1 << 16)
    writes = Dim("writes", min=1, max=1 << 16)
    rows, row_len = Dim("rows", min=1, max=1 << 12), Dim("row_len", min=1, max=1 << 14)
    pages, pool = Dim("pages", min=1, max=1 << 14), Dim("pool", min=2, max=1 << 24)
    shapes = (
        {1: tokens},
        {1: tokens},
        {0: logits},
        {0: writes},
        {0: writes},
        {0: rows, 1: pages},
        {0: rows, 1: row_len},
        {0: tokens},
        [{0: rows, 2: row_len, 3: PAGE_SIZE * pages} for _ in inputs[8]],
        [{0: pool} for _ in layers],
        [{0: pool} for _ in layers],
        *([_linear_shapes(len(linear))] if linear else []),
    )
    wanted = _logit_rows(model, kernel, graph.features)
    with torch.no_grad(), warnings.catch_warnings(), _int8_lowering(model):
        warnings.simplefilter("ignore")  # exporter and inductor deprecations of their own
        with contextlib.nullcontext() if wanted is None else wanted.in_place():
            step = Step(model, kernel, graph.taps, callback, wanted)
            exported = torch.export.export(step, inputs, dynamic_shapes=shapes, strict=False)
        shims = cpu_attention.compiled_shims() if kernel == "native" else {}
        plain = model.dtype == torch.bfloat16 and cpu_linear.usable()
        if (plain or cpu_linear.quantized_layers(model)) and replace_linears(exported, plain=plain):
            shims |= cpu_linear.shims()
        if callback is not None:
            shims |= layer_callback.compiled_shims()
        if linear:
            shims |= linear_attention.compiled_shims()
        if (share := share_of(model)) is not None:
            shims |= share.group.compiled_shims() or {}
        configs: dict[str, Any] = {**COMPILER, "aot_inductor.custom_ops_to_c_shims": shims}
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path), inductor_configs=configs)


def _linear_shapes(num_layers: int) -> list[dict[int, Any]]:
    """Sizes of the linear layers' inputs that vary (``LinearInputs.tensors``): numbers of slots, and a step's
    numbers.
    """
    states, rows = Dim("states", min=2, max=1 << 20), Dim("row_slots", min=2, max=1 << 20)
    return [*[{0: states}, {0: states}, *[{0: rows}] * 4] * num_layers, {0: Dim("numbers", min=2, max=1 << 24)}]


def _logit_rows(model: PreTrainedModel, kernel: Kernel, features: Features | None) -> LogitRows | None:
    """Returns a forward of the last layer's MLP that computes only the tokens whose logits are requested.

    None where other libraries' operators are called: their bits may depend on the number of tokens.
    """
    alone = model.dtype == torch.bfloat16 and share_of(model) is None and not getattr(model, "is_quantized", False)
    if kernel != "native" or not alone or not cpu_linear.usable():
        return None
    return LogitRows.of(model, features)


def _int8_lowering(model: PreTrainedModel) -> contextlib.AbstractContextManager[None]:
    """Makes Inductor multiply by int8 weights without converting them first.

    The exporter asserts the dtype of each conversion. An assertion on a weight hides the product from Inductor.
    Inductor then folds the weight to the dtype of the product, which doubles its memory.
    """
    if not getattr(model, "is_quantized", False):
        return contextlib.nullcontext()
    from torch._export.utils import _disable_aten_to_metadata_assertions

    return _disable_aten_to_metadata_assertions()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file lock, so that replicas on one host compile once."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _name(model: PreTrainedModel) -> str:
    millions = sum(count for count, _ in parameter_counts(model)) / 1e6
    return f"{type(model).__name__} ({millions:.0f}M parameters, {str(model.dtype).removeprefix('torch.')})"
