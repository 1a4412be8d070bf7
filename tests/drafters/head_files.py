"""Checkpoints of every published head format: exactly the published keys and configurations, random weights.

python -m tests.drafters.head_files FOLDER      writes them all, each below 1 MB, and the targets that they fit
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.drafters import head_oracles
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB, SIZE, INNER, LAYERS, DRAFT = 61, 32, 48, 8, 23
HEADS, KV_HEADS, DIM = 4, 2, 8


@dataclass
class HeadFile:
    """One checkpoint of a head, before it is written."""

    method: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    oracle: Callable[..., Tensor]
    file: str = "model.safetensors"
    boundaries: tuple[int, ...] = (-1,)
    target: str = "llama"
    beside: dict[str, Tensor] = field(default_factory=dict)
    """Tensors in files of their own."""

    def write(self, folder: Path) -> Path:
        """Writes config.json and the weights; ``.index.json`` in the name: two shards."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        if self.file.endswith(".index.json"):
            names, stem = sorted(tensors), self.file.split(".")[0]
            halves = {f"{stem}-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
            for file, part in halves.items():
                save_file({name: tensors[name] for name in part}, folder / file)
            index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
            (folder / self.file).write_text(json.dumps(index), encoding="utf-8")
        elif self.file.endswith(".safetensors"):
            save_file(tensors, folder / self.file)
        else:
            torch.save(tensors, folder / self.file)
        for name, tensor in self.beside.items():
            torch.save(tensor, folder / f"{name}.pt")
        return folder

    @property
    def target_ids(self) -> Tensor:
        """[draft vocabulary] ids of the target."""
        if "d2t" in self.tensors:
            return self.tensors["d2t"] + torch.arange(len(self.tensors["d2t"]))
        return self.tensors.get("token_map", torch.arange(VOCAB))


_GENERATOR = torch.Generator()


def normal(*shape: int) -> Tensor:
    """A matrix that keeps the size of what it is multiplied by."""
    return torch.randn(*shape, generator=_GENERATOR) * shape[-1] ** -0.5


def norm(size: int = SIZE) -> Tensor:
    return 1 + 0.3 * torch.randn(size, generator=_GENERATOR)


def layer(
    prefix: str, wide: int = 0, *, size: int = SIZE, bias: bool = False, qk_norm: bool = False
) -> dict[str, Tensor]:
    """Attention, MLP and the norm between them. ``wide``: what the attention takes; 0: ``size``."""
    out = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "o": size}
    made = {
        f"self_attn.{n}_proj.weight": normal(rows, (wide or size) if n != "o" else HEADS * DIM)
        for n, rows in out.items()
    }
    if bias:
        made |= {f"self_attn.{n}_proj.bias": 0.3 * normal(rows) for n, rows in out.items()}
    if qk_norm:
        made |= {"self_attn.q_norm.weight": norm(DIM), "self_attn.k_norm.weight": norm(DIM)}
    made |= {f"mlp.{n}_proj.weight": normal(INNER, size) for n in ("gate", "up")}
    made |= {"mlp.down_proj.weight": normal(size, INNER), "post_attention_layernorm.weight": norm(size)}
    return {f"{prefix}.{name}": tensor for name, tensor in made.items()}


LAYER = {
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "model_type": "llama",
}


