"""Every head format once more, plainly: checkpoint tensors in, logits of a chain of drafted tokens out.

Each oracle computes one text from its beginning: ``states`` [T, width] of positions 0 .. T - 1, ``tokens`` the text of
T + 1 tokens (the last is the anchor) and then the drafted ones. It returns the logits ``[1 + drafted, draft
vocabulary]`` after the anchor and after each drafted token. Nothing here is shared with the package.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig, Gemma4UnifiedTextConfig

Weights = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-5) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def exit_states(w: Weights, states: Tensor, eps: float = 1e-6) -> Tensor:
    """What the final norm of the target has of the states behind the layers that draft."""
    n = rms(states, w["norm.weight"], eps)
    gated = F.silu(n @ w["gate_proj.weight"].T) * (n @ w["up_proj.weight"].T)
    return states + gated @ w["down_proj.weight"].T


def streams(w: Weights, model: Any, boundary: int, tokens: list[int]) -> Tensor:
    """Logits ``[streams, vocabulary]`` behind a text whose last token is the anchor.

    The streams are the last rows of one ordinary causal forward of the whole text by transformers. They are replaced at
    the boundary, and what is added to linear layers is added to them alone.
    """
    num, layers = len(w["streams"]), model.model.layers
    embedded = model.get_input_embeddings()(torch.tensor(tokens[-1:]))[0]
    anchor = w["anchor.up.weight"] @ (w["anchor.down.weight"] @ embedded)

    def enter(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        states = args[0].clone()
        states[0, -num:] = states[0, -num - 1] + anchor + w["streams"]
        return (states, *args[1:])

    def added(name: str) -> Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]:
        def hook(linear: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            more = args[0] @ w[f"{name}.down.weight"].T @ w[f"{name}.up.weight"].T
            more[:, :-num] = 0
            return output + more

        return hook

    hooks = [layers[boundary].register_forward_pre_hook(enter)]
    for name in {key.rpartition(".")[0].rpartition(".")[0] for key in w if key.startswith("layers.")}:
        _, index, path = name.split(".", 2)
        hooks.append(layers[int(index)].get_submodule(path).register_forward_hook(added(name)))
    try:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([[*tokens[:-1], *[0] * num]]), use_cache=False).logits[0, -num:]
    finally:
        for hook in hooks:
            hook.remove()
    return logits


def rope(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """x [n, heads, dim]: the first half of the numbers turns against the second."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(w: Weights, at: str, x: Tensor, positions: Tensor, past: list, heads: int, eps: float) -> Tensor:
    """Causal grouped-query attention of rows that come after those in ``past``, which they join."""

    def project(name: str) -> Tensor:
        y = x @ w[f"{at}.{name}_proj.weight"].T + w.get(f"{at}.{name}_proj.bias", torch.zeros(()))
        return y.view(len(x), -1, w[f"{at}.o_proj.weight"].shape[1] // heads)

    q, k, v = project("q"), project("k"), project("v")
    if f"{at}.q_norm.weight" in w:
        q, k = rms(q, w[f"{at}.q_norm.weight"], eps), rms(k, w[f"{at}.k_norm.weight"], eps)
    q, k = rope(q, positions), rope(k, positions)
    past.append((k, v))
    keys, values = torch.cat([k for k, _ in past]), torch.cat([v for _, v in past])
    share = heads // keys.shape[1]
    out = []
    for i in range(len(x)):
        seen = len(keys) - len(x) + i + 1
        each = []
        for head in range(heads):
            scores = keys[:seen, head // share] @ q[i, head] / math.sqrt(q.shape[-1])
            each.append(scores.softmax(0) @ values[:seen, head // share])
        out.append(torch.cat(each))
    return torch.stack(out) @ w[f"{at}.o_proj.weight"].T + w.get(f"{at}.o_proj.bias", torch.zeros(()))


def mlp(w: Weights, at: str, x: Tensor) -> Tensor:
    gate, up = x @ w[f"{at}.gate_proj.weight"].T, x @ w[f"{at}.up_proj.weight"].T
    return (F.silu(gate) * up) @ w[f"{at}.down_proj.weight"].T


def medusa(w: Weights, config: dict, target: Weights, states: Tensor, tokens: list[int]) -> Tensor:
    x, out = states[-1], []
    w = {name.removeprefix("medusa_heads."): tensor for name, tensor in w.items()}
    for head in range(len(tokens) - len(states)):
        y, layer = x, 0
        while (name := next((n for n in (f"{head}.{layer}.linear", f"blocks.{head}.layers.{layer}")
                             if f"{n}.weight" in w), None)):  # fmt: skip
            y = y + F.silu(y @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(())))
            layer += 1
        names = [f"{head}.{layer}.weight", f"lm_heads.{head}.weight", "lm_heads.0.weight"]
        out.append(y @ next((w[n] for n in names if n in w), target["lm_head"]).T)
    return torch.stack(out)


def mlp_speculator(w: Weights, config: dict, target: Weights, states: Tensor, tokens: list[int]) -> Tensor:
    n, tied = config["n_predict"], config["tie_weights"]
    inner = config["inner_dim"] or config["emb_dim"]
    state_weight = 0.5 ** (0.5 / n)
    emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    s, out = states[-1], []
    if config["scale_input"]:
        s = rms(s, eps=1e-6) / 2**0.5
    for i, token in enumerate(tokens[len(states) :]):
        j = 0 if tied else i
        p = min(i, 1) if tied else i
        z = w[f"speculator.proj.{p}.weight"] @ s + w[f"speculator.emb.{j}.weight"][token] * emb_weight / state_weight
        z = rms(z, w[f"speculator.ln.{j}.weight"], 1e-6) + w[f"speculator.ln.{j}.bias"]
        s = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        out.append(w[f"speculator.head.{j}.weight"] @ s)
    return torch.stack(out)


def _recurrent(step, first: Tensor, tokens: list[int], logits) -> Tensor:
    """The rows of the text, then one row for each drafted token with the row before's state; row t has token t + 1."""
    n = len(first)
    state = step(torch.tensor(tokens[1 : n + 1]), first, torch.arange(1, n + 1))[-1:]
    out = [logits(state)]
    for i, token in enumerate(tokens[n + 1 :]):
        state = step(torch.tensor([token]), state, torch.tensor([n + 1 + i]))
        out.append(logits(state))
    return torch.cat(out)


def eagle(w: Weights, config: dict, target: Weights, states: Tensor, tokens: list[int]) -> Tensor:
    past, heads = [], config["num_attention_heads"]
    table = w.get("embed_tokens.weight", target["embed"])

    def step(ids, state, positions):
        x = torch.cat([table[ids], state], -1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
        y = x + attention(w, "layers.0.self_attn", x, positions, past, heads, 1e-5)
        return y + mlp(w, "layers.0.mlp", rms(y, w["layers.0.post_attention_layernorm.weight"]))

    return _recurrent(step, states, tokens, lambda state: state @ target["lm_head"].T)


def eagle3(w: Weights, config: dict, target: Weights, states: Tensor, tokens: list[int]) -> Tensor:
    """Also of P-EAGLE: with ``mask_hidden`` the drafted rows are the mask's, whatever their tokens."""
    flat = config | config.get("transformer_layer_config", {}) | config.get("eagle_config", {})
    w = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in w.items()}
    layers = flat["num_hidden_layers"]
    pasts: list[list] = [[] for _ in range(layers)]
    table = w.get("embed_tokens.weight", target["embed"])

    def fuse(x: Tensor) -> Tensor:
        if "input_norm.weight" in w:
            x = rms(x, w["input_norm.weight"])
        if "fc_norm.0.weight" in w:
            parts = x.chunk(len([n for n in w if n.startswith("fc_norm.")]), -1)
            x = torch.cat([rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return x @ w["fc.weight"].T if "fc.weight" in w else x

    def step(ids, state, positions):
        if "mask_hidden" in w and pasts[0]:
            ids = torch.full_like(ids, flat.get("mask_token_id", flat.get("pard_token")))
            state = fuse(w["mask_hidden"][0]).expand(len(ids), -1)
        normed = rms(state, w["layers.0.hidden_norm.weight"])
        x = torch.cat([rms(table[ids], w["layers.0.input_layernorm.weight"]), normed], -1)
        y = normed if flat.get("norm_before_residual") else state
        for i in range(layers):
            at = f"layers.{i}"
            x = x if i == 0 else rms(y, w[f"{at}.input_layernorm.weight"])
            y = y + attention(w, f"{at}.self_attn", x, positions, pasts[i], flat["num_attention_heads"], 1e-5)
            y = y + mlp(w, f"{at}.mlp", rms(y, w[f"{at}.post_attention_layernorm.weight"]))
        return rms(y, w["norm.weight"]) if flat.get("norm_output") else y

    def logits(state):
        last = state if flat.get("norm_output") else rms(state, w["norm.weight"])
        return last @ w.get("lm_head.weight", target["lm_head"]).T

    return _recurrent(step, fuse(states), tokens, logits)


def mtp(w: Weights, config: dict, target: Weights, states: Tensor, tokens: list[int]) -> Tensor:
    """One module over a dense layer, by the names of DeepSeek (``model.layers.N.``) or Qwen (``mtp.``)."""
    past, eps = [], config["rms_norm_eps"]
    if any(name.startswith("mtp.") for name in w):
        names = {"eh": "mtp.fc", "e": "mtp.pre_fc_norm_embedding", "h": "mtp.pre_fc_norm_hidden", "out": "mtp.norm"}
        at = "mtp.layers.0"
    else:
        at = f"model.layers.{config['num_hidden_layers']}"
        names = {"eh": f"{at}.eh_proj", "e": f"{at}.enorm", "h": f"{at}.hnorm", "out": f"{at}.shared_head.norm"}
    table = w.get(f"{at}.embed_tokens.weight", target["embed"])
    lm_head = w.get(f"{at}.shared_head.head.weight", target["lm_head"])
    norm = {key: w[f"{name}.weight"] for key, name in names.items()}

    def step(ids, state, positions):
        x = torch.cat([rms(table[ids], norm["e"], eps), rms(state, norm["h"], eps)], -1) @ norm["eh"].T
        y = rms(x, w[f"{at}.input_layernorm.weight"], eps)
        y = x + attention(w, f"{at}.self_attn", y, positions, past, config["num_attention_heads"], eps)
        y = y + mlp(w, f"{at}.mlp", rms(y, w[f"{at}.post_attention_layernorm.weight"], eps))
        return rms(y, norm["out"], eps)

    return _recurrent(step, states, tokens, lambda state: state @ lm_head.T)


def _convolved(x: Tensor, kernels: Tensor, base: Tensor) -> Tensor:
    """y[i, c] = sum over taps t of x[i - t, c] (base[t, c] + kernels[i, t, group of c])."""
    out = torch.zeros_like(x)
    for i in range(len(x)):
        for tap in range(min(len(base), i + 1)):
            share = x.shape[1] // kernels.shape[-1]
            out[i] += x[i - tap] * (base[tap] + kernels[i, tap].repeat_interleave(share))
    return out


def _block_attention(
    w: Weights, at: str, c: Tensor, y: Tensor, heads: int, causal: bool, window: int | None, eps: float = 1e-5
) -> Tensor:
    """The rows y of a block behind the context c, whose keys and values are projections of it."""
    n = len(c)

    def project(name: str, rows: Tensor) -> Tensor:
        out = (rows @ w[f"{at}.{name}_proj.weight"].T).view(len(rows), -1, w[f"{at}.o_proj.weight"].shape[1] // heads)
        return rms(out, w[f"{at}.{name}_norm.weight"], eps) if f"{at}.{name}_norm.weight" in w else out

    at_rows = torch.arange(n, n + len(y))
    q = rope(project("q", y), at_rows)
    k = torch.cat([rope(project("k", c), torch.arange(n)), rope(project("k", y), at_rows)])
    v, share = torch.cat([project("v", c), project("v", y)]), heads // k.shape[1]
    out = []
    for row in range(len(y)):
        seen = torch.ones(len(k), dtype=torch.bool)
        if causal:
            seen[n + row + 1 :] = False
        if window is not None:
            seen[: max(0, n + row - window + 1)] = False
        scores = [k[seen, h // share] @ q[row, h] / math.sqrt(q.shape[-1]) for h in range(heads)]
        out.append(torch.cat([score.softmax(0) @ v[seen, h // share] for h, score in enumerate(scores)]))
    return torch.stack(out) @ w[f"{at}.o_proj.weight"].T


def block(
    w: Weights, config: dict, target: Weights, states: Tensor, tokens: list[int], causal_block: bool = False
) -> Tensor:
    """DFlash, DFlash 2, DSpark, JetSpec: the rows of [anchor, mask, ..] at positions T, T + 1, .. after T states."""
    flat = {**config, **config.get("transformer_layer_config", {}), **config.get("dflash_config", {})}
    heads, eps, context, depths = flat["num_attention_heads"], 1e-5, len(states), len(tokens) - len(states)
    first = int(not flat.get("sample_from_anchor", "markov_rank" in flat) or bool(flat.get("dspark_bonus_anchor")))
    everywhere = causal_block or bool(flat.get("causal_head") or flat.get("dflash_query_causal"))
    windows = flat.get("layer_types") or ["full_attention"] * flat["num_hidden_layers"]
    windows = ["sliding_attention"] * len(windows) if flat.get("use_swa") else windows
    ids = [tokens[context]] + [flat["mask_token_id"]] * (first + depths - 1)
    x = w.get("embed_tokens.weight", target["embed"])[ids] * flat.get("input_embedding_scale", 1.0)
    if "mask_embedding" in w:
        x[1:] = w["mask_embedding"]
    c = rms(states @ w["fc.weight"].T, w["hidden_norm.weight"], eps)
    for i, kind in enumerate(windows):
        at, window = f"layers.{i}", flat.get("swa_window_size", flat.get("sliding_window"))
        sliding = kind != "full_attention"
        causal = everywhere or (flat.get("sliding_window_non_causal") is False and sliding)

        for norm, conv in (("input", "attention"), ("post_attention", "mlp")):
            y = rms(x, w[f"{at}.{norm}_layernorm.weight"], eps)
            name, kernels = f"{at}.{conv}_conv", None
            if f"{name}.base_kernel" in w:
                taps = w[f"{name}.base_kernel"].shape[1]
                kernels = (y @ w[f"{name}.kernel_projection.weight"].T).view(len(y), 2, taps, -1)
                y = _convolved(y, kernels[:, 0], w[f"{name}.base_kernel"][0])
            if conv == "mlp":
                y = mlp(w, f"{at}.mlp", y)
            else:
                y = _block_attention(w, f"{at}.self_attn", c, y, heads, causal, window if sliding else None)
            x = x + (y if kernels is None else _convolved(y, kernels[:, 1], w[f"{name}.base_kernel"][1]))
    h = rms(x, w["norm.weight"], eps)[first:]
    logits = h @ w.get("lm_head.weight", target["lm_head"]).T * flat.get("output_multiplier", 1.0)
    if cap := flat.get("final_logit_softcapping"):
        logits = cap * torch.tanh(logits / cap)
    for depth, before in enumerate(tokens[context:]):
        if "markov_head.markov_w1.weight" in w:
            e = w["markov_head.markov_w1.weight"][before]
            if "markov_head.gate_proj.weight" in w:
                gate = w["markov_head.gate_proj.weight"] @ torch.cat([h[depth], e]) + w["markov_head.gate_proj.bias"]
                e = e * gate.sigmoid()
            logits[depth] += w["markov_head.markov_w2.weight"] @ e
        if "candidate_selector.predecessor_codebook" in w:
            top = logits[depth].topk(flat["selector_top_k"]).indices
            e = w["candidate_selector.predecessor_codebook"][before]
            e = e * (w["candidate_selector.hidden_projection.weight"] @ h[depth])
            scores = logits[depth][top] + w["candidate_selector.successor_codebook"][top] @ e
            logits[depth] = torch.full_like(logits[depth], float("-inf")).scatter(0, top, scores)
    return logits


@contextlib.contextmanager
def shared_as_published() -> Iterator[None]:
    """Gemma 4 configurations of transformers 5.23, in which a drafter's layers may all be without keys, and the last
    layer of each type shows its keys also where no layer of the target takes them over."""
    with pytest.MonkeyPatch.context() as patch:
        for config in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
            patch.setattr(config, "kv_sharing_modes", property(_sharing_modes))
        yield


def _sharing_modes(config: Any) -> list[str | None]:
    kept = config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: index for index, kind in enumerate(config.layer_types[:kept])}.values()
    return ["store" if i in last else None for i in range(kept)] + ["reuse"] * config.num_kv_shared_layers


def gemma4_drafter(w: Weights, config: dict[str, Any]) -> Any:
    """transformers' own module of a drafter of Gemma 4; within ``shared_as_published``."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    missing, unexpected = model.load_state_dict(w, strict=False)
    assert not unexpected
    assert missing == ["lm_head.weight"]
    model.tie_weights()
    return model


def gemma4_models(w: Weights, config: dict[str, Any], target: Any) -> tuple[Any, Any]:
    """transformers' own modules of a target of Gemma 4 and of a drafter, for ``gemma4``."""
    with shared_as_published():
        model, drafter = type(target)(target.config).eval(), gemma4_drafter(w, config)
    model.load_state_dict(target.state_dict())
    return model, drafter


@torch.no_grad()
def gemma4(models: tuple[Any, Any], tokens: list[int], drafted: list[int]) -> Tensor:
    """Logits ``[1 + drafted, vocabulary]`` behind a text whose last token is the anchor, and behind each drafted token.

    The target computes the text without the anchor; the drafter takes the keys and values that the target shows, and
    its last state. Tokens of clusters that were not chosen are -inf here.
    """
    model, drafter = models
    out = model(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    state, logits = out.hidden_states[-1][:, -1:], []
    for token in [tokens[-1], *drafted]:
        embedded = model.get_input_embeddings()(torch.tensor([[token]]))
        made = drafter(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=dict(out.shared_kv_states),
        )
        state = made.last_hidden_state
        logits.append(made.logits[0, 0])
    every = torch.stack(logits)
    if drafter.masked_embedding is None:
        return every
    return every.masked_fill(every == every.min(-1, keepdim=True).values, float("-inf"))
