"""MTP modules of latent attention and experts, against the ones that transformers makes of the same files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from paceline.checkpoint.files import Checkpoint
from paceline.drafters.heads.load import mtp_layers, open_head
from paceline.errors import ConfigError
from paceline.model.kv_cache import LayerSpec

LAYERS, SIZE, VOCAB = 2, 64, 301
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}


def made(family: str, num_modules: int) -> Any:
    common = _COMMON | {"num_nextn_predict_layers": num_modules}
    torch.manual_seed(0)
    if family == "deepseek_v3":
        latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}
        values = common | latent | {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "routed_scaling_factor": 1.0}
        return DeepseekV3ForCausalLM(DeepseekV3Config(**values)).eval()
    values = common | {"num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**values)).eval()


def write(family: str, num_modules: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a target with its MTP layers under the published names, and returns it as transformers loads it."""
    model = made(family, num_modules)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")

    def drawn(name: str, *shape: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(*shape) if "norm" in name else 0.2 * torch.randn(*shape)

    last = {name: tensor for name, tensor in tensors.items() if name.startswith(f"model.layers.{LAYERS - 1}.")}
    for index in range(LAYERS, LAYERS + num_modules):
        at = f"model.layers.{index}."
        for name, tensor in last.items():
            tensors[name.replace(f"model.layers.{LAYERS - 1}.", at)] = drawn(name, *tensor.shape)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{at}{name}.weight"] = drawn(name, SIZE)
        tensors[f"{at}eh_proj.weight"] = drawn("", SIZE, 2 * SIZE)
        tensors[f"{at}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{at}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    # transformers knows the MTP layers of these families by the number that the published models have.
    pattern = [rf"model\.layers\.{index}\..*" for index in range(LAYERS, LAYERS + num_modules)]
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", pattern)
    return type(model).from_pretrained(folder).eval()


@pytest.mark.parametrize("num_modules", [1, 2])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_mtp_modules_of_latent_attention_and_experts_are_those_of_transformers(
    family: str, num_modules: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(family, num_modules, tmp_path, monkeypatch)
    checkpoint = Checkpoint.open(str(tmp_path))
    assert mtp_layers(checkpoint) == num_modules
    module = open_head("mtp", None, checkpoint).load(torch.float32, torch.device("cpu")).module
    kept = LayerSpec(1, 32 + 16, 0) if family == "deepseek_v3" else LayerSpec(2, 16, 16)  # latents, as the target keeps
    assert module.layers_kv == (kept,) * num_modules
    reference = MtpModel.from_pretrained(model).eval()
    ids = torch.randint(3, VOCAB, (1, 12))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        states, decided = out.hidden_states[-1], out.logits[:, -1].argmax(-1, keepdim=True)
        drafted, logits, _ = reference(
            input_ids=torch.cat([ids[:, 1:], decided], 1),
            last_hidden_states=states,
            attention_mask=None,
            position_ids=torch.arange(1, 13)[None],
            mtp_cache=MtpCache(config=model.config.get_mtp_config()),
        )
        if num_modules == 1:
            own = next(module.unroll(states, torch.cat([ids, decided], 1), 1))
            torch.testing.assert_close(own[:, -1:], logits, atol=1e-4, rtol=1e-4)
        else:
            # transformers has drafted from each row's own tokens, so only the last row has the same text.
            text = torch.cat([ids, decided, drafted], 1)
            own = torch.stack([rows[:, -1] for rows in module.unroll(states, text, 2)], 1)
            torch.testing.assert_close(own, logits, atol=1e-4, rtol=1e-4)


def test_an_expert_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("glm4_moe", 1, tmp_path, monkeypatch)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"of 4 experts it lacks 'model.layers.2.mlp.experts.3.up_proj.weight'"):
        open_head("mtp", None, Checkpoint.open(str(tmp_path)))
