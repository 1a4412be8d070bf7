"""Tiny models with linear layers, a drafter that knows what their target says, and slots that hold NaN while free."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from tests.model.families import checkpoint, small_config
from transformers import PretrainedConfig, PreTrainedModel

from paceline.drafters.protocol import Candidates, Leaf, Plain
from paceline.model.loading import LoadedModel, prepare
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep, StepPlan

GATED_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")
"""Families with layers of the gated delta rule."""
FAMILIES = (
    *GATED_DELTA,
    *("kimi_linear", "bailing_hybrid", "minimax", "lfm2", "lfm2_moe", "jamba"),
    *("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"),
)
_DELTA = {
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "head_dim": 16, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
_KIMI = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_head": 32, "mamba_d_state": 24}
_SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(GATED_DELTA, _DELTA),
    "kimi_linear": _KIMI | {"linear_head_dim": 16, "linear_num_heads": 4},
    "bailing_hybrid": _KIMI | {"head_dim": 16, "num_attention_heads": 4},
    "minimax": {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "head_dim": 16},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"], "conv_L_cache": 4, "conv_bias": True},
    "bamba": _MAMBA2 | {"mamba_n_groups": 1, "attn_layer_indices": [2], "num_hidden_layers": 3},
    "falcon_h1": _MAMBA2 | {
        "mamba_d_ssm": 128, "num_hidden_layers": 2, "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 2.0, 1.5, 0.7, 1.2], "ssm_in_multiplier": 1.5, "key_multiplier": 0.5,
        "mlp_multipliers": [2.0, 0.5],
    },
    "granitemoehybrid": _MAMBA2 | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3, "mamba_headdim": 32,
        "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 24, "attention_hidden_size": 128,
        "num_key_value_heads": 4, "adapter_rank": 16, "use_shared_attention_adapter": True, "use_mem_rope": True,
    },
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 2},
    "nemotron_h": {
        "mamba_num_heads": 4, "n_groups": 2, "mamba_head_dim": 16, "ssm_state_size": 24, "head_dim": 16,
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    },
}  # fmt: skip
"""Two linear layers and one with attention; heads of 16, and more for values than for keys where that may be."""


def hybrid_config(family: str, **changes: Any) -> PretrainedConfig:
    """A small model with linear layers."""
    sizes = _SIZES[family]
    return small_config(family, **{"num_hidden_layers": len(sizes.get("layer_types", ()))} | sizes | changes)


@functools.cache
def hybrid_model(family: str) -> PreTrainedModel:
    """A random checkpoint of a family in float32, as transformers runs it."""
    return checkpoint(hybrid_config(family))


@functools.cache
def hybrid(family: str = "qwen3_next", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The same, as we run it."""
    return prepare(checkpoint(hybrid_config(family)).to(dtype), compile=False)


def poison(runner: ModelRunner) -> ModelRunner:
    """Fills the slots that are free before each step with NaN."""
    plan, cache = runner.plan, runner.cache

    def poisoned(steps: Sequence[SequenceStep]) -> StepPlan:
        slots = cache.linear
        assert slots is not None
        for layer in cache.linear_pools.values():
            for pool in (layer.states, layer.tails):
                pool[slots.free_states + slots._ended_states] = math.nan
            for pool in layer.rows:
                pool[slots.free_rows + slots.ended] = math.nan
        return plan(steps)

    runner.plan = poisoned  # type: ignore[method-assign]
    return runner


class KnowingDrafter(Plain):
    """Is right with probability ``acceptance``; where it is not, the right token is often its second choice."""

    kind, max_leaves = "knowing", 8

    def __init__(self, texts: Mapping[str, Sequence[int]], vocab_size: int, acceptance: float = 0.7) -> None:
        """``texts``: prompt and output of each session."""
        self._texts, self._vocab_size, self._acceptance = texts, vocab_size, acceptance
        self._contexts: dict[str, list[int]] = {}
        self._log_q = torch.tensor([0.6, 0.2, 0.1, 0.05]).log()

    def open(self, session_id: str, token_ids: Sequence[int], sampler: Any, salt: str = "") -> None:
        self._contexts[session_id] = list(token_ids)

    def ready(self, session_id: str) -> bool:
        return True

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        rows = []
        for leaf in leaves:
            position, text = len(self._contexts[leaf.session_id]) + len(leaf.path), self._texts[leaf.session_id]
            draw = crc32(f"{leaf.session_id} {position} {leaf.path}".encode()) / 2**32
            truth = text[position] if position < len(text) else 0
            order = [(truth + 1 + position + i) % self._vocab_size for i in range(3)]
            order.insert(0 if draw < self._acceptance else 1, truth)
            rows.append(order)
        return Candidates(torch.tensor(rows), self._log_q.expand(len(leaves), -1).clone())

    def advance(self, session_id: str, token_ids: Sequence[int], node_ids: Any, kept: Any) -> None:
        self._contexts[session_id].extend(token_ids)

    def close(self, session_id: str) -> None:
        self._contexts.pop(session_id, None)
