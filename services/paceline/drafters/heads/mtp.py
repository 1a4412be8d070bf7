"""Multi-token prediction: decoder layers that come with the target, trained together with it.

DeepSeek-V3 (arXiv:2412.19437, section 2.2): ``x = eh_proj([rms(e); rms(h)])`` with h the target's state *after* its
final norm, ``h' = rms(Block(x))``, logits by the target's LM head. What is recycled is h', after the norm. GLM-4.5 has
the same keys; Qwen calls them ``mtp.fc``, ``mtp.pre_fc_norm_embedding``, ``mtp.pre_fc_norm_hidden`` and ``mtp.norm``.
Block is a decoder layer of the target's own class, latent attention and experts included; of Nemotron-H it is several
layers, one with attention and one with experts (``mtp_layers_block_type``).

Modules of DeepSeek V4 take and recycle all residual streams, before they are collapsed: ``x_s = e_proj(rms(e)) +
h_proj(rms(h_s))`` of each stream s, ``h' = Block(x)``, logits of ``rms(collapse(h'))`` (inference/model.py of the
published checkpoints). Their attention has a window alone.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.compressed import SLIDING, num_streams
from paceline.checkpoint.mtp import mtp_parts
from paceline.drafters.heads.layers import offsets, with_our_attention
from paceline.drafters.heads.module import Attend, Function, HeadModule, borrowed
from paceline.model.attention.compressed import shares_keys
from paceline.model.attention.latent import adopt_latents, keeps_latents
from paceline.model.kv_cache import LayerSpec


class Parts(nn.Module):
    """Layers of Nemotron-H, one after the other."""

    def __init__(self, config: Any, indices: range, layer_class: Any) -> None:
        super().__init__()
        self.parts: Any = nn.ModuleList([layer_class(config, index) for index in indices])

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """The state behind the last one."""
        for part in self.parts:
            x = part(x, **options)
        return x


class MtpModule(nn.Module):
    """One depth's projection, decoder layer and norm."""

    def __init__(self, config: Any, indices: range, layer_class: Any, norm_class: Any) -> None:
        """``indices``: of its layers; ``layer_class``, ``norm_class``: the classes of the target's layers and norms."""
        super().__init__()
        size, eps = config.hidden_size, getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.enorm, self.hnorm = norm_class(size, eps=eps), norm_class(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = layer_class(config, indices[0]) if len(indices) == 1 else Parts(config, indices, layer_class)
        self.norm = norm_class(size, eps=eps)

    def forward(self, embedded: Tensor, state: Tensor, rotary: Any, positions: Tensor, attend: Attend) -> Tensor:
        """The state after the norm."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], -1))
        x = self.block(x, attention_mask=None, position_ids=positions, position_embeddings=rotary, attend=attend)
        out: Tensor = self.norm(x[0] if isinstance(x, tuple) else x)
        return out

    def collapse(self, state: Tensor) -> Tensor:
        """The state as the LM head reads it: as it is."""
        return state


class StreamsModule(nn.Module):
    """One depth of DeepSeek V4, whose state is all residual streams ``[..., hc_mult * hidden]``."""

    def __init__(self, config: Any, index: int, decoder: Any) -> None:
        """``index``: of its layer; ``decoder``: the target's, for its classes."""
        super().__init__()
        size, eps, norm = config.hidden_size, config.rms_norm_eps, type(decoder.norm)
        self.enorm, self.hnorm, self.norm = norm(size, eps=eps), norm(size, eps=eps), norm(size, eps=eps)
        self.e_proj, self.h_proj = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.block, self.hc_head = type(decoder.layers[-1])(config, index), type(decoder.hc_head)(config)

    def forward(self, embedded: Tensor, state: Tensor, rotary: Any, positions: Tensor, attend: Attend) -> Tensor:
        """All streams after the layer."""
        streams = state.view(*embedded.shape[:-1], -1, embedded.shape[-1])
        x = self.e_proj(self.enorm(embedded)).unsqueeze(-2) + self.h_proj(self.hnorm(streams))
        x = self.block(x, attention_mask=None, position_ids=positions, position_embeddings=rotary, attend=attend)
        out: Tensor = x.flatten(-2)
        return out

    def collapse(self, state: Tensor) -> Tensor:
        """The state as the LM head reads it."""
        streams = state.reshape(1, -1, self.hc_head.hc_mult, self.norm.weight.shape[0])
        out: Tensor = self.norm(self.hc_head(streams))
        return out.view(*state.shape[:-1], -1)


class Mtp(HeadModule):
    """The MTP modules of a target: depth k takes module k, deeper ones the last, recycled."""

    def __init__(
        self,
        config: Any,
        decoder: Any,
        num_modules: int,
        *,
        embed: Function | None,
        lm_head: Function | None,
        target_ids: Tensor | None = None,
    ) -> None:
        """Makes the modules.

        Args:
            config: the target's text configuration, which is not changed.
            decoder: the target's decoder (``get_decoder``), for the classes of its layers.
            num_modules: modules, at least one.
            embed: of the target: ids -> [..., hidden]; None: an embedding of its own.
            lm_head: of the target; None: one of its own.
            target_ids: [draft vocabulary] int64 ids of the target, if its own LM head has fewer rows.
        """
        super().__init__()
        config = mtp_config(config, num_modules)
        layer_class, norm_class = type(decoder.layers[-1]), type(getattr(decoder, "norm", None) or decoder.norm_f)
        self.num_streams, self.num_variants = num_streams(config.to_dict()), num_modules
        self.state_size = self.num_streams * config.hidden_size
        num_parts = config.num_hidden_layers // num_modules
        each = [range(index * num_parts, (index + 1) * num_parts) for index in range(num_modules)]
        self.modules_by_depth: Any = nn.ModuleList(
            [MtpModule(config, indices, layer_class, norm_class) for indices in each]
            if self.num_streams == 1
            else [StreamsModule(config, index, decoder) for index in range(num_modules)]
        )
        for index, attention in enumerate(self._attentions()):
            attention.layer_idx = index
        adopt_latents(self)
        self._embed, self._lm_head = borrowed(embed), borrowed(lm_head)
        if embed is None:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if lm_head is None:
            num_rows = config.vocab_size if target_ids is None else len(target_ids)
            self.lm_head = nn.Linear(config.hidden_size, num_rows, bias=False)
        if target_ids is not None:
            self.register_buffer("d2t", offsets(target_ids))
        kind: Any = type(getattr(decoder, "rotary_emb", None))
        self.make_rotary = _NoRotation if kind is type(None) else partial(kind, config)  # Nemotron-H has no positions
        self.rotary = self.make_rotary()
        self.layers_kv = self._probe()

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        """The next state: after the module's norm, but for streams."""
        embedded = self.embed_tokens(token_ids) if self._embed is None else self._embed(token_ids)
        module = self.modules_by_depth[min(depth, self.num_variants - 1)]
        out: Tensor = module(embedded.to(state.dtype), state, self._angles(state, positions), positions, attend)
        return out

    def _angles(self, x: Tensor, positions: Tensor) -> Any:
        """The rotation as the layers take it."""
        if self.num_streams == 1:
            return self.rotary(x, positions)
        return {"main": self.rotary(x, positions, layer_type="main")}

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """[..., vocabulary]."""
        state = self.modules_by_depth[min(depth, self.num_variants - 1)].collapse(state)
        out: Tensor = self.lm_head(state) if self._lm_head is None else self._lm_head(state)
        return out

    def _attentions(self) -> list[Any]:
        """The attention of all modules, in their order."""
        found: list[Any] = []
        for module in self.modules_by_depth:
            block = module.block
            parts = (
                [part.mixer for part in block.parts if part.block_type == "full_attention"]
                if isinstance(block, Parts)
                else [block.self_attn]
            )
            found += parts
        return found

    def _probe(self) -> tuple[LayerSpec, ...]:
        """KV that each layer with attention keeps, found by running one token through it."""
        attentions = self._attentions()
        record = _Recording(attentions)
        weight = next(self.modules_by_depth.parameters())
        state = torch.zeros(1, 1, self.state_size // self.num_streams, dtype=weight.dtype, device=weight.device)
        positions = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
        angles = self._angles(state, positions)
        with torch.no_grad():
            for attention in attentions:
                attention(
                    hidden_states=state,
                    position_embeddings=angles,
                    position_ids=positions,
                    attention_mask=None,
                    attend=record,
                )
        return tuple(record.seen[index] for index in range(len(attentions)))


class _Recording:
    """Implements ``AttendSinks`` for a probe: attends to nothing, and notes what is kept."""

    def __init__(self, attentions: list[Any]) -> None:
        self.seen: dict[int, LayerSpec] = {}
        self._attentions = attentions

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """Notes the keys and values of a layer."""
        module = self._attentions[layer]
        values = 0 if keeps_latents(module) or shares_keys(module) else value.shape[3]
        self.seen[layer] = LayerSpec(key.shape[1], key.shape[3], values)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])

    def with_sinks(self, sinks: Tensor) -> Attend:
        """Implements ``AttendSinks``: they change nothing that is kept."""
        return self


class _NoRotation(nn.Module):
    """In the place of a rotary embedding, for attention without positions."""

    def forward(self, x: Tensor, positions: Tensor) -> None:
        """None."""


def mtp_config(config: Any, num_modules: int) -> Any:
    """A copy of the target's configuration whose layer k is MTP module k: of full attention, with experts if any."""
    config = copy.deepcopy(config)
    if config.model_type == "nemotron_h":
        config.layer_types = mtp_parts(config.to_dict()) * num_modules
        config._experts_implementation = "eager"
        return with_our_attention(config)
    config.num_hidden_layers = num_modules
    if num_streams(config.to_dict()) > 1:
        config.layer_types, config.mlp_layer_types = [SLIDING] * num_modules, ["moe"] * num_modules
        config._experts_implementation = "eager"
        return with_our_attention(config)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = ["full_attention"] * num_modules
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mlp_layer_types = ["sparse"] * num_modules
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    config._experts_implementation = "eager"
    return with_our_attention(config)
