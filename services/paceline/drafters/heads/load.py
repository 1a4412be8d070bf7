"""From the checkpoint of a head to the head: what can be refused is refused by its configuration and headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.folder import local_folder, read_json
from paceline.checkpoint.mtp import mtp_modules
from paceline.checkpoint.packing import Packing, packing_of
from paceline.checkpoint.size import size_of
from paceline.checkpoint.weights import WeightFiles
from paceline.config import HeadOptions
from paceline.config.methods import HEADS
from paceline.config.methods.entry import function
from paceline.drafters.heads.block_formats import SINGLE
from paceline.drafters.heads.drafter import TOP_M, HeadDrafter
from paceline.drafters.heads.module import Function, HeadModule
from paceline.drafters.heads.reading import HeadForm, Reading, TargetFacts, meta_model, renaming
from paceline.errors import ConfigError, PacelineError
from paceline.model.compiled.linear import pack_layers
from paceline.model.dequantized import dequantized_files
from paceline.model.features import OUT, STREAMS, Features
from paceline.model.kv_cache import LayerSpec


@dataclass(frozen=True)
class HeadPlan:
    """A head's checkpoint that has been examined and fits its target; its weights are not read yet."""

    method: str
    features: Features
    """The states that it reads."""
    layers: tuple[LayerSpec, ...]
    """KV that it keeps per token on the target's pages."""
    num_parameters: int
    """Parameters of the head itself, without the target's that it shares."""
    _source: str
    _files: WeightFiles
    """With the names and shapes of plain weights."""
    _packing: Packing | None
    """Quantization of these weights; None: they are plain."""
    _form: HeadForm
    facts: TargetFacts
    """Of its target."""

    @property
    def one_pass(self) -> bool:
        """True if one forward makes all tokens of a proposal."""
        return self._form.module.parallel or not self._form.module.conditional

    @property
    def most_tokens(self) -> int | None:
        """Tokens that it can draft in a row; None: any number."""
        return self._form.module.max_depth

    @property
    def num_read(self) -> int:
        """Parameters that one forward reads: its own but for tables of embeddings, and the LM head that it borrows."""
        module = self._form.module
        tables = sum(part.weight.numel() for part in module.modules() if isinstance(part, torch.nn.Embedding))
        own = self.num_parameters - tables
        if not self.one_pass and self.most_tokens is not None:  # each depth has weights of its own
            own //= self.most_tokens
        return own + self.facts.vocab_size * self.facts.hidden_size * int(module.borrows_lm_head)

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        embed: Function | None = None,
        lm_head: Function | None = None,
        max_leaves: int = 64,
        num_candidates: int = TOP_M,
        fused: bool = False,
    ) -> HeadDrafter:
        """Reads the weights. May be called once only: the drafter then owns the module.

        Args:
            dtype: of the target.
            device: of the target.
            embed: the target's embedding, ids -> [..., hidden]; None: it is read from the target's files.
            lm_head: the target's LM head, [..., hidden] -> [..., vocabulary]; None: it is read from the target's files.
            max_leaves: the most leaves of one ``expand``.
            num_candidates: candidates of each leaf.
            fused: True: its states come from ``load_fuse`` of another process.

        Raises:
            ConfigError: a draft vocabulary is not within the target's.
        """
        module = self.load_module(dtype, device)
        target = self.facts.checkpoint
        if module.borrows_embedding and embed is None:
            embed = target_table(target, "get_input_embeddings", dtype, device)
        if module.borrows_lm_head and lm_head is None:
            lm_head = pack_layers(target_table(target, "get_output_embeddings", dtype, device))
        module.borrow(embed, lm_head)
        pack_layers(module)
        return HeadDrafter(
            module,
            kind=self.method,
            features=self.features,
            vocab_size=self.facts.vocab_size,
            max_leaves=max_leaves,
            num_candidates=num_candidates,
            fused=fused,
        )

    def load_module(self, dtype: torch.dtype, device: torch.device) -> HeadModule:
        """Loads the module with its own weights; the weights that it borrows from the target are missing. Call it only
        once.

        Raises:
            ConfigError: a draft vocabulary is not within the target's.
        """
        module, head = self._form.module, self._form
        wanted = [*head.names.values(), *(name for parts in head.experts.values() for part in parts for name in part)]
        tensors = self._read(wanted, dtype)
        state = {name: tensors[published] for name, published in head.names.items()}
        for name, experts in head.experts.items():
            state[name] = torch.stack([torch.cat([tensors[part] for part in parts]) for parts in experts])
        _assign(module, state, dtype, device)
        assert not any(tensor.is_meta for tensor in module.state_dict().values()), "a tensor was not loaded"
        if module.target_ids is not None:
            self._require_vocabulary(module.target_ids)
        module.materialize(device)
        return module

    @property
    def state_size(self) -> int:
        """Numbers of a state once it is fused."""
        return self._form.module.state_size

    def load_fuse(self, dtype: torch.dtype, device: torch.device) -> Function:
        """Reads the weights that fuse the states of the head's boundaries, concatenated, into ``[..., state_size]``.

        A target needs no more of a head that runs in another process. May be called once, and not together with
        ``load``.
        """
        module = self._form.module
        names = {own: name for own, name in self._form.names.items() if own.split(".")[0] in module.fusing}
        tensors = self._read(list(names.values()), dtype)
        _assign(module, {name: tensors[published] for name, published in names.items()}, dtype, device)
        pack_layers(module)
        fuse = module.eval().requires_grad_(False).fuse

        def fused(states: Tensor) -> Tensor:
            with torch.inference_mode():
                return fuse(states)

        return fused

    def _read(self, names: list[str], dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors of the files: of quantized weights as ``dtype``."""
        if self._packing is None:
            return self._files.read(names)
        files = dequantized_files(self.facts.checkpoint, self._packing)
        tensors = {name: files.read(name, dtype) for name in names}
        files.close()
        return tensors

    def _require_vocabulary(self, target_ids: Tensor) -> None:
        size, ids = self.facts.vocab_size, target_ids.tolist()
        if min(ids) < 0 or max(ids) >= size or len(set(ids)) < len(ids):
            name = "token_map" if self.method == "medusa" else "d2t + index"
            raise ConfigError(f"{name} of {self._source} must be distinct ids of the target's {size} tokens")
        if "t2d" in self._files.shapes:
            drafted = self._files.read(["t2d"])["t2d"].nonzero().flatten().tolist()
            if drafted != sorted(ids):
                raise ConfigError(f"d2t and t2d of {self._source} name different tokens: they must agree")


def open_head(
    method: str,
    source: str | None,
    target: Checkpoint,
    *,
    num_tokens: int = 4,
    boundaries: tuple[int, ...] | None = None,
) -> HeadPlan:
    """Examines the checkpoint of a head: its configuration, and names and shapes of its tensors.

    Args:
        method: of a head whose entry in ``config/methods`` has ``read``.
        source: directory or id of the checkpoint; None: the target's own (``mtp``).
        target: the target that it drafts for.
        num_tokens: tokens that it will draft in a row; P-EAGLE and block heads compute all of them in one pass.
        boundaries: states to read instead of the configuration's own (EAGLE-3, P-EAGLE, DFlash, DSpark, JetSpec). For
            an exit head: the boundary that it must have been trained at.

    Raises:
        ConfigError: with the reason in one sentence: an unknown key or tensor, one that is missing or of another shape,
            another vocabulary or width than the target's, a boundary outside the target.
    """
    known = {name: entry.read for name, entry in HEADS.items() if entry.read}
    if method not in known:
        raise ConfigError(f"method is {method!r}: {', '.join(known)} are allowed")
    folder = _folder(target.path if source is None else source)
    facts = TargetFacts.of(target)
    what = f"{method} head {str(folder)!r}"
    files = WeightFiles.open(folder, single=SINGLE.get(method, ()))
    packing = packing_of(target.quantization) if folder == target.folder else None
    if packing is not None:
        plain = dequantized_files(target, packing)
        files = replace(files, shapes={name: plain.shape(name) for name in plain})
        plain.close()
    config = read_json(folder, "config.json")
    head = _read(known[method], Reading(what, config, files, facts, num_tokens, boundaries))
    _require_boundaries(what, head.boundaries, facts)
    _require_shapes(what, head, files)
    count = sum(parameter.numel() for parameter in head.module.parameters())
    features = Features(head.boundaries, every_position=bool(head.module.layers_kv))
    return HeadPlan(method, features, head.module.layers_kv, count, what, files, packing, head, facts)


def _read(read: str, reading: Reading) -> HeadForm:
    """The head that a method's ``read`` finds in a source. Raises ConfigError."""
    try:
        with torch.device("meta"):
            form: HeadForm = function(read)(reading)
    except PacelineError:
        raise
    except Exception as error:  # torch and transformers raise whatever a value that is none leads to
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(f"config.json of {reading.what} is unfit: {type(error).__name__}: {reason}") from error
    return form


def open_configured(head: HeadOptions, target: Checkpoint) -> HeadPlan:
    """``open_head`` of a configured head that reads the target's states, in its process or not. Raises ConfigError."""
    boundaries = None if head.boundaries is None else tuple(head.boundaries)
    return open_head(head.method, head.source, target, num_tokens=head.num_speculative_tokens, boundaries=boundaries)


def _assign(module: torch.nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
    """Assigns tensors to a module without weights."""
    own = {
        name: (tensor.to(dtype) if tensor.is_floating_point() else tensor).to(device).clone()
        for name, tensor in state.items()
    }
    module.load_state_dict(own, strict=False, assign=True)


def mtp_layers(checkpoint: Checkpoint) -> int:
    """Number of MTP modules in the files of a target, by its weight names; 0 if it is not on this machine."""
    if checkpoint.folder is None:
        return 0
    try:
        names = WeightFiles.open(checkpoint.folder).shapes
    except ConfigError:
        return 0
    num_layers = size_of(checkpoint.config, 0, 1).num_layers
    return len(mtp_modules(names, checkpoint.config, num_layers))


def _folder(source: str) -> Path:
    found = local_folder(source)
    if found is None:
        raise ConfigError(f"head {source!r} is not on this machine: fetch it, and name its directory")
    return found


def _require_shapes(what: str, head: HeadForm, files: WeightFiles) -> None:
    own = head.module.state_dict()
    for name, published in head.names.items():
        if files.shapes[published] != tuple(own[name].shape):
            raise ConfigError(
                f"{published!r} of {what} is {list(files.shapes[published])}: by config.json and the target it must be "
                f"{list(own[name].shape)}"
            )
    for name, experts in head.experts.items():
        _, rows, columns = own[name].shape
        for parts in experts:
            for part in parts:
                if files.shapes[part] != (rows // len(parts), columns):
                    raise ConfigError(
                        f"{part!r} of {what} is {list(files.shapes[part])}: by config.json and the target it must be "
                        f"{[rows // len(parts), columns]}"
                    )


def _require_boundaries(what: str, boundaries: tuple[int, ...], facts: TargetFacts) -> None:
    for boundary in boundaries:
        if boundary > STREAMS and boundary != OUT and not 0 <= boundary <= facts.num_layers:
            raise ConfigError(
                f"{what} reads boundary {boundary}: the target {facts.checkpoint.path!r} has 0 to {facts.num_layers}"
            )


_PREFIXES = ("model.", "", "backbone.", "model.language_model.", "language_model.model.", "language_model.")
"""Prefixes of the names of a target's weights in its files."""


def target_table(checkpoint: Checkpoint, getter: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The embedding or the LM head of a target, read from its files: for a head whose target is compiled or sharded.

    ``getter``: the method of the target's model that returns it.

    Raises:
        ConfigError: the files do not name it, or it is more than a matrix and a factor.
    """
    model, files = meta_model(checkpoint), WeightFiles.open(_folder(checkpoint.path))
    packing = packing_of(checkpoint.quantization)
    plain = None if packing is None else dequantized_files(checkpoint, packing)
    part = getattr(model, getter)()
    names = [name for name, own in model.named_parameters(remove_duplicate=False) if own is part.weight]
    names = [prefix + name.removeprefix("model.") for name in names for prefix in _PREFIXES]
    held = files.shapes if plain is None else [*plain]
    renamed = renaming(model)
    name = next((name for name in names if name in held), None) or next(
        (n for n in held if files.shapes.get(n) == (*part.weight.shape,) and f"model.{renamed(n)}" in names), None
    )
    if (factor := getattr(part, "scalar_embed_scale", None)) is not None:  # of Gemma, which no file holds
        part.embed_scale = torch.tensor(factor, device=device)
    if name is None or any(buffer.is_meta for buffer in part.buffers()) or len(list(part.parameters())) != 1:
        raise ConfigError(f"the target {checkpoint.path!r} has a {type(part).__name__} that heads cannot share")
    weight = files.read([name])[name] if plain is None else plain.read(name, dtype)
    weight = weight.to(device=device, dtype=dtype)
    part.load_state_dict({"weight": weight}, assign=True)
    out: nn.Module = part.requires_grad_(False)
    return out