def medusa(form: str, num_heads: int = 5, num_layers: int = 1, *, bias: bool = False) -> HeadFile:
    """FasterDecoding's version 1 (``v1``), version 2 (``v2``), blocks of vLLM (``blocks``, ``tied``, ``mapped``), which
    have a ``bias`` or none."""
    tensors: dict[str, Tensor] = {}
    blocks = form not in ("v1", "v2")
    rows = DRAFT if form == "mapped" else VOCAB
    for i in range(num_heads):
        for j in range(num_layers):
            at = f"blocks.{i}.layers.{j}" if blocks else f"{i}.{j}.linear"
            tensors[f"{at}.weight"] = normal(SIZE, SIZE)
            if bias or not blocks:
                tensors[f"{at}.bias"] = 0.3 * normal(SIZE)
        if form == "v1":
            tensors[f"{i}.{num_layers}.weight"] = normal(VOCAB, SIZE)
        if form in ("blocks", "mapped") or (form == "tied" and i == 0):
            tensors[f"lm_heads.{i}.weight"] = normal(rows, SIZE)
    config: dict[str, Any] = {"medusa_num_heads": 2, "medusa_num_layers": num_layers, "base_model_name_or_path": "x"}
    if blocks:
        config = {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": num_heads}
        config |= {"num_hidden_layers": num_layers, "hidden_size": SIZE, "vocab_size": VOCAB, "topk": 10}
        config |= {"max_paths": 64, "max_seq_len": 512, "medusa_fc_bias": bias, "original_lm_head": form == "tied"}
    if form == "mapped":
        tensors["token_map"] = torch.randperm(VOCAB, generator=_GENERATOR)[:DRAFT]
        config["truncated_vocab_size"] = DRAFT
    file = "model.safetensors" if blocks else "medusa_lm_head.safetensors"
    return HeadFile("medusa", config, tensors, head_oracles.medusa, file)


def mlp_speculator(*, tied: bool, scale: bool, inner: int = 24, whole: bool = True, n: int = 3) -> HeadFile:
    """``whole``: of tied weights all copies are in the file, as fms saves them."""
    distinct = 1 if tied else n
    first = {"emb": normal(VOCAB, inner), "head": normal(VOCAB, inner), "ln": norm(inner)}
    tensors: dict[str, Tensor] = {}
    for i in range(distinct):
        fresh = first if i == 0 else {"emb": normal(VOCAB, inner), "head": normal(VOCAB, inner), "ln": norm(inner)}
        tensors |= {f"emb.{i}.weight": fresh["emb"], f"head.{i}.weight": fresh["head"], f"ln.{i}.weight": fresh["ln"]}
        tensors[f"ln.{i}.bias"] = 0.3 * normal(inner)
    tensors["proj.0.weight"] = normal(inner, SIZE)
    for i in range(1, 2 if tied else n):
        tensors[f"proj.{i}.weight"] = normal(inner, inner)
    if tied and whole:
        for name, tensor in list(tensors.items()):
            kind, depth, part = name.split(".")
            if name != "proj.0.weight":
                tensors |= {f"{kind}.{i}.{part}": tensor.clone() for i in range(int(depth), n)}
    config = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "vocab_size": VOCAB}
    config |= {"emb_dim": SIZE, "inner_dim": inner, "n_predict": n, "top_k_tokens_per_head": [5, 3, 2]}
    config |= {"n_candidates": 5, "tie_weights": tied, "scale_input": scale}
    if inner == SIZE:
        config["inner_dim"] = 0
    tensors = {f"speculator.{name}": tensor for name, tensor in tensors.items()}
    return HeadFile("mlp_speculator", config, tensors, head_oracles.mlp_speculator)


def eagle(*, bias: bool, embed: bool = True, qwen2: bool = False) -> HeadFile:
    """``qwen2``: its layer is that of a Qwen 2, with biases in the attention but for its output."""
    tensors = {"fc.weight": normal(SIZE, 2 * SIZE), **layer("layers.0", bias=qwen2)}
    tensors.pop("layers.0.self_attn.o_proj.bias", None)
    if bias:
        tensors["fc.bias"] = 0.3 * normal(SIZE)
    if embed:
        tensors["embed_tokens.weight"] = normal(VOCAB, SIZE) * SIZE**0.5
    config = {**LAYER, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "bias": bias}
    if qwen2:
        config |= {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}
    return HeadFile("eagle", config, tensors, head_oracles.eagle, "pytorch_model.bin" if bias else "model.safetensors")


