"""The heads that can be trained: their modules, their first weights, and their checkpoints in the published formats.

A head begins as close to the target as its form allows. Where its layer is a copy of the target's last one, the
projection in front is fitted by least squares to that layer's true input at the next position. This closed form takes
one pass over a few thousand tokens and saves the first thousand steps of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.checkpoint.tokenizer import Tokenizer
from paceline.config.methods import HEADS
from paceline.config.methods.entry import function
from paceline.drafters.heads.block import BlockForm, BlockHead
from paceline.drafters.heads.eagle import Eagle, Eagle3, Eagle3Form, PEagle
from paceline.drafters.heads.exit_adapter import ExitAdapter
from paceline.drafters.heads.layers import eagle_config
from paceline.drafters.heads.medusa import Medusa
from paceline.drafters.heads.mlp import MLPSpeculator
from paceline.drafters.heads.module import Function, HeadModule
from paceline.drafters.heads.mtp import Mtp
from paceline.drafters.heads.partial_model import Continued, borrow, layers_from
from paceline.drafters.heads.stream_head import StreamHead, linears_of
from paceline.drafters.training.draft_model import DraftModel, first_layers, vocabulary_of
from paceline.drafters.training.features import OUT, FeatureCache, Row, states
from paceline.drafters.training.options import BLOCKS, DRAFT_MODEL, HeadForm
from paceline.errors import ConfigError

_FIT_TOKENS = 16_384
_MOST_BOUNDARIES = 5
"""States that a block head reads, as published ones do."""
_OF_TARGET_LAYERS = {"early_exit": "below", "speculative_streaming": "from"}
"""Kinds that draft with layers of the target -> on which side of the boundary these are."""
_DECAY = 0.02
"""Ridge of the least squares, as a share of the mean square of a feature."""


@dataclass(frozen=True, slots=True)
class TrainableHead:
    """A module, and what it is trained on."""

    form: HeadForm
    module: HeadModule
    boundaries: tuple[int, ...]
    target: PreTrainedModel

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Module to train."""
        return [p for p in self.module.parameters() if p.requires_grad]

    @property
    def num_parameters(self) -> int:
        """Trained parameters."""
        return sum(p.numel() for p in self.parameters)


