"""Acceptance of a draft token given its ancestors, where nothing was measured: published figures, and our own.

Published accept lengths L of proposals of K tokens are turned into the a of L = (1 - a^(K + 1)) / (1 - a)
(2211.17192, equation 1). Their targets and texts differ from yours: use them to rank methods, not as a promise.
"""

from __future__ import annotations

from typing import Literal, get_args

Text = Literal["chat", "code", "edits"]
"""Kinds of text: conversation and prose; source code; output that repeats its input, such as edits of a file."""
TEXTS: tuple[Text, ...] = get_args(Text)

_PAIR = "2211.17192, table 2: T5-small for T5-XXL, 0.53 to 0.75"
_EDITS = "benchmarks/results/suffix.txt: files that an agent writes again, K = 8"
_LOOKUP = "Spec-Bench: prompt lookup is 1.65 times as fast as plain decoding"
ASSUMED: dict[str, dict[Text, tuple[float, str]]] = {
    "model": {"chat": (0.65, _PAIR)},
    "draft_model": {"chat": (0.65, _PAIR)},
    "cascade": {"chat": (0.65, f"{_PAIR}; its first drafter is a model")},
    "lookahead": {
        "chat": (0.28, "benchmarks/results/methods.txt: greedy text of the embedded target, 1.37 tokens a step")
    },
    "ngram": {"chat": (0.4, _LOOKUP), "edits": (0.91, f"{_EDITS}, 5.28 accepted a round")},
    "suffix": {"chat": (0.4, _LOOKUP), "edits": (0.97, f"{_EDITS}, 6.96 accepted a round")},
    "medusa": {"chat": (0.5, "Spec-Bench, Vicuna-7B: 2.31 tokens a step, with trees")},
    "mlp_speculator": {"chat": (0.5, "as Medusa")},
    "mtp": {"chat": (0.7, "one module used for 7 tokens: 3.20 tokens a step")},
    "gemma4_assistant": {
        "chat": (0.72, "Gemma 4 26B-A4B in vLLM, K = 4: 0.84, 0.60, 0.39 and 0.27 accepted at depths 1 to 4")
    },
    "eagle": {"chat": (0.6, "Spec-Bench, Vicuna-7B: 3.57 tokens a step, with trees")},
    "eagle3": {"chat": (0.67, "MT-Bench, K = 3: 2.60 (Llama-3.1-8B) and 2.26 (Qwen3-8B) tokens a step")},
    "peagle": {
        "chat": (0.65, "model card of gpt-oss-120b-p-eagle: MT-Bench, K = 5, 2.68 tokens a step"),
        "code": (0.74, "model card of gpt-oss-120b-p-eagle: HumanEval, K = 5, 3.15 tokens a step"),
    },
    "dflash": {
        "chat": (0.74, "DFlash 2 for Qwen3.8-27B, K = 7: 3 to 4 tokens a step of prose"),
        "code": (0.87, "2606.18394: DFlash for Qwen3-8B, K = 15: 6.9 tokens a step of mathematics, with chains"),
    },
    "dspark": {"chat": (0.87, "DSpark for Kimi-K3, K = 7: 5.2 tokens a step; of texts that are not named")},
    "jetspec": {"chat": (0.74, "as DFlash"), "code": (0.87, "as DFlash")},
    "speculative_streaming": {"chat": (0.5, "as Medusa: all tokens of a round come from one pass")},
    "early_exit": {"chat": (0.62, "the embedded target, not trained for it, layer 6 of 8: 1.41 of 4 tokens accepted")},
}
"""Assumed acceptance by kind of drafter and text; a kind of text that is missing counts as chat."""


def assumed(kind: str, text: Text) -> tuple[float, str]:
    """(acceptance, its source) of a kind of drafter, ``draft_config.kind`` or ``heads[].method``, for a kind of text.

    Raises KeyError for a kind of which nothing is known.
    """
    known = ASSUMED[kind]
    value, source = known.get(text) or known["chat"]
    return value, f"assumed, {source}"