def eagle3(
    *,
    prefix: str = "midlayer",
    embed: bool = False,
    draft: int = DRAFT,
    size: int = SIZE,
    own_size: bool = False,
    speculators: bool = False,
    mask: bool = False,
    num_layers: int = 1,
    boundaries: tuple[int, ...] | None = None,
    qk_norm: bool = False,
    attention_bias: bool = False,
    **flags: bool,
) -> HeadFile:
    """EAGLE-3 and, with ``mask``, P-EAGLE. ``size``: of the head. ``own_size``: its configuration says the target's."""
    used = boundaries or (2, LAYERS // 2, LAYERS - 3)
    wide = len(used) * SIZE
    tensors = {"fc.weight": normal(size, wide), "norm.weight": norm(size), "lm_head.weight": normal(draft, size)}
    tensors |= layer(prefix, 2 * size, size=size, bias=attention_bias, qk_norm=qk_norm)
    tensors |= {f"{prefix}.hidden_norm.weight": norm(size), f"{prefix}.input_layernorm.weight": norm(size)}
    for i in range(1, num_layers):
        tensors |= layer(f"layers.{i}", size=size, bias=attention_bias, qk_norm=qk_norm)
        tensors[f"layers.{i}.input_layernorm.weight"] = norm(size)
    if embed:
        tensors["embed_tokens.weight"] = normal(VOCAB, size) * size**0.5
    if draft != VOCAB:
        ids = torch.randperm(VOCAB, generator=_GENERATOR)[:draft].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[ids] = True
        tensors |= {"d2t": ids - torch.arange(draft), "t2d": t2d}
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(wide)
    if flags.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": norm() for i in range(len(used))}
    if mask:
        tensors["mask_hidden"] = torch.randn(1, 1, wide, generator=_GENERATOR)
    own = {**LAYER, "num_hidden_layers": num_layers, "attention_bias": attention_bias}
    if size != SIZE:
        own |= {"hidden_size": size, "head_dim": DIM}
    if qk_norm:
        own |= {"model_type": "qwen3", "head_dim": DIM}
    rest: dict[str, Any] = {"draft_vocab_size": draft, **flags}
    if mask:
        rest["mask_token_id"] = VOCAB - 2
    if speculators:
        kind = "peagle" if mask else "eagle3"
        config = {"speculators_model_type": kind, "architectures": [f"{kind.title()}Speculator"], **rest}
        config |= {"target_hidden_size": SIZE if own_size else None}
        config |= {"speculators_version": "0.9.0", "transformer_layer_config": own}
        config |= {"eagle_aux_hidden_state_layer_ids": list(used), "embed_requires_grad": embed}
        config |= {"speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "x", "architectures": []}}}
    else:
        config = {**own, "architectures": ["LlamaForCausalLMEagle3"], **rest}
        if own_size:
            config["target_hidden_size"] = SIZE
        if boundaries is not None:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(used), "use_aux_hidden_state": True}
    method = "peagle" if mask else "eagle3"
    return HeadFile(method, config, tensors, head_oracles.eagle3, boundaries=used)


BLOCK, TAPS, GROUP, RANK, TOP_K = 6, 2, 8, 12, 16
MASK = VOCAB - 2


def block(
    method: str = "dflash",
    *,
    form: str = "z-lab",
    num_layers: int = 2,
    second: bool = False,
    rank: int = 0,
    gated: bool = False,
    draft: int = VOCAB,
    embed: bool = False,
    mask: bool = False,
    family: str = "qwen3",
    confidence: str = "",
    layer_ids: list[int] | None = None,
    **own: Any,
) -> HeadFile:
    """DFlash, DFlash 2 (``second``), DSpark (``rank``) and JetSpec, by the keys of ``form``: z-lab, deepspec,
    speculators. ``confidence``: what its head sees, "row" or "row and token". ``own``: further keys."""
    ids = [1, 4] if layer_ids is None else layer_ids  # layers whose output is read
    tensors = {"fc.weight": normal(SIZE, len(ids) * SIZE), "hidden_norm.weight": norm(), "norm.weight": norm()}
    for i in range(num_layers):
        tensors |= layer(f"layers.{i}", qk_norm=family == "qwen3")
        tensors[f"layers.{i}.input_layernorm.weight"] = norm()
        for part in ("attention_conv", "mlp_conv") if second else ():
            base = 0.3 * torch.randn(2, TAPS, SIZE, generator=_GENERATOR)
            base[:, 0] += 1
            tensors[f"layers.{i}.{part}.base_kernel"] = base
            tensors[f"layers.{i}.{part}.kernel_projection.weight"] = 0.3 * normal(2 * TAPS * SIZE // GROUP, SIZE)
    if second:
        for name in ("predecessor", "successor"):
            tensors[f"candidate_selector.{name}_codebook"] = torch.randn(VOCAB, RANK, generator=_GENERATOR)
        tensors["candidate_selector.hidden_projection.weight"] = normal(RANK, SIZE)
    if rank:
        tensors["markov_head.markov_w1.weight"] = torch.randn(VOCAB, rank, generator=_GENERATOR)
        tensors["markov_head.markov_w2.weight"] = normal(draft, rank)
    if gated:
        tensors["markov_head.gate_proj.weight"] = normal(rank, SIZE + rank)
        tensors["markov_head.gate_proj.bias"] = 0.3 * normal(rank)
    if confidence:
        tensors["confidence_head.proj.weight"] = 0.1 * normal(1, SIZE + rank * (confidence == "row and token"))
        tensors["confidence_head.proj.bias"] = torch.ones(1)
    if embed:
        tensors |= {"embed_tokens.weight": normal(VOCAB, SIZE) * SIZE**0.5}
    if embed or draft != VOCAB:
        tensors |= {"lm_head.weight": normal(draft, SIZE)}
    if draft != VOCAB:
        drafted = torch.randperm(VOCAB, generator=_GENERATOR)[:draft].sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[drafted] = True
        tensors |= {"d2t": drafted - torch.arange(draft), "t2d": t2d}
    beside = {"mask_embedding": torch.randn(SIZE, generator=_GENERATOR)} if mask else {}
    layers = {**LAYER, "num_hidden_layers": num_layers, "head_dim": DIM, "model_type": "qwen3"}
    sizes: dict[str, Any] = {"block_size": BLOCK, "mask_token_id": MASK}
    if second:
        sizes |= {"conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK, "selector_top_k": TOP_K}
    chain: dict[str, Any] = {"markov_rank": rank, "markov_head_type": "gated" if gated else "vanilla"} if rank else {}
    if confidence:
        chain |= {"enable_confidence_head": True, "confidence_head_with_markov": confidence == "row and token"}
    architecture = "DFlash2DraftModel" if second else "DFlashDraftModel"
    if form == "speculators":
        kind = "dflash2" if second else method
        for name in [*own]:
            if name in ("layer_types", "sliding_window", "use_sliding_window"):
                layers[name] = own.pop(name)
        config = {"speculators_model_type": kind, "speculators_version": "0.9.0", "draft_vocab_size": draft, **sizes}
        config |= {"architectures": [architecture], "transformer_layer_config": layers, "target_hidden_size": None}
        config |= {"aux_hidden_state_layer_ids": [i + 1 for i in ids], "sliding_window_non_causal": second, **chain}
        config |= {"sample_from_anchor": method == "dspark", "speculators_config": {"algorithm": kind}, **own}
    elif form == "deepspec":
        config = {**layers, "architectures": ["Qwen3DSparkModel"], **sizes, **chain, "target_layer_ids": ids}
        config |= {"num_anchors": 512, "num_target_layers": LAYERS, "tie_word_embeddings": False, **own}
    else:
        nested = {**sizes, "target_layer_ids": ids, **own.pop("dflash_config", {})}
        config = {**layers, "architectures": [architecture], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
        config |= {"num_target_layers": LAYERS, "dflash_config": nested, **chain, **own}
        if not second:
            config["block_size"] = nested.pop("block_size")
    if family == "llama":
        config["model_type"] = "llama"
    if draft != VOCAB:
        config["draft_vocab_size"] = draft

    def oracle(w: dict[str, Tensor], *rest: Any) -> Tensor:
        return head_oracles.block(w | beside, *rest, causal_block=method == "jetspec")

    return HeadFile(method, config, tensors, oracle, boundaries=tuple(i + 1 for i in ids), beside=beside)


def mtp(names: str = "deepseek", *, own_tables: bool = False, sharded: bool = False, draft: int = VOCAB) -> HeadFile:
    """The MTP layer and the target around it, in one set of files."""
    kind = "qwen3" if names == "qwen" else "llama"
    target = tiny_target(kind)
    tensors = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    at = "mtp.layers.0" if names == "qwen" else f"model.layers.{LAYERS}"
    tensors |= layer(at, qk_norm=names == "qwen")
    tensors[f"{at}.input_layernorm.weight"] = norm()
    if names == "qwen":
        tensors |= {"mtp.fc.weight": normal(SIZE, 2 * SIZE), "mtp.norm.weight": norm()}
        tensors |= {"mtp.pre_fc_norm_hidden.weight": norm(), "mtp.pre_fc_norm_embedding.weight": norm()}
    else:
        tensors |= {f"{at}.enorm.weight": norm(), f"{at}.hnorm.weight": norm()}
        tensors |= {f"{at}.eh_proj.weight": normal(SIZE, 2 * SIZE), f"{at}.shared_head.norm.weight": norm()}
        table = normal(VOCAB, SIZE) * SIZE**0.5 if own_tables else tensors["model.embed_tokens.weight"]
        lm_head = normal(draft, SIZE) if own_tables else tensors["lm_head.weight"]
        tensors |= {f"{at}.embed_tokens.weight": table, f"{at}.shared_head.head.weight": lm_head}
    if draft != VOCAB:
        ids = torch.randperm(VOCAB, generator=_GENERATOR)[:draft].sort().values
        tensors["d2t"] = ids - torch.arange(draft)
    config = {**target.config.to_dict(), "num_nextn_predict_layers": 1}
    config = json.loads(json.dumps(config, default=str))
    file = "model.safetensors.index.json" if sharded else "model.safetensors"
    return HeadFile("mtp", config, tensors, head_oracles.mtp, file, target=kind)


def tiny_target(kind: str = "llama") -> Any:
    """A target with random weights."""
    torch.manual_seed(4)
    values = {**LAYER, "num_hidden_layers": LAYERS, "tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 0}
    del values["model_type"]
    if kind.startswith("gemma4"):
        family, shared = kind.split()
        return _tiny_gemma4(family, int(shared))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**values, head_dim=DIM)).eval()
    return LlamaForCausalLM(LlamaConfig(**values)).eval()


def _tiny_gemma4(family: str, num_shared: int) -> Any:
    """A Gemma 4, the last layers of which have no keys; its matrices keep the size of what they are multiplied by."""
    values = gemma4_text(SIZE, LAYERS, num_shared) | {"eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0}
    if num_shared:  # as E2B and E4B
        values |= {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": GEMMA4_VOCAB}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(f"{family}_text", **values)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif "q_norm" in name:  # nothing else divides its scores
            torch.nn.init.constant_(parameter, 0.3)
    return model


FILES: dict[str, Callable[[], HeadFile]] = {
    "medusa_v1": lambda: medusa("v1"),
    "medusa_v1_pt": lambda: _in(medusa("v1", num_layers=2), "medusa_lm_head.pt"),
    "medusa_v2": lambda: medusa("v2"),
    "medusa_blocks": lambda: medusa("blocks"),
    "medusa_blocks_bias": lambda: medusa("blocks", num_layers=2, bias=True),
    "medusa_blocks_one_lm_head": lambda: medusa("tied"),
    "medusa_blocks_token_map": lambda: medusa("mapped", num_layers=2),
    "mlp": lambda: mlp_speculator(tied=False, scale=False),
    "mlp_inner_is_hidden": lambda: mlp_speculator(tied=False, scale=True, inner=SIZE),
    "mlp_tied": lambda: mlp_speculator(tied=True, scale=True),
    "mlp_tied_once": lambda: mlp_speculator(tied=True, scale=False, whole=False),
    "eagle_bias": lambda: eagle(bias=True),
    "eagle": lambda: eagle(bias=False, embed=False),
    "eagle_qwen2": lambda: eagle(bias=True, qwen2=True),
    "eagle3": lambda: eagle3(),
    "eagle3_pt": lambda: _in(eagle3(), "pytorch_model.bin"),
    "eagle3_layers": lambda: eagle3(prefix="layers.0", embed=True),
    "eagle3_whole_vocabulary": lambda: eagle3(draft=VOCAB),
    "eagle3_target_size": lambda: eagle3(own_size=True, embed=True),
    "eagle3_narrower": lambda: eagle3(size=SIZE // 2, own_size=True, embed=True, fc_norm=True),
    "eagle3_narrower_speculators": lambda: eagle3(
        size=SIZE // 2, own_size=True, embed=True, speculators=True, prefix="layers.0", norm_before_fc=True
    ),
    "eagle3_norm_before_residual": lambda: eagle3(norm_before_residual=True),
    "eagle3_fc_norm": lambda: eagle3(fc_norm=True, boundaries=(1, 4)),
    "eagle3_norm_before_fc": lambda: eagle3(norm_before_fc=True, boundaries=(1, 4, LAYERS)),
    "eagle3_norm_output": lambda: eagle3(norm_output=True, prefix="layers.0"),
    "eagle3_speculators": lambda: eagle3(
        speculators=True, prefix="layers.0", embed=True, qk_norm=True, norm_before_residual=True
    ),
    "eagle3_two_layers": lambda: eagle3(prefix="layers.0", num_layers=2),
    "peagle": lambda: eagle3(mask=True, prefix="layers.0", embed=True, num_layers=2, attention_bias=True),
    "peagle_narrower": lambda: eagle3(size=SIZE // 2, own_size=True, mask=True, prefix="layers.0", embed=True),
    "peagle_speculators": lambda: eagle3(mask=True, speculators=True, prefix="layers.0", embed=True),
    "dflash": lambda: block(),
    "dflash_llama": lambda: block(family="llama", embed=True, num_layers=1),
    "dflash_default_layers": lambda: _without_layers(block(layer_ids=[1, 5])),
    "dflash_windows": lambda: block(
        layer_types=["sliding_attention", "full_attention"], sliding_window=5, use_sliding_window=True, mask=True
    ),
    "dflash_from_anchor": lambda: block(dflash_config={"sample_from_anchor": True}, draft=DRAFT),
    "dflash_speculators": lambda: block(
        form="speculators",
        draft=DRAFT,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
        use_sliding_window=True,
    ),
    "dflash2": lambda: block(
        second=True,
        dflash_config={
            "input_embedding_scale": 0.7,
            "output_multiplier": 1.3,
            "final_logit_softcapping": 4.0,
            "use_swa": True,
            "swa_window_size": 7,
        },
    ),
    "dflash2_speculators": lambda: block(form="speculators", second=True),
    "dspark": lambda: block("dspark", form="deepspec", rank=10, embed=True, confidence="row and token"),
    "dspark_bonus_anchor": lambda: block("dspark", rank=10, dspark_bonus_anchor=True, dflash_query_causal=True),
    "dspark_speculators": lambda: block(
        "dspark", form="speculators", rank=10, gated=True, draft=DRAFT, confidence="row"
    ),
    "jetspec": lambda: block("jetspec", dflash_config={"causal_head": True}),
    "jetspec_unsaid": lambda: block("jetspec"),
    "mtp_deepseek": lambda: mtp(),
    "mtp_own_tables": lambda: mtp(own_tables=True),
    "mtp_draft_vocabulary": lambda: mtp(own_tables=True, draft=DRAFT),
    "mtp_sharded": lambda: mtp(sharded=True),
    "mtp_qwen": lambda: mtp("qwen"),
}
"""Every published format; each call draws the same weights."""


ON_TARGET: dict[str, Callable[[], HeadFile]] = {
    "streams": lambda: streams(tiny_target(), LAYERS - 3),
    "gemma4": lambda: gemma4(),
    "gemma4_clusters": lambda: gemma4(clusters=(8, 3)),
    "gemma4_unified": lambda: gemma4("gemma4_unified", shared=0),
}
"""Formats of heads that compute nothing without the target's layers or its keys, on those of ``tiny_target``."""


def _without_layers(head: HeadFile) -> HeadFile:
    """A head that reads the layers of its format's default."""
    del head.config["dflash_config"]["target_layer_ids"]
    return head


def _in(head: HeadFile, file: str) -> HeadFile:
    head.file = file
    return head


def made(name: str) -> HeadFile:
    """The checkpoint of this name, with the same weights every time."""
    _GENERATOR.manual_seed(7)
    return (FILES | ON_TARGET)[name]()


def write_exit(folder: Path, size: int, num_layers: int, boundary: int, *, inner: int = 24, scale: float = 1.0) -> Path:
    """An exit head of random weights; ``scale``: of what it adds to a state."""
    _GENERATOR.manual_seed(boundary)
    config = {
        "architectures": ["ExitHead"],
        "model_type": "exit_head",
        "num_target_layers": num_layers,
        "boundary": boundary,
        "hidden_size": size,
        "inner_dim": inner,
        "rms_norm_eps": 1e-6,
    }
    tensors = {"norm.weight": norm(size), "down_proj.weight": scale * normal(size, inner)}
    tensors |= {f"{name}_proj.weight": normal(inner, size) for name in ("gate", "up")}
    return HeadFile("early_exit", config, tensors, head_oracles.exit_states).write(folder)


def streams(model: Any, boundary: int, *, num_streams: int = 4, rank: int = 3, scale: float = 1.0) -> HeadFile:
    """Streams of a target, of random weights; ``scale``: of what they differ by from the target's own rows."""
    _GENERATOR.manual_seed(boundary)
    size, layers = model.config.hidden_size, model.model.layers
    config = {
        "architectures": ["StreamHead"],
        "model_type": "stream_head",
        "num_target_layers": len(layers),
        "boundary": boundary,
        "hidden_size": size,
        "vocab_size": model.config.vocab_size,
        "num_streams": num_streams,
        "rank": rank,
    }
    shapes = {"anchor": (size, size)}
    for index in range(boundary, len(layers)):
        for name, linear in layers[index].named_modules():
            if isinstance(linear, torch.nn.Linear):
                shapes[f"layers.{index}.{name}"] = (linear.in_features, linear.out_features)
    tensors = {"streams": scale * normal(num_streams, size) * size**0.5}
    for name, (width, out) in shapes.items():
        tensors |= {f"{name}.down.weight": normal(rank, width), f"{name}.up.weight": scale * normal(out, rank)}
    return HeadFile("speculative_streaming", config, tensors, head_oracles.streams, boundaries=(boundary,))


WINDOW = 70
"""Of the sliding layers of a Gemma 4: more than a page."""
GEMMA4_VOCAB = 64
"""Tokens of a Gemma 4 here, which clusters divide."""


def gemma4_text(size: int, num_layers: int, num_shared: int) -> dict[str, Any]:
    """The published keys of a text configuration of Gemma 4; the last ``num_shared`` layers have no keys."""
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * (num_layers // 4)
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    return {
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "final_logit_softcapping": None,
        "global_head_dim": 2 * DIM,
        "head_dim": DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": size,
        "hidden_size_per_layer_input": 0,
        "intermediate_size": INNER,
        "layer_types": kinds,
        "max_position_embeddings": 512,
        "num_attention_heads": HEADS,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": KV_HEADS,
        "num_kv_shared_layers": num_shared,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "use_double_wide_mlp": False,
        "vocab_size": GEMMA4_VOCAB,
        "vocab_size_per_layer_input": 0,
    }


def gemma4(
    family: str = "gemma4",
    *,
    shared: int = LAYERS // 2,
    clusters: tuple[int, int] | None = None,
    size: int = SIZE // 2,
) -> HeadFile:
    """A drafter of Gemma 4 for ``tiny_target`` of the same family, whose last ``shared`` layers have no keys.

    ``clusters``: how many there are, and how many of them have logits; None: an LM head over all tokens.
    """
    text = gemma4_text(size, 4, 4) | {"model_type": f"{family}_text"}
    config: dict[str, Any] = {
        "architectures": [f"{''.join(part.title() for part in family.split('_'))}AssistantForCausalLM"],
        "model_type": f"{family}_assistant",
        "backbone_hidden_size": SIZE,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "use_ordered_embeddings": clusters is not None,
        "tie_word_embeddings": True,
        "text_config": text,
    }
    tensors = {
        "model.embed_tokens.weight": normal(GEMMA4_VOCAB, size),
        "model.norm.weight": norm(size),
        "pre_projection.weight": normal(size, 2 * SIZE),
        "post_projection.weight": normal(SIZE, size),
    }
    for i, kind in enumerate(text["layer_types"]):
        at, width = f"model.layers.{i}", HEADS * DIM * (2 if kind == "full_attention" else 1)
        tensors |= {
            f"{at}.self_attn.q_proj.weight": normal(width, size),
            f"{at}.self_attn.q_norm.weight": 0.3 * norm(width // HEADS),
            f"{at}.self_attn.o_proj.weight": normal(size, width),
            f"{at}.mlp.gate_proj.weight": normal(INNER, size),
            f"{at}.mlp.up_proj.weight": normal(INNER, size),
            f"{at}.mlp.down_proj.weight": normal(size, INNER),
            f"{at}.layer_scalar": torch.full((1,), 0.9),
        }
        parts = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        tensors |= {f"{at}.{part}_layernorm.weight": norm(size) for part in parts}
    if clusters is not None:
        config["num_centroids"], config["centroid_intermediate_top_k"] = clusters
        tensors["masked_embedding.centroids.weight"] = normal(clusters[0], size)
        tensors["masked_embedding.token_ordering"] = torch.randperm(GEMMA4_VOCAB, generator=_GENERATOR)
    return HeadFile("gemma4_assistant", config, tensors, head_oracles.gemma4, target=f"{family} {shared}")


def write_target(folder: Path, kind: str = "llama") -> dict[str, Tensor]:
    """Writes a target, and returns the tables that heads share with it."""
    tiny_target(kind).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    embed = tensors["model.embed_tokens.weight"]
    return {"embed": embed, "lm_head": tensors.get("lm_head.weight", embed)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    root = parser.parse_args().folder
    for each in FILES:
        made(each).write(root / each)
    for family in ("llama", "qwen3"):
        write_target(root / f"target_{family}", family)
