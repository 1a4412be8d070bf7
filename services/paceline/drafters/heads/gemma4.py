"""Gemma 4's own drafters: a few layers without keys and values of their own, which attend to the target's.

Google publishes one for each target, ``google/gemma-4-*-it-assistant``. The reference is transformers' modules
``gemma4_assistant`` and ``gemma4_unified_assistant``, and its candidate generator for them::

    x = pre_projection([e; s])     e: the last token by the target's embedding; s: the target's state after its final
                                   norm, of the token before it, or the state of the depth before
    y = norm(layers(x))            layers of a type attend to the target's last layer of that type that has keys
    s' = post_projection(y)        the state of the next depth
    logits = lm_head(y)            or, with ordered embeddings, of the tokens of the likeliest clusters

All depths stand at the anchor's position and see the rows before the anchor, which the target has computed. A window of
W sees the last W + 1 of these rows: the reference counts from the last row, both ends included.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, PretrainedConfig

from paceline.drafters.heads.layers import attend_with_ours
from paceline.drafters.heads.module import Attend, Function, HeadModule, borrowed
from paceline.drafters.heads.reading import HeadForm, Reading, later, matched_tensors, valid
from paceline.errors import ConfigError
from paceline.model.features import OUT
from paceline.model.local_config import read_config

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types of the drafters. Without the last word, they are the model types of the targets."""
_NESTED = {"global_head_dim", "num_global_key_value_heads", "per_layer_config"}
"""Keys of a text configuration that its class takes without having them."""
_KEYS = {"text_config", "backbone_hidden_size", "use_ordered_embeddings", "num_centroids"}
_KEYS |= {"centroid_intermediate_top_k", "tie_word_embeddings"}
_UNUSED_KEYS = {f"{name}_token_id" for name in ("pad", "bos", "eos", "boi", "eoi", "boa", "eoa", "image", "audio")}
_UNUSED_KEYS |= {"video_token_id", "eoa_token_index", "initializer_range"}
"""Keys of a configuration that are the target's, and of use to no drafter."""
_UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")
"""Parts of an attention that has no keys and values of its own, which some files hold all the same."""
_ROWS_AT_ONCE = 16
"""Rows whose clusters' embeddings are gathered together: 2 MiB each at the published sizes, in bfloat16."""


