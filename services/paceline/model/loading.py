"""From a checkpoint to a runner: what can be checked is checked first, and said in one sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from paceline.checkpoint import indexed
from paceline.checkpoint.files import Checkpoint, context_length
from paceline.checkpoint.folder import read_json, require_no_code
from paceline.checkpoint.kv_scales import UNSCALED, KVScales, described, kv_scales
from paceline.checkpoint.linear import LinearLayers, LinearSpec, Slots, require_runnable
from paceline.checkpoint.packing import packing_of
from paceline.checkpoint.size import ModelSize, gib, names_of, size_of
from paceline.checkpoint.translated import INDEX
from paceline.config import KVCacheDType, ModelOptions, Quantization, cache_dir
from paceline.core.cuda import triton_unavailable
from paceline.errors import ConfigError, named, reason_of
from paceline.model.attention import native as cpu_attention
from paceline.model.attention.flashinfer import Library, difference
from paceline.model.attention.indexed import indexers_of
from paceline.model.attention.kernels import Attention, Kernel, kernel_for
from paceline.model.attention.paged import scale_pages
from paceline.model.compiled import linear as cpu_linear
from paceline.model.compiled.aot import NoCompilerError, StepGraph, cached_step, compiled_step, find_compiler
from paceline.model.compiled.backend import StepFunction
from paceline.model.compiled.graphs import CudaGraphs, make_backend, require_graphs
from paceline.model.compiled.parts import RANKS_ON_GPUS, compile_parts
from paceline.model.dequantized import dequantized_files, plain_config
from paceline.model.device import Placement, keep_bits, resolve
from paceline.model.experts import pad_experts, why_not_compiled
from paceline.model.features import Features
from paceline.model.kv_cache import NO_KV, KVCache, LayerSpec
from paceline.model.layer_callback import LayerCallback
from paceline.model.linear import layers as linear_layers
from paceline.model.local_config import BUILDING, meta_model, read_config
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.load import CheckpointFiles, Progress
from paceline.model.parallel.model import Share, load_shard, share_of
from paceline.model.parallel.runner import LeadersCache, LeadingRunner, RankRunner, agreed, lead
from paceline.model.quantized import (
    keeps_blocks,
    load_options,
    pack_quantized,
    parameter_counts,
    quantization_of,
    round_linear,
    why_eager,
)
from paceline.model.rope import settle_rope
from paceline.model.runner import ModelRunner
from paceline.model.states import StateTaps, require_boundaries
from paceline.model.step import Step, name_of, probe_layers
from paceline.model.step_plan import StepShape
from paceline.model.stored_weights import StoredWeights
from paceline.model.tails import widen_narrow_layers
from paceline.model.workspace import workspace_bytes
from paceline.types import Execution

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run: its step, and what a KV cache for it must hold."""

    step: StepFunction
    layers: list[LayerSpec]
    linear: dict[int, LinearSpec]
    """The linear layers, by index."""
    sliding_window: int | None
    spare_tokens: int
    """Padding that each step needs after its last token (``tails.py``)."""
    vocab_size: int
    max_len: int
    """Positions the model was made for."""
    dtype: torch.dtype
    device: torch.device
    size: ModelSize
    """Sizes that determine how much memory the model takes. For a rank: the sizes of its part."""
    share: Share | None = None
    """The rank's part, if the model is shared by several."""
    quantization: str | None = None
    """The method that its weights are quantized by."""
    batch_dependence: str | None = None
    """Says why tokens of one step change each other's logits; None if no such cause is known."""
    features: Features | None = None
    """The hidden states that its steps return in addition to the logits; None: none."""
    kernel: Kernel = "sdpa"
    """The attention kernel of ``step``."""
    library: Library | None = None
    """Attends to whole blocks of prompts; None: the kernel does."""
    cuda_graphs: CudaGraphs = "auto"
    max_cuda_graphs: int = 256
    load_compiled: Callable[[], StepFunction | None] | None = None
    """Loads the compiled step from the cache, for a model that is eager until then; returns None if it is not there."""

    @property
    def group(self) -> Collectives | None:
        """The exchange with the other ranks; None if the model is whole."""
        return None if self.share is None else self.share.group

    @property
    def records(self) -> bool:
        """True if its steps are recorded as CUDA graphs."""
        eager = self.group is not None and self.group.why_not_recorded() is not None
        return self.device.type == "cuda" and not eager and self.cuda_graphs is not False

    def runner(
        self,
        num_pages: int,
        *,
        promised: bool = True,
        max_sessions: int = 8,
        state_slots: int | None = None,
        branches: int = 0,
    ) -> ModelRunner:
        """Makes a runner over a new KV cache.

        The first rank gets a LeadingRunner, the others a RankRunner.

        Args:
            num_pages: pages of the cache. Ranks agree on the fewest that any of them asks for.
            promised: True: verification must have the bits of decoding. False for a draft: nothing depends on its bits,
                so its steps on the CPU are not padded (``shapes.py``).
            max_sessions: sessions for which the cache holds states of linear layers.
            state_slots: the number of these states; None: the default number.
            branches: of a session that keep rows of linear layers from step to step.
        """
        num_pages = agreed(num_pages, self.group)
        leads = self.share is not None and self.share.group.rank == 0
        slots = Slots.of(max_sessions, state_slots, branches)
        kind = LeadersCache if leads else KVCache
        cache = kind(self.layers, num_pages, self.dtype, self.device, self.linear, slots)
        eager = self.group is not None and self.group.why_not_recorded() is not None
        backend = make_backend(
            cache,
            self.dtype,
            self.sliding_window,
            self.kernel,
            False if eager else self.cuda_graphs,
            self.max_cuda_graphs,
            int if self.group is None else partial(agreed, group=self.group),
            self.library,
        )
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "sliding_window": self.sliding_window,
            "spare_tokens": self.spare_tokens,
            "promised": promised or self.device.type != "cpu",
            "vocab_size": self.vocab_size,
            "features": self.features,
            "backend": backend,
        }
        if self.share is None:
            return ModelRunner(self.step, cache, execution=self._execution, **options)
        return (LeadingRunner if leads else RankRunner)(
            self.step, cache, share=self.share, step_bytes=self._step_bytes, **options
        )

    def _step_bytes(self, shape: StepShape) -> int:
        return workspace_bytes(
            self.size,
            shape.tokens,
            shape.rows,
            shape.pages,
            num_logits=shape.logit_rows,
            num_copies=2,
            attention=self.kernel,
            has_trees=shape.is_tree,
        )

    @property
    def _execution(self) -> Execution:
        if self.device.type != "cpu":
            return ""
        return "eager" if isinstance(self.step, Step) else "compiled"


