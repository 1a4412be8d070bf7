"""Quantized weights that are dequantized while they are read: how published formats store them. Free of torch.

A weight is stored as several tensors, named by its *stem* and an ending. They are its *codes* (small numbers, which may
be packed into words), its scales, and possibly its zero points and the group of each input. The weight is::

    (codes - zeros) * scales        or, of four-bit floats,        values[codes] * scales * second scale

Sources of the formats: compressed-tensors 0.20 (``compressors``), transformers (``integrations/finegrained_fp8.py``),
NVIDIA's Model Optimizer (its unified checkpoints), AutoGPTQ and GPTQModel, AutoAWQ (version "gemm"), and the OCP
Microscaling Formats 1.0. Scales of activations are left out: activations keep the dtype of the model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from paceline.checkpoint.quantization import method_of, require_method, require_quantization
from paceline.errors import ConfigError

WORD_BITS = 32
"""Bits of a word of packed integers."""
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""AWQ: where in its word each of eight outputs is."""
MXFP4_GROUP, NVFP4_GROUP = 32, 16
"""Numbers of four bits with one scale."""
SCALED_BLOCK = 128
"""Inputs of a block of a weight that a GPU multiplies as it is stored: rows are filled up to a multiple of it."""
LEAST_GROUP = 8
"""The fewest inputs that share a scale there."""
PLAIN_EXPERTS = ("dbrx", "jetmoe", "llama4_text", "longcat_flash", "muse_spark", "step3p7")
"""Types of models whose experts run by a forward of their own, by plain weights."""
_NOT_ALONE = ("kv_b_proj.", "dt_proj.")
"""Parts of the names of weights that are not multiplied as one matrix, or that others read (``attention/latent.py``,
``linear/families.py``)."""
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_ACTIVATIONS = ("input_scale", "output_scale", "activation_scale", "input_global_scale", "input_zero_point", "k_scale",
                "v_scale", "q_scale")  # fmt: skip
"""Last parts of the names of what scales activations, keys and values."""
_ANY_SCALE = "_scale"
"""An ending that other parameters have, too, such as a ``logit_scale``."""
_PACKED_TYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8")
"""Number formats of safetensors in which no plain weight is stored."""
_EXPONENTS = {"F8_E4M3": 4, "F8_E5M2": 5, "I8": 0}
"""Bits of the exponent of a number of 8 bits, by its format; 0: an integer."""
_SCALE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E8M0": 1, "F8_E4M3": 1}
"""Number formats of scales that a GPU reads as they are stored."""