class Gemma4Drafter(HeadModule):
    """One drafter. Its state is [y; s'], ``[..., hidden + target hidden]``; of the target's own state y is 0."""

    on_target = True
    keyless = True

    def __init__(
        self, config: Any, target_layers: Mapping[str, int], *, embed: Function, own_head: bool, what: str
    ) -> None:
        """Makes the module.

        Args:
            config: of the drafter, as transformers has it.
            target_layers: of each type of layer, the target's layer whose keys and values are seen.
            embed: of the target: ids -> [..., target hidden].
            own_head: its LM head is no embedding of clusters.
            what: the drafter, in messages.
        """
        super().__init__()
        text = config.get_text_config()
        size, backbone, self._what = int(text.hidden_size), int(config.backbone_hidden_size), what
        self.model: Any = attend_with_ours(_decoder(text))
        del self.model.embed_tokens
        self._size, self.state_size, self._kinds = size, size + backbone, list(text.layer_types)
        self._text, self._rotary_class = text, type(self.model.rotary_emb)
        self._kv: dict[str, tuple[int, int]] = {}
        for layer, kind in zip(self.model.layers, self._kinds, strict=True):
            layer.self_attn.layer_idx = target_layers[kind]  # by which its rows are looked up
            groups, dim = layer.self_attn.num_key_value_groups, layer.self_attn.head_dim
            self._kv[kind] = text.num_attention_heads // groups, dim  # heads and width of its keys
        self.pre_projection: Any = nn.Linear(2 * backbone, size, bias=False)
        self.post_projection: Any = nn.Linear(size, backbone, bias=False)
        self._embed, self.clusters = borrowed(embed), None if own_head else int(config.centroid_intermediate_top_k)
        if own_head:
            self.lm_head = nn.Linear(size, text.vocab_size, bias=False)
            return
        self.embed_tokens = nn.Embedding(text.vocab_size, size)
        self.masked_embedding: Any = nn.Module()
        self.masked_embedding.centroids = nn.Linear(size, config.num_centroids, bias=False)
        self.masked_embedding.token_ordering = nn.Buffer(torch.zeros(text.vocab_size, dtype=torch.long))

    def materialize(self, device: torch.device) -> None:
        """Makes the rotary embedding. Raises ConfigError if the clusters are no partition of the vocabulary."""
        self.model.rotary_emb = self._rotary_class(self._text).to(device)
        if self.clusters is not None:
            order = self.masked_embedding.token_ordering.cpu().long()
            if not torch.equal(order.sort().values, torch.arange(len(order))):
                raise ConfigError(
                    f"masked_embedding.token_ordering of {self._what} must name each of {len(order)} tokens once"
                )

    def fuse(self, states: Tensor) -> Tensor:
        """Returns zeros followed by the state ``OUT``."""
        return torch.cat([states.new_zeros(*states.shape[:-1], self._size), states], -1)

    def step(self, token_ids: Tensor, state: Tensor, positions: Tensor, attend: Attend, depth: int) -> Tensor:
        """Returns the next state. ``positions``: positions of the anchors."""
        assert self._embed is not None
        x = self.pre_projection(torch.cat([self._embed(token_ids).to(state.dtype), state[..., self._size :]], -1))
        none = {kind: (x.new_empty(1, heads, 0, dim),) * 2 for kind, (heads, dim) in self._kv.items()}
        angles = {kind: self.model.rotary_emb(x, positions, kind) for kind in none}
        for layer, kind in zip(self.model.layers, self._kinds, strict=True):
            x = layer(
                x,
                shared_kv_states=none,
                position_embeddings=angles[kind],
                attention_mask=None,
                position_ids=positions,
                attend=partial(attend_before, attend),
            )
        y: Tensor = self.model.norm(x)
        return torch.cat([y, self.post_projection(y)], -1)

    def logits(self, state: Tensor, depth: int) -> Tensor:
        """[..., vocabulary]; -inf for the tokens of clusters that were not chosen."""
        y = state[..., : self._size]
        if self.clusters is None:
            out: Tensor = self.lm_head(y)
            return out
        rows = y.reshape(-1, self._size)
        return torch.cat([self.logits_of_clusters(part) for part in torch.split(rows, _ROWS_AT_ONCE)]).view(
            *y.shape[:-1], -1
        )

    def logits_of_clusters(self, y: Tensor) -> Tensor:
        """[n, vocabulary] of rows [n, hidden]."""
        parts = self.masked_embedding
        assert self.clusters is not None
        best = parts.centroids(y).topk(self.clusters, dim=-1).indices
        tokens = parts.token_ordering.long().view(parts.centroids.out_features, -1)[best].flatten(1)
        scores = (self.embed_tokens.weight[tokens] @ y[:, :, None]).squeeze(-1)
        out = y.new_full((len(y), self.embed_tokens.num_embeddings), float("-inf"))
        return out.scatter_(1, tokens, scores)


def attend_before(
    attend: Attend, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
) -> Tensor:
    """Calls ``attend`` from the anchor's position, one after the last row: a window of W + 1 rows is W + 2
    positions.
    """
    return attend(layer, query, key, value, scaling, None if window is None else window + 2)


def _decoder(text: Any) -> Any:
    """The layers of a drafter by its text configuration. transformers 5.23 asks for a layer that keeps the keys and
    values of each type, which no drafter has; the releases before and its own drafters' modules do not."""
    made, kind = copy.deepcopy(text), type(text)
    reuse = property(lambda config: ["reuse"] * config.num_hidden_layers)
    made.__class__ = type(kind.__name__, (kind,), {"kv_sharing_modes": reuse, "__module__": kind.__module__})
    return MODEL_MAPPING[kind](made)