class Examination(Protocol):
    """Steps that a model takes while it is loaded, eagerly and with states of its own; called on the first rank."""

    features: Features
    """The states that it needs."""
    num_pages: int
    """Pages of the KV cache that it is given."""

    def __call__(self, runner: ModelRunner) -> None:
        """Runs steps of the model. ``load_model`` passes on what it raises."""
        ...


def load_model(
    checkpoint: Checkpoint,
    options: ModelOptions,
    group: Collectives | None = None,
    placement: Placement | None = None,
    features: Features | None = None,
    examination: Examination | None = None,
    *,
    later: bool = False,
    callback_boundary: int | None = None,
    max_model_len: int | None = None,
) -> LoadedModel:
    """Loads, checks and, if configured, compiles the model, or with a ``group`` this rank's part of it.

    Args:
        checkpoint: the model.
        options: how to run it.
        group: the exchange with the other ranks; None: the model is whole.
        placement: device and dtype; None: resolved from ``options`` here.
        features: the hidden states that its steps return; None: none.
        examination: called before the model is compiled; None: nothing is.
        later: True: a whole model that was not compiled on this machine yet stays eager and has ``load_compiled``.
        callback_boundary: where a listener receives states during a step (``layer_callback.py``); None: nowhere.
        max_model_len: the longest context; None: the model's own limit.

    Raises:
        ConfigError: the checkpoint cannot be loaded, its attention is not supported, CUDA graphs are demanded but not
            available, it cannot be split into this number of ranks, or it lacks the states of ``features``.
        EngineError: another rank has failed.
    """
    if features is not None and (known := size_of(checkpoint.config, 0, 1)).num_layers > 1:  # 1: not known
        require_boundaries(features, known.num_layers, f"model {checkpoint.path!r}", known.num_streams)
    device, dtype = placement or resolve(options, None if group is None else group.device)
    require_graphs(options.cuda_graphs, device, None if group is None else group.why_not_recorded())
    require_runnable(
        checkpoint.config,
        checkpoint.quantization,
        checkpoint.path,
        device=device.type,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    can_compile = _can_compile(device, group)
    if group is None:
        model = load_pretrained(checkpoint, dtype, device, options.quantization)
        if options.quantization is None and keeps_blocks(checkpoint, dtype, device):
            pack_quantized(model, checkpoint.gguf, None)
    else:
        model = load_shard(checkpoint, dtype, group, options.quantization, progress=_progress(group))
    pages: dict[str, Any] = {"kv_cache_dtype": options.kv_cache_dtype}
    if options.kv_cache_dtype != "auto":
        log.info("%s: %s", checkpoint.path, described(checkpoint))
        pages["kv_scales"] = kv_scales(checkpoint)
    if examination is not None:
        eager = prepare(
            model,
            compile=False,
            attention=options.attention,
            features=examination.features,
            max_model_len=max_model_len,
            **pages,
        )
        lead(eager.runner(examination.num_pages), examination)
    compile = can_compile if options.compile == "auto" else options.compile
    if options.compile == "auto" and compile and (reason := _why_eager(model)):
        log.info("model %r is not compiled: %s", checkpoint.path, reason)
        compile = False
    later = later and group is None and compile and device.type == "cpu" and find_compiler() is not None
    settings: dict[str, Any] = {
        "attention": options.attention,
        "features": features,
        "callback_boundary": callback_boundary,
        "max_model_len": max_model_len,
        **pages,
    }
    try:
        loaded = prepare(model, compile="later" if later else compile, **settings)
    except NoCompilerError:
        if options.compile != "auto":
            raise
        log.warning("model %r is not compiled, and slower: there is no C++ compiler", checkpoint.path)
        loaded = prepare(model, compile=False, **settings)
    if options.cpu_threads > 1:
        _share(options.cpu_threads, loaded)
    return replace(loaded, cuda_graphs=options.cuda_graphs, max_cuda_graphs=options.max_cuda_graphs)


def _why_eager(model: PreTrainedModel, *, demanded: bool = False) -> str | None:
    """Says why a model is not compiled, as a clause; None if it can be. ``demanded``: compile is true, not auto."""
    if (reason := linear_layers.why_eager(model) or why_eager(model)) is not None:
        return reason
    if model.device.type != "cpu":
        return None
    return indexed.why_eager(model.config.to_dict(), demanded=demanded) or why_not_compiled(model)


def _can_compile(device: torch.device, group: Collectives | None) -> bool:
    """True if what ``auto`` compiles can be, of one rank or of one of several."""
    if device.type == "cpu":
        return group is None or group.compiled_shims() is not None
    return triton_unavailable() is None and (group is None or group.why_not_recorded() is None)


def _share(num_threads: int, loaded: LoadedModel) -> None:
    """Lets threads share the products and attention of this thread. Raises ConfigError if there are none to share."""
    if cpu_linear.usable():
        cpu_linear.share_products(1)  # an earlier model's threads still have their cores
    if (reason := why_not_shared(num_threads, loaded)) is not None:
        raise ConfigError(f"cpu_threads is {num_threads}: {reason}")
    cpu_linear.share_products(num_threads)


def why_not_shared(num_threads: int, loaded: LoadedModel) -> str | None:
    """Says why ``num_threads`` threads cannot share the products and attention of a loaded model; None if they can."""
    reason = cpu_linear.why_not_shared(num_threads, loaded.device, loaded.dtype)
    if reason is None and loaded.load_compiled is None and isinstance(loaded.step, Step):
        return "the model is not compiled, and only compiled steps are shared; 1 is allowed"
    return reason


def _progress(group: Collectives) -> Progress:
    """Logs each quarter of the rank's weights that has been read."""
    logged = -1

    def report(loaded: int, total: int) -> None:
        nonlocal logged
        if loaded * 4 // total > logged:
            logged = loaded * 4 // total
            log.info("rank %d of %d has read %d %% of %s", group.rank, group.degree, 25 * logged, gib(total))
            if group.rank == 0:
                logging.getLogger("paceline.startup").info("loading, %d %% of %s", 25 * logged, gib(total))

    return report


def prepare(
    model: PreTrainedModel,
    *,
    compile: bool | Literal["later"],
    attention: Attention = "auto",
    features: Features | None = None,
    callback_boundary: int | None = None,
    max_model_len: int | None = None,
    kv_cache_dtype: KVCacheDType = "auto",
    kv_scales: Mapping[int, KVScales] | None = None,
) -> LoadedModel:
    """Makes a loaded transformers model runnable. All ranks of a sharded model must call it, since it runs a step.

    Args:
        model: the model.
        compile: True, False, or ``later``: load a step that was compiled before, else stay eager with
            ``load_compiled``.
        attention: the attention kernel.
        features: the hidden states that its steps return; None: none.
        callback_boundary: where a listener receives states during a step (``layer_callback.py``); None: nowhere.
        max_model_len: the longest context; None: the model's own limit.
        kv_cache_dtype: of keys and values on the pages; index keys have the model's dtype in any case.
        kv_scales: of keys and values in FP8, by layer; layers that are missing have scale 1.

    Raises:
        ConfigError: the model cannot run on the paged attention or on the ``attention`` kernel; ``compile`` is set, but
            its weights or its GPU cannot be compiled for; it lacks the states of ``features``; or its rotary embedding
            depends on the batch.
    """
    model, on_cpu = model.eval(), model.device.type == "cpu"
    if (without := linear_layers.why_not_on_cuda(model)) is not None:
        raise ConfigError(f"{name_of(model)} has linear layers, whose kernel for CUDA {without}: use device 'cpu'")
    pad_experts(model)
    if on_cpu:
        widen_narrow_layers(model)
    elif model.device.type == "cuda":
        keep_bits()
    taps = None if features is None else StateTaps(model, features, name_of(model))
    middle = None if callback_boundary is None else LayerCallback(model, callback_boundary, name_of(model))
    text = model.config.get_text_config()
    max_len = context_length(text) or 1 << 20
    settle_rope(model, min(max_model_len or max_len, max_len), name_of(model))
    layers, linear, window, spare_tokens, further = probe_layers(model, taps)
    if kv_cache_dtype != "auto":
        attending = model.config.get_text_config().num_hidden_layers
        known = kv_scales or {}
        for i, each in enumerate(layers[:attending]):
            if each != NO_KV:
                scales = known.get(i, UNSCALED) if each.value_dim else UNSCALED  # of latents none are known
                layers[i] = replace(each, is_fp8=True, scales=scales)
    scale_pages(model, layers)
    products_built = cpu_linear.is_built()
    never = compile == "later" and not (cpu_attention.is_built() and products_built)
    choose = partial(
        kernel_for,
        device=model.device,
        dtype=model.dtype,
        layers=layers,
        indexed=bool(indexers_of(model)),
        window=window,
        further=further,
    )
    kernel = choose("sdpa" if never and attention == "auto" else attention)
    log.info("attention of %s on %s: %s", type(model).__name__, model.device.type, kernel)
    library = library_for(model, layers) if attention == "flashinfer" else None
    step: StepFunction | None = None
    if compile:
        reason = _why_eager(model, demanded=True) if on_cpu else _why_no_parts(model)
        if reason:
            raise ConfigError(f"compile is true, but {reason}: set compile to auto or false")

    graph, folder = StepGraph(model, layers, window, kernel, taps, middle, linear), cache_dir() / "compiled"

    def load_compiled() -> StepFunction | None:
        return cached_step(replace(graph, kernel=choose(attention)), folder)

    if compile == "later":
        step = None if never else load_compiled()
    elif compile and not on_cpu:
        log.info("%d parts of %s are compiled", compile_parts(model), type(model).__name__)
    elif compile:
        step = compiled_step(graph, folder)
    waits = compile == "later" and step is None
    method, batch_dependence = quantization_of(model)
    return LoadedModel(
        step=step or Step(model, kernel, taps, middle),
        kernel=kernel,
        library=library,
        layers=layers,
        linear=linear,
        sliding_window=window,
        spare_tokens=spare_tokens,
        vocab_size=model.get_output_embeddings().out_features,
        max_len=max_len,
        dtype=model.dtype,
        device=model.device,
        size=_size(model, layers, linear),
        share=share_of(model),
        quantization=method,
        batch_dependence=batch_dependence,
        features=features,
        load_compiled=load_compiled if waits else None,
    )


def library_for(model: PreTrainedModel, layers: Sequence[LayerSpec]) -> Library:
    """FlashInfer on a model's device. Sessions move between the replicas of a pool, so none of them serves without it.

    Raises:
        ConfigError: its bits do not hold on all ranks.
    """
    found, share = Library(model.device), share_of(model)
    config = model.config.get_text_config()
    groups = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    sizes = {(layer.num_kv_heads, layer.key_dim) for layer in layers if layer != NO_KV}
    reasons = [difference(found, groups * heads, heads, dim, model.dtype) for heads, dim in sorted(sizes)]
    reason = next((each for each in reasons if each is not None), None)
    if agreed(int(reason is None), None if share is None else share.group):
        log.info("prompts on %s: FlashInfer, whose bits depend on no batch", model.device)
        return found
    raise ConfigError(
        f"attention is 'flashinfer', which {reason or 'fails on another rank'}: use 'auto' or 'triton', in all targets "
        "of a pool"
    )


def _why_no_parts(model: PreTrainedModel) -> str | None:
    """Says why nothing can be compiled of a model on a GPU, as a clause; None if it can."""
    if share_of(model) is not None:
        return RANKS_ON_GPUS
    if (reason := triton_unavailable()) is not None:
        return f"triton {reason}"
    return None


def _size(model: PreTrainedModel, layers: list[LayerSpec], linear: dict[int, LinearSpec]) -> ModelSize:
    """The size by the configuration, corrected by the parameters and the layers that there are."""
    counts = parameter_counts(model)
    size = size_of(
        model.config.to_dict(),
        sum(count for count, _ in counts),
        model.dtype.itemsize,
        sum(count for count, rank in counts if rank < 2),
    )
    specs, both = [*linear.values()], sum(layers[index] != NO_KV for index in linear)
    return replace(
        size,
        kv_values=sum(layer.num_values for layer in layers),
        is_kv_fp8=any(layer.is_fp8 for layer in layers),
        value_dim=max((layer.value_dim for layer in layers), default=0) or size.value_dim,
        num_layers=model.config.get_text_config().num_hidden_layers,
        linear=LinearLayers(len(specs), specs[0], layers.count(NO_KV) - len(specs) + both, both) if specs else None,
    )


def load_pretrained(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | None = None,
    quantization: Quantization | None = None,
    *,
    part: type[PreTrainedModel] | None = None,
) -> PreTrainedModel:
    """Loads a causal language model with transformers to ``device``, by default the CPU.

    Its weights may come quantized, or are quantized here. Warns of weights that the model does not use, unless ``part``
    is given: the class of a model of some of its layers, whose weights alone are loaded.

    Raises:
        ConfigError: with the reason in one sentence; also for parameters that no weight file holds, which
            transformers would draw at random. Weights that are tied to others need not be there.
    """
    device = device or torch.device("cpu")
    path, options = checkpoint.path, load_options(checkpoint, quantization, device, dtype)
    loader: Any = part or AutoModelForCausalLM
    location: str | None = checkpoint.location
    config: PretrainedConfig | None = None
    read: Callable[[str], torch.Tensor]
    kept = StoredWeights()
    if (gguf := checkpoint.gguf) is not None:
        config, names = read_config(checkpoint), [*gguf]
        read = partial(gguf.read, dtype=dtype)
    elif (packing := packing_of(checkpoint.quantization)) is not None:
        files = dequantized_files(checkpoint, packing)
        config, read = _of_text(plain_config(checkpoint)), partial(files.read, dtype=dtype)
        if part is None:
            kept = StoredWeights.of(meta_model(config), files, None, device, dtype)
        names = [name for name in files if name not in kept.tensors]
    elif checkpoint.folder is not None and names_of(read_json(checkpoint.folder, INDEX)):
        stored = CheckpointFiles(path)
        config, names, read = plain_config(checkpoint), [*stored], stored.read
    if config is not None:
        loader, location = part or kept.without(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]), None
        options |= {"config": config, "state_dict": {name: _Lazy(partial(read, name)) for name in names}}
    model: PreTrainedModel
    try:
        with BUILDING, _quiet():
            model, info = loader.from_pretrained(
                location,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by their names
                trust_remote_code=checkpoint.trust_remote_code,
                **options,
            )
    except ConfigError:
        raise
    except Exception as error:  # transformers raises whatever its model classes raise
        require_no_code(path, error)
        raise ConfigError(f"model {path!r} could not be loaded: {reason_of(error)}") from error
    if wrong := sorted(info["mismatched_keys"]):
        shapes = [f"{name} {list(theirs)} where config.json makes {list(ours)}" for name, theirs, ours in wrong]
        raise ConfigError(f"model {path!r} has weights of other shapes than its config.json: {named(shapes)}")
    if missing := [name for name in model.state_dict() if name in info["missing_keys"]]:
        raise ConfigError(f"model {path!r} is not whole: no weight file holds {named(missing)}")
    if part is None and (unexpected := sorted(info["unexpected_keys"])):
        log.warning("model %r: ignoring unexpected weights: %s", path, named(unexpected))
    if getattr(model, "use_kernels", False):
        raise ConfigError(f"model {path!r} would run kernels from a hub, whose bits are theirs: they must be off")
    kept.fill(model, device)
    if quantization is not None:
        round_linear(model, quantization, device, path, gguf)
    return model if model.device == device else model.to(device)


def _of_text(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of the class that runs: of the text model, where that is one of its own."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    text = config.sub_configs.get("text_config")
    return config.get_text_config() if text is not None and kind.config_class is text else config


class _Lazy:
    """A weight that is dequantized when transformers asks for it."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._read()[index]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bar of transformers, and the table of parameters that it prints instead of an error."""
    loader, progress = logging.getLogger("transformers.modeling_utils"), hf_logging.is_progress_bar_enabled()
    loader.addFilter(_is_not_a_report)
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        loader.removeFilter(_is_not_a_report)
        if progress:
            hf_logging.enable_progress_bar()


def _is_not_a_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()
