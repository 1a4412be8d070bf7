"""Checkpoints of trained heads, in the formats that are published for each kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from paceline.config.methods import HEADS
from paceline.config.methods.entry import function
from paceline.drafters.heads.eagle import PEagle
from paceline.drafters.heads.exit_adapter import MODEL_TYPE as EXIT_TYPE
from paceline.drafters.heads.stream_head import MODEL_TYPE as STREAMS_TYPE
from paceline.drafters.training.draft_model import DraftModel
from paceline.drafters.training.kinds import TrainableHead, block_values, eagle_values, logits_form, mask_token


def write_head(head: TrainableHead, folder: Path, source: str) -> None:
    """Writes config.json and the weights in bfloat16, and rounds the module to what it has written.

    ``source``: path or id of the target, named in the configuration.
    """
    for parameter in head.parameters:  # not the buffers: rotary frequencies are not written
        parameter.data.copy_(parameter.data.bfloat16())
    if isinstance(head.module, DraftModel):
        head.module.save(folder)
        return
    config, tensors, name = function(HEADS[head.form.kind].write)(head, source)
    folder.mkdir(parents=True, exist_ok=True)
    kept = {
        key: (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous().cpu()
        for key, value in tensors.items()
    }
    path = folder / f"{name}.safetensors"
    save_file(kept, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library leaves it to its owner alone
    config["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


Written = tuple[dict[str, Any], dict[str, Tensor], str]


def write_medusa(head: TrainableHead, source: str) -> Written:
    """Medusa 1 with LM heads of their own, else Medusa 2."""
    config = {
        "model_type": "medusa",
        "base_model_name_or_path": source,
        "medusa_num_heads": head.form.depths,
        "medusa_num_layers": 1,
    }
    return config, head.module.state_dict(), "medusa_lm_head"


def write_mlp(head: TrainableHead, source: str) -> Written:
    """The file of fms-extras, tied tensors once."""
    size, vocab_size = _sizes(head.target)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab_size,
        "emb_dim": size,
        "inner_dim": head.form.inner_dim,
        "n_predict": head.form.depths,
        "top_k_tokens_per_head": [5, *[3] * (head.form.depths - 1)],
        "n_candidates": 5,
        "tie_weights": True,
        "scale_input": True,
    }
    tensors = {f"speculator.{name}": value.detach() for name, value in head.module.named_parameters()}
    return config, tensors, "model"


def write_mtp(head: TrainableHead, source: str) -> Written:
    """The keys of DeepSeek-V3: the module is layer N of a target of N layers."""
    config = head.target.config.get_text_config()
    prefix = f"model.layers.{config.num_hidden_layers}."
    names = {"block.": "", "norm.": "shared_head.norm.", "lm_head.": "shared_head.head."}
    tensors = {}
    for key, value in head.module.state_dict().items():
        if key == "d2t":
            tensors[key] = value
            continue
        inner = key.removeprefix("modules_by_depth.0.")
        for own, published in names.items():
            if inner.startswith(own):
                inner = published + inner.removeprefix(own)
        tensors[prefix + inner] = value
    return {**config.to_diff_dict(), "model_type": config.model_type, "num_nextn_predict_layers": 1}, tensors, "model"


def write_eagle(head: TrainableHead, source: str) -> Written:
    config = {**eagle_values(head.target), "architectures": ["LlamaForCausalLMEagle"], "bias": True}
    return config, head.module.state_dict(), "model"


def write_eagle3(head: TrainableHead, source: str) -> Written:
    """Returns tensors by SafeAILab's keys; P-EAGLE by the speculators library's, whose layers are numbered."""
    module, (_, vocab_size) = head.module, _sizes(head.target)
    tensors = {key.replace("layers.0.", "midlayer."): value for key, value in module.state_dict().items()}
    config = {
        **eagle_values(head.target),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": head.form.draft_vocab_size or vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [*head.boundaries], "use_aux_hidden_state": True},
    }
    if (target_ids := module.target_ids) is not None:
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[target_ids] = True
        tensors["t2d"] = t2d
    if isinstance(module, PEagle):
        tensors = {key.replace("midlayer.", "layers.0."): value for key, value in tensors.items()}
        config |= {"architectures": ["PEagleForCausalLM"], "pard_token": module.mask_token_id}
    return config, tensors, "model"


def write_block(head: TrainableHead, source: str) -> Written:
    """Returns tensors by the keys of z-lab's DFlash, DSpark's of DeepSpec; a layer id names the layer read."""
    form, config = head.form, head.target.config.get_text_config()
    scale, cap = logits_form(head.target)
    own: dict[str, Any] = {
        "mask_token_id": mask_token(head.target),
        "target_layer_ids": [boundary - 1 for boundary in head.boundaries],
    }
    if form.kind == "dspark":
        own |= {"architectures": ["Qwen3DSparkModel"], "block_size": form.depths}
        own |= {"markov_rank": form.rank, "markov_head_type": "vanilla"}
        own |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    else:
        own |= {"causal": True} if form.kind == "jetspec" else {}
        own = {"architectures": ["DFlashDraftModel"], "block_size": form.depths + 1, "dflash_config": own}
    values = {
        **block_values(form, head.target),
        **own,
        "num_target_layers": config.num_hidden_layers,
        **({} if scale == 1.0 else {"output_multiplier": scale}),
        **({} if cap is None else {"final_logit_softcapping": cap}),
    }
    return values, head.module.state_dict(), "model"


def write_exit(head: TrainableHead, source: str) -> Written:
    """Our own format (``exit_adapter.py``)."""
    module: Any = head.module
    config = {
        "architectures": ["ExitHead"],
        "model_type": EXIT_TYPE,
        "base_model_name_or_path": source,
        "num_target_layers": head.target.config.get_text_config().num_hidden_layers,
        "boundary": head.boundaries[0],
        "hidden_size": module.state_size,
        "inner_dim": module.gate_proj.out_features,
        "rms_norm_eps": module.norm.eps,
    }
    return config, module.state_dict(), "model"


def write_streams(head: TrainableHead, source: str) -> Written:
    """Our own format (``stream_head.py``)."""
    module: Any = head.module
    config = {
        "architectures": ["StreamHead"],
        "model_type": STREAMS_TYPE,
        "base_model_name_or_path": source,
        "num_target_layers": head.target.config.get_text_config().num_hidden_layers,
        "boundary": head.boundaries[0],
        "hidden_size": module.state_size,
        "vocab_size": _sizes(head.target)[1],
        "num_streams": module.num_streams,
        "rank": module.rank,
    }
    return config, module.state_dict(), "model"


def _sizes(target: PreTrainedModel) -> tuple[int, int]:
    """Width and vocabulary of a target."""
    lm_head = target.get_output_embeddings()
    return lm_head.in_features, lm_head.out_features