class Format(NamedTuple):
    """How a GPU holds a weight that it multiplies as it is stored: a number of ``bits`` for each, and scales."""

    bits: int
    """8 or 4; of 4 bits a byte has two."""
    exponent: int
    """Bits of a number's exponent; 0: integers, those of 4 bits less 8."""
    group: int = 0
    """Inputs of an output that share a scale: a power of two from ``LEAST_GROUP`` to ``SCALED_BLOCK``; 0: all."""
    scales: str = "F32"
    """Number format of the scales, as safetensors names it."""
    has_factors: bool = False
    """True: the scales of an output are multiplied by one more number (NVFP4)."""
    has_zeros: bool = False
    """True: an integer of 8 bits for each scale, a zero point, is taken from its numbers."""

    @property
    def name(self) -> str:
        """What such weights are called."""
        return f"fp{self.bits}" if self.exponent else f"int{self.bits}"

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix: its rows are filled up to blocks."""
        filled = -(-inputs // SCALED_BLOCK) * SCALED_BLOCK
        num_scales = filled // self.group if self.group else 1
        of_scale = _SCALE_BYTES[self.scales] + self.has_zeros
        return outputs * (filled * self.bits // 8 + num_scales * of_scale + 4 * self.has_factors)

    def begun_at(self, *inputs: int) -> Format | None:
        """The format of parts of a matrix that begin at these ``inputs``: with smaller groups where one lies across a
        beginning. None if these are too small."""
        group = math.gcd(self.group or SCALED_BLOCK, *inputs)
        if group < LEAST_GROUP:
            return None
        return self._replace(group=group) if self.group else self


@dataclass(frozen=True, slots=True)
class Packing:
    """How the quantized weights of a checkpoint are stored."""

    kind: Literal["scaled", "words", "nvfp4", "mxfp4"]
    """``scaled``: one number for each; ``words``: integers in words of 32 bits; the others two floats in a byte."""
    codes: str
    """Ending of the codes' name."""
    plain: str
    """Ending of the name that the plain weight has."""
    scales: tuple[str, ...]
    """Endings of the scales' name, the first that is there."""
    types: tuple[str, ...]
    """Number formats of the codes, as safetensors names them."""
    bits: int = 8
    block: tuple[int, int] = (0, 0)
    """Numbers along the last two dimensions, as stored, that share one scale; 0 if each scale is for one number or for
    all of them."""
    zeros: str = ""
    """Ending of the zero points' name."""
    needs_zeros: bool = False
    """True: every weight has zero points."""
    zero: int = 0
    """The zero point of weights without any."""
    zero_shift: int = 0
    """What is added to stored zero points."""
    groups: str = ""
    """Ending of the name of the group of each input."""
    in_order: bool = False
    """True: these groups are of neighbors."""
    shape: str = ""
    """Ending of the name of a stored shape."""
    transposed: bool = False
    """True: stored as inputs by outputs."""
    packed_dim: int = 1
    """Dimension of the codes, as stored, along which they are packed."""
    zeros_dim: int = 1
    """Dimension of the zero points along which they are packed."""
    places: tuple[int, ...] = ()
    """Place of each number in its word; (): in order."""
    second: str = ""
    """Ending of a scale of all scales."""
    divides: bool = False
    """True: the scales are divided by the second scale."""
    sibling: str = ""
    """Name of the scales next to a parameter ``weight``, in formats without an ending: ``scale`` in DeepSeek V4."""
    scale_types: tuple[str, ...] = ()
    """Number formats of the scales; (): any float."""
    other: Packing | None = None
    """How the weights are stored whose codes have its number formats; None: all are stored alike."""

    @property
    def per_word(self) -> int:
        """Codes of one stored number."""
        return {"scaled": 1, "words": WORD_BITS // self.bits}.get(self.kind, 2)

    def of_type(self, type: str) -> Packing:
        """How a weight is stored by the number format of its codes."""
        return self.other if self.other is not None and type in self.other.types else self

    def stems(self, names: Collection[str]) -> dict[str, str]:
        """The quantized weights among the tensors ``names``: the weight's name -> its stem."""
        found = {}
        for scales in self.scales:
            for name in names:
                stem = name.removesuffix(scales)
                if name.endswith(scales) and stem + self.codes in names:
                    found[stem + self.plain] = stem
        if self.sibling:
            for name in names:
                stem = name.removesuffix(self.sibling) + "weight"
                if name.endswith(f".{self.sibling}") and stem in names:
                    found[stem] = stem
        return found

    def scale_names(self, stem: str) -> Iterator[str]:
        """Names that the scales of a weight may have, of which the first that is there counts."""
        yield from (stem + ending for ending in self.scales)
        if self.sibling and stem.endswith(".weight"):
            yield stem.removesuffix("weight") + self.sibling

    def scaled(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Format]:
        """Weights that a GPU can multiply as they are stored, with their formats there, by the weights' names.

        Args:
            tensors: as for ``count_packed``.
        """
        found = {}
        for name, stem in self.stems(tensors).items():
            is_left = any(part in name for part in _NOT_ALONE) or (
                ".experts." in name and self.is_ordered(stem, tensors)
            )
            if not is_left and (format := self._format(stem, tensors)) is not None:
                found[name] = format
        return found

    def is_ordered(self, stem: str, names: Collection[str]) -> bool:
        """True if groups of a weight may not be of neighboring inputs. Such a weight is stored with reordered inputs,
        on ranks that hold all inputs."""
        return bool(self.groups) and stem + self.groups in names and not self.in_order

    def _format(self, stem: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Format | None:
        """The format of a weight on a GPU; None if it is dequantized."""
        kind, shape = tensors[stem + self.codes]
        packing = self.of_type(kind)
        has_zeros = bool(packing.zeros) and stem + packing.zeros in tensors
        if packing.needs_zeros and not has_zeros:
            return None
        scale_kind, scales = next(tensors[own] for own in self.scale_names(stem) if own in tensors)
        if packing.kind == "mxfp4":
            return Format(4, 2, MXFP4_GROUP, "F8_E8M0") if len(shape) == 4 else None
        if len(shape) != 2 or (packing.kind == "words" and packing.bits != 4):
            return None
        exponent = {"scaled": _EXPONENTS.get(kind, 0), "words": 0}.get(packing.kind, 2)
        inputs, at = packing.shape_of(shape, stem + self.codes)[1], 0 if packing.transposed else 1
        columns = scales[at] if len(scales) == 2 else 1
        group = 0 if columns == 1 else packing.block[at]
        fits = columns == 1 or (group and -(-inputs // group) == columns)
        if not fits or scale_kind not in _SCALE_BYTES or (has_zeros and exponent):
            return None
        held = Format(packing.bits, exponent, group, scale_kind, bool(packing.second), has_zeros)
        return held.begun_at(SCALED_BLOCK)

    def usual_format(self) -> Format | None:
        """The format of weights on a GPU whose files are not there, with the scales that such checkpoints have."""
        if self.kind == "words" and self.bits != 4:
            return None
        exponent = {"scaled": _EXPONENTS.get(self.types[0], 0), "words": 0}.get(self.kind, 2)
        scales = {"scaled": "F32", "words": "BF16", "nvfp4": "F8_E4M3"}.get(self.kind, "F8_E8M0")
        group = MXFP4_GROUP if self.kind == "mxfp4" else self.block[0 if self.transposed else 1]
        return Format(self.bits, exponent, group, scales, bool(self.second), self.needs_zeros).begun_at(SCALED_BLOCK)

    def parts(self, stem: str) -> Iterator[str]:
        """Names of the tensors that a weight may consist of."""
        yield stem + self.codes
        yield from self.scale_names(stem)
        yield from (stem + ending for ending in (self.zeros, self.groups, self.shape, self.second) if ending)

    def plain_names(self, names: Collection[str]) -> list[str]:
        """Names of a checkpoint's tensors as if it were not quantized, without the scales of activations."""
        stems = self.stems(names)
        stored = {part for stem in stems.values() for part in self.parts(stem)}
        kept = [n for n in names if n not in stored and n.rpartition(".")[2] not in _ACTIVATIONS]
        return [*stems, *kept]

    def shape_of(self, codes: tuple[int, ...], name: str) -> tuple[int, ...]:
        """The shape of a weight by that of its codes ``name``. Raises ConfigError if they should be matrices."""
        if len(codes) < (4 if self.kind == "mxfp4" else 2 if self.per_word > 1 else 0):
            raise ConfigError(f"{name} of shape {codes} is quantized, and no matrix")
        if self.kind == "mxfp4":
            experts, outputs, groups, _ = codes
            return experts, groups * MXFP4_GROUP, outputs
        dim = len(codes) - 2 + self.packed_dim
        sizes = [size * (self.per_word if at == dim else 1) for at, size in enumerate(codes)]
        return (*sizes[:-2], sizes[-1], sizes[-2]) if self.transposed else tuple(sizes)

    def require_types(self, types: Mapping[str, str], path: str) -> None:
        """Raises ConfigError if tensors are stored as numbers of another kind than this format's, or scales without
        what they scale.

        Args:
            types: the number format of each tensor by name.
            path: the checkpoint.
        """
        stems = self.stems(types)
        codes = {stem + self.codes for stem in stems.values()}
        others = {part for stem in stems.values() for part in self.parts(stem)} - codes
        packings = {stem: self.of_type(types[stem + self.codes]) for stem in stems.values()}
        scales = {name: packings[stem] for stem in packings for name in self.scale_names(stem) if name in types}
        wrong = [
            stem + self.codes for stem, one in sorted(packings.items()) if types[stem + self.codes] not in one.types
        ]
        wrong += [n for n in sorted(types) if n not in codes | others and types[n] in _PACKED_TYPES]
        wrong += [n for n, one in sorted(scales.items()) if one.scale_types and types[n] not in one.scale_types]
        if self.kind != "mxfp4":
            wrong += [n for n in sorted(scales) if types[n] == "U8"]
        if wrong:
            name = wrong[0]
            raise ConfigError(f"model {path!r} stores {name} as {types[name]}, which is not read in its format")
        for name in sorted(types.keys() - scales.keys()):
            if any(name.endswith(ending) for ending in self.scales if ending != _ANY_SCALE):  # AWQ scales activations
                raise ConfigError(f"model {path!r} stores {name}, and no weight that it belongs to")


def factor(exponent: int, wider: int = 8) -> float:
    """The factor that corrects scales if an exponent of ``exponent`` bits is read as one of ``wider`` bits; float32 has
    8."""
    return 2.0 ** (2 ** (wider - 1) - 2 ** (exponent - 1)) if exponent else 1.0


def packing_of(config: Mapping[str, Any] | None) -> Packing | None:
    """How the weights of a ``quantization_config`` are stored; None: they are plain, or are not dequantized here."""
    found = None if config is None else _packing(config)
    return found if isinstance(found, Packing) else None


def why_not_dequantized(config: Mapping[str, Any]) -> str:
    """Says which part of a ``quantization_config`` is not read, as a clause; "": its method is not."""
    found = _packing(config)
    return found if isinstance(found, str) else ""


def require_weights(
    stored: Mapping[str, Any] | None, quantization: str | None, path: str, device: str, *, is_here: bool = True
) -> None:
    """Raises ConfigError if the weights of a checkpoint cannot run as they are, or by the option ``quantization``.

    Args:
        stored: its ``quantization_config``, if it has one.
        quantization: the option.
        path: the checkpoint.
        device: type of the device.
        is_here: False: they run on another machine, whose packages are not known.
    """
    method = None if stored is None else method_of(stored)
    if quantization is not None:
        require_quantization(quantization, path, method)
    elif method == "modelopt" and packing_of(stored) is None:
        raise ConfigError(
            f"model {path!r} is quantized by 'modelopt' with {why_not_dequantized(stored or {})}: "
            "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO and NVFP4 are allowed"
        )
    elif method is not None and packing_of(stored) is None:
        require_method(path, method, device, is_here=is_here)


def why_whole(config: Mapping[str, Any] | None, name: str) -> str | None:
    """Says why ranks cannot share a model, as a clause; None: they can. Ranks read slices of plain or dequantized
    weights.

    Args:
        config: the ``quantization_config`` of the checkpoint, if it has one.
        name: of the model.
    """
    if config is None or packing_of(config) is not None:
        return None
    how = f"model {name!r} is quantized by {method_of(config)!r}"
    how += f" with {reason}" if (reason := why_not_dequantized(config)) else ""
    return f"{how}: one process runs quantized weights, so set it to 1"


def count_scaled(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], packing: Packing | None, model_type: str = ""
) -> tuple[int, int, int, int]:
    """Counts, for weights that a GPU multiplies as stored: numbers, bytes on the GPU, and bytes saved only on a single
    GPU. The last count is the numbers of all quantized weights.

    Args:
        tensors: as for ``count_packed``.
        packing: as there.
        model_type: of the text model; "": one whose experts can stay as they are stored.
    """
    if packing is None:
        return 0, 0, 0, 0
    numbers = num_bytes = alone = quantized = 0
    formats = packing.scaled(tensors)
    for name, stem in packing.stems(tensors).items():
        kind, codes = tensors[stem + packing.codes]
        own = packing.of_type(kind)
        shape = own.shape_of(codes, stem + packing.codes)
        quantized += math.prod(shape)
        if (format := formats.get(name)) is None or (model_type in PLAIN_EXPERTS and ".experts." in name):
            continue
        *experts, outputs, inputs = (*shape[:-2], *shape[:-3:-1]) if own.kind == "mxfp4" else shape
        held = math.prod(experts) * format.num_bytes(outputs, inputs)
        numbers += math.prod(shape)
        num_bytes += held
        alone += 2 * math.prod(shape) - held if own.is_ordered(stem, tensors) else 0
    return numbers, num_bytes, alone, quantized


def count_by_config(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], model_type: str
) -> tuple[int, int, int, int]:
    """Counts what ``count_scaled`` does for weights that a configuration describes and whose files are not there.

    Args:
        shapes: outputs and inputs of the linear layers, and experts before them, by the weights' names.
        config: the ``quantization_config``.
        model_type: of the text model.
    """
    if (packing := packing_of(config or None)) is None:
        return 0, 0, 0, 0
    numbers = num_bytes = alone = quantized = 0
    groups = (config.get("config_groups") or {}).values()
    has_order = any((one.get("weights") or {}).get("actorder") in ("group", "dynamic") for one in groups)
    has_order |= packing.transposed and bool(packing.groups) and not packing.in_order
    format = packing.usual_format()
    experts_only = packing.kind == "mxfp4"
    for name, shape in shapes.items():
        if _is_left_plain(config, name) or (experts_only and len(shape) < 3):
            continue
        size = math.prod(shape)
        quantized += size
        is_kept = not any(part in name for part in _NOT_ALONE)
        is_kept &= not ((model_type in PLAIN_EXPERTS or has_order) and ".experts." in name)
        if format is not None and is_kept:
            *experts, outputs, inputs = shape
            held = math.prod(experts) * format.num_bytes(outputs, inputs)
            numbers += size
            num_bytes += held
            alone += 2 * size - held if has_order else 0
    return numbers, num_bytes, alone, quantized


def _is_left_plain(config: Mapping[str, Any], name: str) -> bool:
    """True if a ``quantization_config`` leaves out a weight: its names are expressions, whole names or their ends."""
    module = name.removesuffix(".weight")
    listed = (config.get(key) for key in ("ignore", "modules_to_not_convert", "exclude_modules"))
    head = [] if config.get("lm_head") is True else ["lm_head"]
    for one in (*head, *(str(each) for names in listed if isinstance(names, list) for each in names)):
        pattern = one.removeprefix("re:")
        try:
            found = re.match(pattern if pattern != one else rf"{one}(\.|$)", module) is not None
        except re.error:
            found = False
        if found or f".{module}".endswith(f".{one}"):
            return True
    return False


def count_packed(tensors: Mapping[str, tuple[str, tuple[int, ...]]], packing: Packing | None) -> tuple[int, int]:
    """Numbers of all weights once they are plain, and those of them in no matrix.

    Args:
        tensors: number format and shape of the stored tensors by name.
        packing: how weights are quantized; None: they are plain.
    """
    stems = {} if packing is None else packing.stems(tensors)
    plain = tensors if packing is None else packing.plain_names(tensors)
    total = vectors = 0
    for name in plain:
        if packing is None or (stem := stems.get(name)) is None:
            shape = tensors[name][1]
        else:
            kind, codes = tensors[stem + packing.codes]
            shape = packing.of_type(kind).shape_of(codes, stem + packing.codes)
        total += math.prod(shape)
        vectors += math.prod(shape) if len(shape) < 2 else 0
    return total, vectors


def _packing(config: Mapping[str, Any]) -> Packing | str:
    """A format, or which value of the configuration is not read."""
    readers: Mapping[str, Callable[[Mapping[str, Any]], Packing | str]] = {
        "awq": _awq,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "gptq": _gptq,
        "modelopt": _modelopt,
        "mxfp4": lambda config: _MXFP4,
    }
    reader = readers.get(method_of(config))
    return "" if reader is None else reader(config)


_MXFP4 = Packing("mxfp4", "_blocks", "", ("_scales",), ("U8",), bits=4, transposed=True)


def _fp8(config: Mapping[str, Any]) -> Packing | str:
    """DeepSeek's and transformers': one scale for a block, or for a tensor.

    Experts of DeepSeek V4 are floats of 4 bits, two in an ``I8``, with the exponent of each 32 inputs.
    """
    rows, columns = config.get("weight_block_size") or (0, 0)
    whole = Packing("scaled", "", "", ("_scale_inv", _ANY_SCALE), _FLOAT8, block=(rows, columns), sibling="scale")
    experts = replace(whole, kind="nvfp4", types=("I8",), bits=4, block=(1, MXFP4_GROUP), scale_types=("F8_E8M0",))
    return replace(whole, other=experts)


def _modelopt(config: Mapping[str, Any]) -> Packing | str:
    algorithm = str(config.get("quant_algo")).upper()
    scales = ("weight_scale",)
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return Packing("scaled", "weight", "weight", scales, _FLOAT8)
    if algorithm == "FP8_PB_WO":
        return Packing("scaled", "weight", "weight", ("weight_scale_inv", *scales), _FLOAT8, block=(128, 128))
    if algorithm == "NVFP4":
        block = 1, NVFP4_GROUP
        return Packing("nvfp4", "weight", "weight", scales, ("U8",), 4, block, second="weight_scale_2")
    return f"quant_algo {config.get('quant_algo')!r}"


def _compressed_tensors(config: Mapping[str, Any]) -> Packing | str:
    form, groups = config.get("format"), (config.get("config_groups") or {}).values()
    weights = [group.get("weights") or {} for group in groups]
    forms = {form, *(group.get("format") or form for group in groups)}
    blocks = {_block_of(one) for one in weights} - {(0, 0)}
    bits = {one.get("num_bits") for one in weights}
    symmetric = all(one.get("symmetric", True) for one in weights)
    if len(forms) > 1 or len(blocks) > 1 or not weights:
        return f"format {form!r} of several kinds"
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return "a sparsity_config"
    (block,) = blocks or {(0, 0)}
    scales, zeros = ("weight_scale",), "weight_zero_point"
    if form in ("float-quantized", "int-quantized", "naive-quantized"):
        return Packing("scaled", "weight", "weight", scales, (*_FLOAT8, "I8"), 8, block, zeros, not symmetric)
    if form == "nvfp4-pack-quantized":
        second = "weight_global_scale"
        return Packing(
            "nvfp4", "weight_packed", "weight", scales, ("U8",), 4, (1, NVFP4_GROUP), second=second, divides=True
        )
    if form != "pack-quantized" or len(bits) > 1 or not bits <= {1, 2, 4, 8}:
        return f"format {form!r} of {', '.join(map(str, sorted(bits, key=str)))} bits"
    num = int(bits.pop() or 0)
    return Packing(
        "words", "weight_packed", "weight", scales, ("I32",), num, block, zeros, not symmetric, zero=1 << num - 1,
        groups="weight_g_idx", shape="weight_shape", zeros_dim=0,
    )  # fmt: skip


def _block_of(weights: Mapping[str, Any]) -> tuple[int, int]:
    """Outputs and inputs with one scale; (0, 0): all of a tensor, or of an output."""
    match weights.get("strategy"):
        case "block":
            rows, columns = weights.get("block_structure") or (0, 0)
            return rows, columns
        case "group":
            return 1, weights.get("group_size") or 0
    return 0, 0


def _gptq(config: Mapping[str, Any]) -> Packing | str:
    bits, form = config.get("bits"), str(config.get("checkpoint_format") or "gptq").lower()
    if bits not in (2, 4, 8):
        return f"bits {bits!r}"
    if form not in ("gptq", "gptq_v2"):
        return f"checkpoint_format {form!r}"
    if config.get("dynamic"):
        return "dynamic"
    if config.get("pack_dtype", "int32") != "int32":
        return f"pack_dtype {config['pack_dtype']!r}"
    return Packing(
        "words", "qweight", "weight", ("scales",), ("I32",), bits, _group_of(config), "qzeros", True,
        zero_shift=1 if form == "gptq" else 0, groups="g_idx", in_order=not config.get("desc_act"), transposed=True,
        packed_dim=0,
    )  # fmt: skip


def _awq(config: Mapping[str, Any]) -> Packing | str:
    bits, version = config.get("bits"), str(config.get("version") or config.get("format") or "gemm").lower()
    if bits != 4:
        return f"bits {bits!r}"
    if version != "gemm":
        return f"version {version!r}"
    if not config.get("zero_point", True):
        return "zero_point false"
    return Packing(
        "words", "qweight", "weight", ("scales",), ("I32",), bits, _group_of(config), "qzeros", True,
        transposed=True, places=AWQ_PLACES,
    )  # fmt: skip


def _group_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """Inputs and outputs with one scale."""
    return max(0, int(config.get("group_size") or 0)), 1