def read_gemma4(reading: Reading) -> HeadForm:
    """The drafter of a checkpoint. Raises ConfigError if it cannot draft for its target."""
    kind = reading.config.get("model_type")
    if kind not in KINDS:
        raise ConfigError(f"model_type is {kind!r} in {reading.what}: {' and '.join(map(repr, KINDS))} are allowed")
    family = str(kind).removesuffix("_assistant")
    theirs = reading.facts.checkpoint.config.get("model_type")
    if theirs not in (family, f"{family}_text"):
        raise ConfigError(
            f"model_type of the target {reading.target!r} is {theirs!r}: {reading.what} drafts from the keys and "
            f"values of a {family!r}"
        )
    config = _config(reading, str(kind))
    text: Any = config.get_text_config()
    reading.require_equal("backbone_hidden_size", reading.integer("backbone_hidden_size"), reading.facts.hidden_size)
    reading.require_equal("vocab_size", int(text.vocab_size), reading.facts.vocab_size)
    own_head = not config.use_ordered_embeddings
    if not own_head and (
        text.vocab_size % config.num_centroids or not 1 <= config.centroid_intermediate_top_k <= config.num_centroids
    ):
        raise ConfigError(
            f"num_centroids is {config.num_centroids} and centroid_intermediate_top_k "
            f"{config.centroid_intermediate_top_k} in {reading.what}: the first must divide the {text.vocab_size} "
            "tokens and the second be at most the first"
        )
    target: Any = read_config(reading.facts.checkpoint).get_text_config()
    layers = target_layers_of(reading, text, target)
    try:
        module = Gemma4Drafter(config, layers, embed=later, own_head=own_head, what=reading.what)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{reading.what} has layers that cannot be made ({type(error).__name__}: {error})") from error
    tied = "lm_head.weight" not in reading.keys or config.tie_word_embeddings
    table = "lm_head.weight" if own_head else "embed_tokens.weight"
    source = "model.embed_tokens.weight" if tied and "model.embed_tokens.weight" in reading.keys else "lm_head.weight"

    def rename(key: str) -> str | None:
        if key in ("model.embed_tokens.weight", "lm_head.weight"):
            return table if key == source else None
        parts = key.split(".")
        return None if len(parts) > 1 and parts[-3:-1] == ["self_attn", parts[-2]] and parts[-2] in _UNUSED else key

    names, experts = matched_tensors(reading, module, rename, lambda name: source if name == table else name)
    return HeadForm(module, (OUT,), names, experts)


def _config(reading: Reading, kind: str) -> PretrainedConfig:
    """The configuration of a drafter, all of whose keys are known."""
    reading.require_config({*PretrainedConfig().to_dict(), *_KEYS, *_UNUSED_KEYS})
    values = reading.config.get("text_config")
    if not isinstance(values, dict):
        raise ConfigError(f"text_config is {values!r} in {reading.what}: the configuration of its layers is needed")
    with torch.device("cpu"):
        known = {*AutoConfig.for_model("gemma4_text").to_dict(), *_NESTED}
    reading.nested("text_config", values).require_config(known)
    config = valid(reading, lambda: AutoConfig.for_model(**reading.config))
    text: Any = config.get_text_config()
    wrong = [name for name in ("hidden_size_per_layer_input", "enable_moe_block") if getattr(text, name, None)]
    if wrong or text.num_kv_shared_layers != text.num_hidden_layers:
        name = wrong[0] if wrong else "num_kv_shared_layers"
        raise ConfigError(
            f"{name} is {getattr(text, name)!r} in text_config of {reading.what}: its layers have no keys and values, "
            "no experts and no embeddings of their own"
        )
    return config


def target_layers_of(reading: Reading, text: Any, target: Any) -> dict[str, int]:
    """The target's last layer of each type that has keys and values, which must be as the drafter's layers take them.

    A target's layers beyond those (``num_kv_shared_layers``) see the same rows.
    """
    kept = target.layer_types[: target.num_hidden_layers - (target.num_kv_shared_layers or 0)]
    last = {kind: index for index, kind in enumerate(kept)}
    for index, kind in enumerate(text.layer_types):
        if kind not in last:
            raise ConfigError(
                f"the target {reading.target!r} has no layer of type {kind!r}, which {reading.what} needs"
            )
        own, theirs = text.per_layer_config[index], target.per_layer_config[last[kind]]
        for name in ("head_dim", "num_key_value_heads"):
            if getattr(own, name) != getattr(theirs, name):
                raise ConfigError(
                    f"{name} of layers of type {kind!r} is {getattr(own, name)} in {reading.what}: the target "
                    f"{reading.target!r} has {getattr(theirs, name)}"
                )
    return last
