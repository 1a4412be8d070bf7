"""Quantized weights as plain ones: dequantized tensor by tensor, and of a tensor the part that is asked for.

One rank reads whole tensors, each of several ranks its slices, by the same code. A weight is computed in float32 and
rounded once, to the dtype of the model. ``checkpoint/packing.py`` has the formats.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.packing import MXFP4_GROUP, WORD_BITS, Format, Packing, factor
from paceline.errors import ConfigError
from paceline.model.local_config import read_config
from paceline.model.parallel.load import CheckpointFiles
from paceline.model.quantized_weights import INTEGER_ZEROS
from paceline.model.scaled import FLOAT4, Scaled, stored_scales

Box = tuple[slice, ...]

NUM_AT_ONCE = 1 << 19
"""Numbers that are dequantized at once, in float32: what a processor's cache holds."""
_TYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8, "U8": torch.uint8}
"""How codes of a byte are read, by their number format."""
log = logging.getLogger(__name__)


class DequantizedFiles:
    """The tensors of a checkpoint as if they were not quantized."""

    def __init__(self, files: CheckpointFiles, packing: Packing) -> None:
        """Raises ConfigError if tensors are stored in a way that is not the format's. Reads no weights.

        Args:
            files: the stored tensors.
            packing: how weights are quantized.
        """
        self.path, self._files, self._packing = files.path, files, packing
        types = {name: files.type(name) for name in files}
        packing.require_types(types, files.path)
        self._stored = types.keys()
        self._stems = packing.stems(types)
        self._packings = {stem: packing.of_type(types[stem + packing.codes]) for stem in self._stems.values()}
        self._names = packing.plain_names(types)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def close(self) -> None:
        """Closes the files."""
        self._files.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises ConfigError if the files do not hold the tensor."""
        stem = self._stems.get(name)
        if stem is None:
            return self._files.shape(name)
        packing = self._packings[stem]
        codes = packing.shape_of(self._files.shape(name := stem + packing.codes), f"model {self.path!r}: {name}")
        if (part := stem + packing.shape) not in self._stored or not packing.shape:
            return codes
        stored = tuple(self._whole(part, torch.int64).flatten().tolist())
        if len(stored) != len(codes) or stored[:-1] != codes[:-1] or not 0 <= codes[-1] - stored[-1] < WORD_BITS:
            raise ConfigError(f"model {self.path!r}: {part} is {stored}, and the codes are of {codes}")
        return stored

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole tensor: a quantized one as ``dtype``, others as they are stored."""
        if name not in self._stems:
            return self._files.read(name)
        shape = self.shape(name)
        whole = torch.empty(shape, dtype=dtype)
        self.copy(name, tuple(slice(0, size) for size in shape), whole)
        return whole

    @property
    def scaled(self) -> dict[str, Format]:
        """Weights that can stay as they are stored (``Packing.scaled``)."""
        found = self._packing.scaled({name: (self._files.type(name), self._files.shape(name)) for name in self._stored})
        found = {name: format for name, format in found.items() if self._has_equal_groups(self._stems[name])}
        fitting = {name: format for name, format in found.items() if self._fits(self._stems[name], format)}
        if len(fitting) < len(found):
            log.warning(
                "%d quantized weights of %r have scales too large for products by them: they are dequantized",
                len(found) - len(fitting),
                self.path,
            )
        return fitting

    def order(self, name: str) -> Tensor | None:
        """[inputs] int32: the inputs of one of them group by group, as it is kept; None: as they are stored."""
        if (groups := self._groups(self._stems[name])) is None:
            return None
        order = groups.argsort(stable=True)
        return None if torch.equal(order, torch.arange(len(order))) else order.int()

    def read_scaled(self, name: str, box: Box, format: Format) -> Scaled:
        """Outputs of one of them, or of one expert. Their inputs in the box begin with a group of ``format``; if groups
        are not of neighbors they are all."""
        stem = self._stems[name]
        packing = self._packings[stem]
        if packing.kind == "mxfp4":
            return self._expert(stem, box, format)
        rows, columns = box
        num_rows, num_inputs = rows.stop - rows.start, columns.stop - columns.start
        group, order = format.group or num_inputs, self.order(name)
        groups: Box = (rows, slice(columns.start, columns.stop, group))

        def of_groups(values: Tensor) -> Tensor:
            values = values.T if packing.transposed else values
            return values.expand(num_rows, -(-num_inputs // group)).contiguous()

        groups = groups[::-1] if packing.transposed else groups
        scales = self._spread(self._scales_name(stem), groups, stem, in_order=True)
        second, zeros = self._factor(stem), self.zero_points(stem, groups, in_order=True)
        if isinstance(zeros, Tensor):
            zeros = of_groups(zeros - INTEGER_ZEROS[format.bits])
            if not torch.equal(zeros, zeros.to(torch.int8).to(zeros.dtype)):
                raise ConfigError(f"model {self.path!r}: {stem + packing.zeros} has zero points that no int8 holds")
        codes = self._bytes(stem, box)[:, : -(-num_inputs * format.bits // 8)]
        if order is not None:
            codes = _paired(torch.stack([codes & 15, codes >> 4], -1).flatten(1).index_select(1, order))
        return Scaled(
            codes,
            stored_scales(of_groups(scales), format),
            None if second is None else second.reshape(1).expand(num_rows),
            zeros.to(torch.int8) if isinstance(zeros, Tensor) else None,
            order,
        )

    def _bytes(self, stem: str, box: Box) -> Tensor:
        """[outputs, bytes] of the codes of a box: of 4 bits two inputs in a byte, the first in the lower bits."""
        packing, stored, (rows, columns) = self._packings[stem], stem + self._packings[stem].codes, box
        if packing.transposed and packing.packed_dim == 1:  # a word has outputs
            parts = range(columns.start, columns.stop, max(1, NUM_AT_ONCE // (rows.stop - rows.start)))
            boxes = [(slice(first, min(first + parts.step, columns.stop)), rows) for first in parts]
            return _paired(
                torch.cat([self.unpacked_codes(packing, stored, part, 1).to(torch.uint8) for part in boxes]).T
            )
        dtype, per_word = _TYPES.get(self._files.type(stored), torch.int32), packing.per_word
        part = rows, slice(columns.start // per_word, -(-columns.stop // per_word))
        part = part[::-1] if packing.transposed else part
        codes = torch.empty([one.stop - one.start for one in part], dtype=dtype)
        self._files.copy(stored, part, codes)
        codes = codes.T.clone(memory_format=torch.contiguous_format) if packing.transposed else codes
        return codes.view(torch.uint8)

    def _groups(self, stem: str) -> Tensor | None:
        """[inputs] int32: the group of each input, if they are stored."""
        packing = self._packings[stem]
        is_stored = packing.groups and stem + packing.groups in self._stored
        return self._whole(stem + packing.groups, torch.int32).flatten() if is_stored else None

    def _has_equal_groups(self, stem: str) -> bool:
        """True if groups of inputs that are stored, if any, have a number of inputs each, of neighbors where the
        configuration says so."""
        packing, groups = self._packings[stem], self._groups(stem)
        if groups is None:
            return True
        size = packing.block[0 if packing.transposed else 1] or len(groups)
        own = groups if packing.in_order else groups.sort().values
        inputs = self.shape(stem + packing.plain)[-1]
        return torch.equal(own, torch.arange(inputs, dtype=torch.int32) // size)

    def _fits(self, stem: str, format: Format) -> bool:
        """True if no scale is too large for the kernel. What is no finite number at all is told later."""
        if not format.exponent:
            return True
        scales, second = self._whole(self._scales_name(stem)), self._factor(stem)
        scales = torch.exp2(scales - 127) if self._packings[stem].kind == "mxfp4" else scales
        largest = scales.max() if second is None else scales.max() * second
        return not bool(largest.isfinite()) or bool((largest * factor(format.exponent)).isfinite())

    def copy(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box of a tensor to ``target``; a quantized one some of its rows at a time."""
        stem = self._stems.get(name)
        if stem is None:
            self._files.copy(name, box, target)
            return
        target = target.reshape([part.stop - part.start for part in box])  # a view: only ones are left out
        packing = self._packings[stem]
        numbers = self._experts if packing.kind == "mxfp4" else self._numbers
        dim = len(box) - 1 if packing.transposed and packing.kind != "mxfp4" else 0
        size = box[dim].stop - box[dim].start
        step = max(1, NUM_AT_ONCE * size // max(1, target.numel()))
        for first in range(0, size, step):
            stop = min(first + step, size)
            part = (*box[:dim], slice(box[dim].start + first, box[dim].start + stop), *box[dim + 1 :])
            target.narrow(dim, first, stop - first).copy_(numbers(stem, part))

    def _numbers(self, stem: str, box: Box) -> Tensor:
        """A box of a weight in float32."""
        packing = self._packings[stem]
        if packing.transposed:
            box = (*box[:-2], box[-1], box[-2])
        numbers = self.unpacked_codes(packing, stem + packing.codes, box, packing.packed_dim)
        if packing.kind == "nvfp4":
            numbers = torch.tensor(FLOAT4, dtype=torch.float32)[numbers]
        else:
            numbers = numbers.float() - self.zero_points(stem, box)
        scales, second = self._scales(stem, box), self._factor(stem)
        numbers *= scales if second is None else scales * second
        return numbers.transpose(-1, -2) if packing.transposed else numbers

    def _factor(self, stem: str) -> Tensor | None:
        """What all scales of a weight are multiplied by; None: nothing."""
        name = stem + self._packings[stem].second
        if name == stem:
            return None
        if name not in self._stored:
            raise self._missing(name)
        second = self._whole(name)
        if second.numel() != 1:
            raise self._misshapen(name)
        return 1 / second if self._packings[stem].divides else second

    def unpacked_codes(self, packing: Packing, name: str, box: Box, packed_dim: int) -> Tensor:
        """A box of codes, unpacked: floats of 8 bits as float32, integers as int32."""
        if packing.kind == "scaled":
            return self._part(name, box, torch.float32)
        per_word = packing.per_word
        dim = len(box) - 2 + packed_dim
        first, stop = box[dim].start // per_word, -(-box[dim].stop // per_word)
        words = self._part(name, (*box[:dim], slice(first, stop), *box[dim + 1 :]), torch.int32)
        shifts = torch.arange(per_word, dtype=torch.int32)
        if packing.places:
            shifts = torch.tensor(packing.places, dtype=torch.int32)
        shifts = (shifts * packing.bits).view(-1, *[1] * (len(box) - dim - 1))
        codes = (words.unsqueeze(dim + 1) >> shifts) & ((1 << packing.bits) - 1)
        part = box[dim]
        return codes.flatten(dim, dim + 1).narrow(dim, part.start - first * per_word, part.stop - part.start)

    def zero_points(self, stem: str, box: Box, *, in_order: bool = False) -> Tensor | int:
        """The zero points of a box, which one for each scale is stored, or the one of all weights. ``in_order``: as for
        ``_spread``."""
        packing = self._packings[stem]
        name = stem + packing.zeros
        if not packing.zeros or name not in self._stored:
            if packing.needs_zeros:
                raise self._missing(name)
            return packing.zero
        if packing.kind == "scaled":
            return self._spread(name, box, stem)
        sizes = self._files.shape(self._scales_name(stem))
        per_word, dim = packing.per_word, packing.zeros_dim
        packed = tuple(-(-size // per_word) if at == dim else size for at, size in enumerate(sizes))
        if self._files.shape(name) != packed:
            raise self._misshapen(name)
        return self._spread(name, box, stem, sizes, in_order=in_order) + packing.zero_shift

    def _scales(self, stem: str, box: Box) -> Tensor:
        """The scales of a box."""
        return self._spread(self._scales_name(stem), box, stem)

    def _scales_name(self, stem: str) -> str:
        return next(name for name in self._packings[stem].scale_names(stem) if name in self._stored)

    def _spread(
        self, name: str, box: Box, stem: str, unpacked: tuple[int, ...] | None = None, *, in_order: bool = False
    ) -> Tensor:
        """For each number of a box, as stored, the value of its block or group in a tensor of scales or zero points.

        Only the values that the box needs are read. ``unpacked``: the shape of zero points once they are unpacked.
        ``in_order``: groups are of neighbors, whatever is stored.
        """
        packing, sizes = self._packings[stem], unpacked or self._files.shape(name)
        if math.prod(sizes) == 1:
            return (
                self._whole(name).reshape(1, 1)
                if unpacked is None
                else self.unpacked_codes(packing, name, (slice(0, 1),) * len(sizes), packing.zeros_dim)
            )
        whole = self._files.shape(stem + packing.codes)
        dims = len(whole)
        if len(sizes) == 1 and dims == 2:
            sizes = (*sizes, 1)
        if len(sizes) != dims:
            raise self._misshapen(name)
        lengths = self._stored_lengths(stem)
        indices = [
            self.index_of_scales(name, stem, dim, sizes[dim], lengths[dim], box[dim], in_order=in_order)
            for dim in range(dims)
        ]
        firsts = [int(index.min()) for index in indices]
        part = tuple(slice(f, int(index.max()) + 1) for f, index in zip(firsts, indices, strict=True))
        if unpacked is not None:
            values = self.unpacked_codes(packing, name, part, packing.zeros_dim)
        else:
            stored = part[: len(self._files.shape(name))]
            values = self._part(name, stored, torch.float32).reshape([p.stop - p.start for p in part])
        for dim, (first, index) in enumerate(zip(firsts, indices, strict=True)):
            values = values.index_select(dim, index - first)
        return values

    def index_of_scales(
        self, name: str, stem: str, dim: int, size: int, length: int, part: slice, *, in_order: bool = False
    ) -> Tensor:
        """Along a dimension of ``length`` numbers with ``size`` scales, the scale of each number of a part."""
        packing = self._packings[stem]
        groups = stem + packing.groups
        along_inputs = dim == (0 if packing.transposed else 1)
        if packing.groups and along_inputs and not in_order and groups in self._stored:
            if len(sizes := self._files.shape(groups)) != 1 or sizes[0] < length:
                raise self._misshapen(groups)
            found = self._part(groups, (slice(part.start, part.stop),), torch.int32)[:: part.step]
            if int(found.min()) >= 0:
                if int(found.max()) >= size:
                    raise self._misshapen(groups)
                return found
        numbers = torch.arange(part.start, part.stop, part.step or 1)
        if size == length:
            return numbers
        if size == 1:
            return torch.zeros_like(numbers)
        dims = len(self._files.shape(stem + packing.codes))
        block = packing.block[dim - dims + 2] if dim >= dims - 2 else 0
        if not block or -(-length // block) != size:
            raise self._misshapen(name)
        return numbers // block

    def _stored_lengths(self, stem: str) -> tuple[int, ...]:
        """Numbers of a weight along the dimensions of its codes."""
        packing = self._packings[stem]
        shape = self.shape(stem + packing.plain)
        return (*shape[:-2], shape[-1], shape[-2]) if packing.transposed else shape

    def _experts(self, stem: str, box: Box) -> Tensor:
        """A box [experts, inputs, outputs] of gpt-oss' experts in float32.

        ``blocks`` [experts, outputs, groups, 16] has two numbers in a byte, ``scales`` [experts, outputs, groups] the
        exponent of each 32.
        """
        experts, inputs, outputs = box
        groups = slice(inputs.start // MXFP4_GROUP, -(-inputs.stop // MXFP4_GROUP))
        part = experts, outputs, groups
        codes = self._part(stem + self._packings[stem].codes, (*part, slice(0, MXFP4_GROUP // 2)), torch.int32)
        exponents = self._part(self._scales_name(stem), part, torch.int32) - 127
        numbers = torch.tensor(FLOAT4, dtype=torch.float32)[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(3)]
        numbers = torch.ldexp(numbers, exponents[..., None]).flatten(2)
        first = inputs.start - groups.start * MXFP4_GROUP
        return numbers.narrow(2, first, inputs.stop - inputs.start).transpose(1, 2)

    def _expert(self, stem: str, box: Box, format: Format) -> Scaled:
        """A box [1, inputs, outputs] of gpt-oss' experts as it is stored; it begins with a group of ``format``."""
        expert, inputs, outputs = box
        groups = slice(inputs.start // MXFP4_GROUP, -(-inputs.stop // MXFP4_GROUP))
        part, skipped = (expert, outputs, groups), inputs.start - groups.start * MXFP4_GROUP
        num_inputs = inputs.stop - inputs.start
        codes = self._part(stem + self._packings[stem].codes, (*part, slice(0, MXFP4_GROUP // 2)), torch.uint8)
        scales = self._part(self._scales_name(stem), part, torch.uint8)[0]
        scales = scales.repeat_interleave(MXFP4_GROUP // format.group, 1)[:, skipped // format.group :]
        codes = codes[0].flatten(1)[:, skipped // 2 : (skipped + num_inputs) // 2]
        return Scaled(codes.contiguous(), scales[:, : -(-num_inputs // format.group)].contiguous())

    def _whole(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self._part(name, tuple(slice(0, size) for size in self._files.shape(name)), dtype)

    def _part(self, name: str, box: Box, dtype: torch.dtype) -> Tensor:
        part = torch.empty([part.stop - part.start for part in box], dtype=dtype)
        self._files.copy(name, box, part)
        return part

    def _missing(self, name: str) -> ConfigError:
        return ConfigError(f"model {self.path!r} is not whole: no weight file holds {name}")

    def _misshapen(self, name: str) -> ConfigError:
        return ConfigError(
            f"model {self.path!r}: {name} of shape {self._files.shape(name)} does not fit the weight that it belongs to"
        )


def _paired(numbers: Tensor) -> Tensor:
    """[outputs, inputs] of 4 bits as bytes of two each, the first in the lower bits."""
    numbers = F.pad(numbers, (0, numbers.shape[1] % 2))
    return numbers[:, ::2] | numbers[:, 1::2] << 4


def dequantized_files(checkpoint: Checkpoint, packing: Packing) -> DequantizedFiles:
    """Raises ConfigError if a checkpoint has no safetensors files, or tensors that are not of the format."""
    return DequantizedFiles(CheckpointFiles(checkpoint.path), packing)


def plain_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """The configuration of a checkpoint's model as it runs, which is not quantized.

    Raises:
        ConfigError: the model is code of the checkpoint, which may read other weights.
    """
    config = read_config(checkpoint)
    if checkpoint.trust_remote_code and getattr(config, "auto_map", None):
        how = "only degree 1 works" if checkpoint.quantization is None else "trust_remote_code false is allowed"
        raise ConfigError(f"model {checkpoint.path!r} brings code of its own: {how}")
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config