def boundaries_of(form: HeadForm, num_layers: int) -> tuple[int, ...]:
    """The boundaries that a head reads.

    Raises:
        ConfigError: one is outside the model, or the head reads the last state alone.
    """
    least, last = 0, num_layers - 1
    if form.kind in BLOCKS:
        first, others = min(2, last), max(num_layers - 4, 0)
        default = {min(first + round(i * others / (_MOST_BOUNDARIES - 1)), last) for i in range(_MOST_BOUNDARIES)}
        least = 1  # its format names layers whose output is read
    elif form.kind in _OF_TARGET_LAYERS:
        if len(form.boundaries) != 1:
            raise ConfigError(f"--boundary is missing: name one, the layers {_OF_TARGET_LAYERS[form.kind]} it draft")
        default, least = set(), 1
    elif form.kind in ("eagle3", "peagle"):
        default = {min(2, last), num_layers // 2, max(num_layers - 3, 0)}
    elif form.boundaries:
        raise ConfigError(f"--boundaries is given: {form.kind} reads the last state alone")
    elif form.kind == DRAFT_MODEL:
        return ()
    else:
        return (OUT,)
    chosen = form.boundaries or tuple(sorted(default))
    if outside := [b for b in chosen if not least <= b < num_layers]:
        raise ConfigError(f"--boundaries is {outside[0]}: it must be from {least} to {last}, the target's layers")
    return chosen


def make_head(
    form: HeadForm,
    target: PreTrainedModel,
    cache: FeatureCache,
    num_fitted: int = _FIT_TOKENS,
    *,
    tokenizer: Tokenizer | None = None,
) -> TrainableHead:
    """A head with its first weights, float32 on the target's device. ``num_fitted``: tokens of the least squares;
    ``tokenizer``: of the target, which a draft model needs."""
    config = target.config.get_text_config()
    boundaries = boundaries_of(form, config.num_hidden_layers)
    torch.manual_seed(0)
    with torch.no_grad():
        fit = Fit(target, cache, boundaries, num_fitted)
        if form.kind == DRAFT_MODEL:
            assert tokenizer is not None
            module: HeadModule = _draft_model(form, target, fit, tokenizer)
        else:
            module = function(HEADS[form.kind].make)(form, target, fit)
    return TrainableHead(form, module.float().to(target.device).train(), boundaries, target)


class Fit:
    """Least squares on the first rows of the features."""

    def __init__(
        self, target: PreTrainedModel, cache: FeatureCache, boundaries: Sequence[int], num_tokens: int
    ) -> None:
        self.target, self.cache, self.boundaries, self.num_tokens = target, cache, boundaries, num_tokens

    def _rows(self) -> list[Row]:
        count = min(self.cache.rows.num_rows, max(1, self.num_tokens // self.cache.rows.length))
        return [self.cache.read(row, self.boundaries or (OUT,)) for row in range(count)]

    def frequent_tokens(self, count: int) -> Tensor:
        """[count] int64: the most frequent tokens of the rows, by id."""
        counts = self.cache.counts(self.target.get_output_embeddings().out_features)
        return counts.argsort(descending=True, stable=True)[:count].sort().values

    def mean_state(self) -> Tensor:
        """[width]: the mean of what the head reads."""
        return torch.cat([row.states[: row.num_tokens] for row in self._rows()]).float().mean(0)

    def to_boundary(
        self, features: Callable[[Tensor, Tensor], Tensor], boundary: int, *, less_own: bool = False
    ) -> Tensor:
        """The linear map ``[hidden, width]`` from features to the state of the next position at a boundary.

        Args:
            features: (tokens at P + 1 [n, length], states of P [n, length, .]) -> [n, length, width].
            boundary: of the state.
            less_own: what that state has more than the one of P is fitted, which the head reads.
        """
        rows, device = self._rows(), self.target.device
        token_ids = torch.stack([row.token_ids for row in rows])
        wanted = states(self.target, token_ids, (boundary,))[0][:, 1:]
        own = torch.stack([row.states for row in rows])[:, :-1].to(device).float()
        ends = torch.tensor([row.num_tokens for row in rows])
        inside = torch.arange(1, token_ids.shape[1]) < ends[:, None]
        x = features(token_ids[:, 1:].to(device), own)[inside.to(device)].double()
        y = wanted[inside].to(device).double()
        if less_own:
            y = y - own[inside.to(device)].double()
        gram = x.T @ x
        gram += _DECAY * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=device)
        found: Tensor = torch.linalg.solve(gram, x.T @ y).T.float()
        return found


def _shared(target: PreTrainedModel) -> tuple[Function, Function]:
    """The target's embedding and LM head as functions: they are no parameters of the head."""
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    return lambda ids: embedding(ids), lambda x: lm_head(x.to(lm_head.weight.dtype))


def _last_layer(target: PreTrainedModel) -> tuple[Any, Any]:
    """The target's last layer and its final norm."""
    decoder = target.get_decoder()
    if not hasattr(decoder, "layers") or not hasattr(decoder, "norm"):
        raise ConfigError(f"{type(decoder).__name__} has no layers and norm by these names: train another kind of head")
    return decoder.layers[-1], decoder.norm


def _copy(to: nn.Module, source: nn.Module) -> None:
    """Copies the parameters that both have under one name and in one shape."""
    theirs = source.state_dict()
    own = to.state_dict()
    to.load_state_dict(
        own | {name: value for name, value in theirs.items() if name in own and own[name].shape == value.shape}
    )


def make_medusa(form: HeadForm, target: PreTrainedModel, fit: Fit) -> HeadModule:
    lm_head = target.get_output_embeddings()
    size, vocab_size = lm_head.in_features, lm_head.out_features
    if not form.own_lm_head:
        return Medusa(size, form.depths, lm_head=_shared(target)[1])
    module = Medusa(size, form.depths, vocab_size=vocab_size)
    for depth in range(form.depths):
        own: Any = module.get_submodule(f"{depth}.1")
        own.weight.copy_(lm_head.weight)
    return module


def make_mlp(form: HeadForm, target: PreTrainedModel, fit: Fit) -> HeadModule:
    lm_head, embedding = target.get_output_embeddings(), target.get_input_embeddings()
    size, vocab_size = lm_head.in_features, lm_head.out_features
    inner = form.inner_dim or size
    module: Any = MLPSpeculator(vocab_size, size, form.depths, form.inner_dim, tie_weights=True, scale_input=True)
    if inner == size:
        module.head[0].weight.copy_(lm_head.weight)
        module.emb[0].weight.copy_(embedding.weight / embedding.weight.float().std() / inner**0.5)
        for projection in module.proj:
            projection.weight.copy_(torch.eye(size))
    made: HeadModule = module
    return made


def make_mtp(form: HeadForm, target: PreTrainedModel, fit: Fit) -> HeadModule:
    """Makes a projection that guesses the input of the target's last layer, then that layer and the final norm."""
    config = target.config.get_text_config()
    (embed, lm_head), (layer, norm) = _shared(target), _last_layer(target)
    target_ids = fit.frequent_tokens(form.draft_vocab_size) if form.draft_vocab_size else None
    own_lm_head = None if target_ids is None else target.get_output_embeddings().weight[target_ids]
    module = Mtp(
        config,
        target.get_decoder(),
        1,
        embed=embed,
        lm_head=lm_head if own_lm_head is None else None,
        target_ids=target_ids,
    )
    if own_lm_head is not None:
        module.lm_head.weight.copy_(own_lm_head)
    first: Any = module.modules_by_depth[0]
    _copy(first.block, layer)
    _copy(first.norm, norm)

    def features(token_ids: Tensor, own: Tensor) -> Tensor:
        return torch.cat([first.enorm(embed(token_ids).float()), first.hnorm(own)], -1)

    first.to(target.device)
    first.eh_proj.weight.copy_(fit.to_boundary(features, config.num_hidden_layers - 1))
    return module


def make_eagle(form: HeadForm, target: PreTrainedModel, fit: Fit) -> HeadModule:
    """A projection that guesses the target's next state, and a layer that adds nothing yet."""
    (embed, lm_head), (layer, _) = _shared(target), _last_layer(target)
    module = Eagle(eagle_config(eagle_values(target)), embed=embed, lm_head=lm_head)
    first: Any = module.layers[0]
    _copy(first, layer)
    first.self_attn.o_proj.weight.zero_()
    first.mlp.down_proj.weight.zero_()

    def features(token_ids: Tensor, own: Tensor) -> Tensor:
        return torch.cat([embed(token_ids).float(), own], -1)

    module.fc.weight.copy_(fit.to_boundary(features, OUT))
    module.fc.bias.zero_()
    return module


def make_eagle3(form: HeadForm, target: PreTrainedModel, fit: Fit) -> HeadModule:
    """Makes a projection that guesses the last layer's input, then that layer, which also sees the next token."""
    config, lm_head = target.config.get_text_config(), target.get_output_embeddings()
    (embed, _), (layer, norm) = _shared(target), _last_layer(target)
    size = config.hidden_size
    target_ids = fit.frequent_tokens(form.draft_vocab_size) if form.draft_vocab_size else None
    options: dict[str, Any] = {
        "form": Eagle3Form(num_boundaries=len(fit.boundaries)),
        "draft_vocab_size": form.draft_vocab_size or lm_head.out_features,
        "embed": embed,
        "target_ids": target_ids,
    }
    made = eagle_config(eagle_values(target))
    module: Eagle3
    if form.kind == "peagle":
        module = PEagle(made, mask_token_id=mask_token(target), depths=form.depths, **options)
        module.mask_hidden.copy_(fit.mean_state().view(1, 1, -1))
    else:
        module = Eagle3(made, **options)
    first: Any = module.layers[0]
    _copy(first, layer)
    for name in ("q_proj", "k_proj", "v_proj"):
        wide, narrow = getattr(first.self_attn, name), getattr(getattr(layer, "self_attn", None), name, None)
        if narrow is not None and narrow.weight.shape == (wide.out_features, size):
            wide.weight[:, size:] = narrow.weight
    if hasattr(layer, "input_layernorm"):
        _copy(first.hidden_norm, layer.input_layernorm)
    _copy(module.norm, norm)
    module.lm_head.weight.copy_(lm_head.weight if target_ids is None else lm_head.weight[target_ids])
    module.fc.weight.copy_(fit.to_boundary(lambda _, own: own, config.num_hidden_layers - 1))
    return module


def make_block(form: HeadForm, target: PreTrainedModel, fit: Fit) -> HeadModule:
    """Copies of the target's last layers, over a context that is fitted to what the last one reads."""
    (embed, lm_head), (_, norm) = _shared(target), _last_layer(target)
    config, values = target.config.get_text_config(), block_values(form, target)
    scale, cap = logits_form(target)
    made = BlockForm(
        target_width=len(fit.boundaries) * config.hidden_size,
        mask_token_id=mask_token(target),
        num_tokens=form.depths,
        first_row=0 if form.kind == "dspark" else 1,
        windows=(None,) * form.num_layers,
        causal=(form.kind == "jetspec",) * form.num_layers,
        logit_scale=scale,
        logit_cap=cap,
        markov=form.rank if form.kind == "dspark" else None,
        confidence=form.kind == "dspark",
    )
    vocab_size = target.get_output_embeddings().out_features
    module = BlockHead(
        eagle_config(values), made, vocab_size=vocab_size, draft_vocab_size=None, embed=embed, lm_head=lm_head
    )
    for own, layer in zip(reversed(module.layers), reversed(target.get_decoder().layers), strict=False):
        _copy(own, layer)
    _copy(module.norm, norm)
    module.fc.weight.copy_(fit.to_boundary(lambda _, own: own, config.num_hidden_layers - 1))
    if made.markov is not None:  # the chain adds nothing yet, and every token is as likely accepted as not
        for linear in (module.markov_head.markov_w2, module.confidence_head.proj):
            linear.weight.zero_()
        module.confidence_head.proj.bias.zero_()
    return module


def make_exit(form: HeadForm, target: PreTrainedModel, fit: Fit) -> HeadModule:
    """An adapter that changes nothing yet: the exit as it is without one."""
    size = target.get_output_embeddings().in_features
    norm, teacher = _last_layer(target)[1], teacher_of(target)
    eps = float(getattr(target.config.get_text_config(), "rms_norm_eps", None) or 1e-6)
    return ExitAdapter(size, form.inner_dim or size, eps, lambda state: teacher(norm(state.to(target.dtype))))


def make_streams(form: HeadForm, target: PreTrainedModel, fit: Fit) -> HeadModule:
    """Streams that add nothing to the target's last layers yet, and of the anchor what its next state has of it."""
    own = Continued(borrow(partial(layers_from, fit.boundaries[0]), target))
    size = target.get_output_embeddings().in_features
    module = StreamHead(linears_of(own.layers, "the target"), size, form.depths, form.rank, form.depths)
    u, scale, v = torch.linalg.svd(
        fit.to_boundary(lambda ids, _: own.embed(ids).float(), fit.boundaries[0], less_own=True)
    )
    root = scale[: form.rank].sqrt()
    module.anchor.up.weight[:, : len(root)] = u[:, : form.rank] * root
    module.anchor.down.weight[: len(root)] = v[: form.rank] * root[:, None]
    module.run_on(own)
    return module


def _draft_model(form: HeadForm, target: PreTrainedModel, fit: Fit, tokenizer: Tokenizer) -> HeadModule:
    """The target's first layers; its LM head reads what least squares make of their state of the target's last one."""
    size = form.draft_vocab_size
    frequent = None if size is None else fit.frequent_tokens(size).tolist()
    vocabulary = vocabulary_of(tokenizer, target.get_output_embeddings().out_features, frequent)
    model = first_layers(target, vocabulary, form.num_layers).to(target.device)

    def features(token_ids: Tensor, _: Tensor) -> Tensor:
        state: Tensor = model.get_decoder()(vocabulary.read_as[token_ids.cpu()].to(token_ids.device)).last_hidden_state
        return state

    lm_head = model.get_output_embeddings()
    lm_head.weight.copy_(lm_head.weight @ fit.to_boundary(features, OUT))
    return DraftModel(model, vocabulary)


def logits_form(target: PreTrainedModel) -> tuple[float, float | None]:
    """The factor of the logits of a target's LM head, and their soft cap."""
    config = target.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, getattr(config, "final_logit_softcapping", None)


def teacher_of(target: PreTrainedModel) -> Function:
    """States after the final norm -> logits, as the target's own class makes them: LM head, scale and soft cap."""
    lm_head, (scale, cap) = target.get_output_embeddings(), logits_form(target)

    def logits(out: Tensor) -> Tensor:
        found: Tensor = lm_head(out.to(lm_head.weight.dtype)) * scale
        return found if cap is None else cap * torch.tanh(found / cap)

    return logits


def mask_token(target: PreTrainedModel) -> int:
    """The token that stands for unknown ones in P-EAGLE: padding, else the end of text, else the last token."""
    config = target.config.get_text_config()
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value >= 0:
            return value
    return int(config.vocab_size) - 1


def block_values(form: HeadForm, target: PreTrainedModel) -> dict[str, Any]:
    """The layers of a block head in its config.json: of the Qwen 3 family, as wide as the target's."""
    return {**eagle_values(target), "model_type": "qwen3", "num_hidden_layers": form.num_layers}


def eagle_values(target: PreTrainedModel) -> dict[str, Any]:
    """The layer of an EAGLE head in its config.json: of the Llama family, as wide as the target's."""
    config = target.config.get_text_config()
    heads = config.num_attention_heads
    values = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": getattr(config, "hidden_act", None) or "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "vocab_size": target.get_output_embeddings().out_features,
        "attention_bias": bool(getattr(config, "attention_bias", False)),
        "tie_word_embeddings": False,
    }
    if (rope := getattr(config, "rope_parameters", None)) is not None:
        values["rope_parameters"] = dict(rope)
    return values
