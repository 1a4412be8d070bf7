"""The drafting methods that are served: where each runs, what it reads, and the configuration that chooses it.

One list, from which docs/methods.md is written, which ``tests/lossless/test_methods.py`` runs, and from which
``paceline advise`` chooses. A new method is a new entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from paceline.config.options import REMOTE_METHODS
from paceline.types import Mode


class Place(StrEnum):
    """The place that a drafter runs in."""

    POOL = "draft pool"
    """In draft replicas, with devices of their own."""
    TARGET = "target"
    """In each target replica."""


@dataclass(frozen=True, slots=True)
class Method:
    """One drafting method in one place."""

    name: str
    """Unique, as the table has it."""
    place: Place
    kind: str
    """``draft_config.kind`` in the draft pool, ``heads[].method`` in the target; empty: it needs no configuration."""
    source: str
    """The paper or project that it is from."""
    reads: str
    """The formats of its checkpoint; empty: it has none."""
    when: str
    """The texts and services that it is for."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options beside the checkpoint, by the keys of the configuration: of a head in the pool its method."""
    mode: Mode = Mode.OVERLAPPED
    """The mode of the requests."""

    @property
    def needs_model(self) -> bool:
        """True if it reads a checkpoint that is not the target's own."""
        return bool(self.reads) and "mtp" not in (self.kind, self.options.get("method"))

    def configuration(self, target: str, model: str | None = None) -> dict[str, Any]:
        """The configuration of a service with this drafter alone, as ``ServiceConfig.parse`` takes it.

        ``target`` and ``model``: directories of checkpoints, or ids that transformers resolves. ``model`` is left out
        where the method needs none.
        """
        assert model is not None or not self.needs_model, f"{self.name} reads a checkpoint"
        engine: dict[str, Any] = {}
        draft: dict[str, Any] | None = None
        if self.place is Place.TARGET and self.kind:
            engine["heads"] = [{"method": self.kind, **({} if model is None else {"model": model}), **self.options}]
        elif self.place is Place.POOL:
            draft = {"kind": self.kind}
            if model is not None and self.kind != "head":
                draft["model_loading_config"] = {"model_id": model}
            if self.options:
                draft["engine_kwargs"] = dict(self.options)
            if model is not None and self.kind == "head":
                draft["engine_kwargs"]["model"] = model
            if self.kind == "cascade":  # its first drafter is the model
                first = draft.pop("model_loading_config")["model_id"]
                draft["engine_kwargs"]["drafters"] = [{"model": first}, *self.options["drafters"]]
        target_config: dict[str, Any] = {"model_loading_config": {"model_id": target}}
        if engine:
            target_config["engine_kwargs"] = engine
        return {"target_config": target_config, "draft_config": draft}


_TOKENS: Mapping[str, Any] = {"num_speculative_tokens": 4}

_PLACED: tuple[Method, ...] = (
    Method(
        "draft model, overlapped",
        Place.POOL,
        "model",
        "speculative speculative decoding (2603.03251)",
        "any causal language model with the target's tokenizer",
        "general text where a smaller model of the family exists; one draft replica serves several targets",
    ),
    Method(
        "draft model, sequential",
        Place.POOL,
        "model",
        "speculative decoding (2211.17192, 2302.01318)",
        "any causal language model with the target's tokenizer",
        "comparisons with other servers: `mode: sequential` in the request",
        mode=Mode.SEQUENTIAL,
    ),
    Method(
        "draft of another vocabulary",
        Place.POOL,
        "model",
        "token-level intersection (2502.05202)",
        "any causal language model that shares most tokens of ordinary text with the target",
        "targets for which no draft was trained",
        {"vocabulary": "shared"},
    ),
    Method(
        "PARD",
        Place.POOL,
        "model",
        "PARD (2504.18583)",
        "a causal language model whose config.json names a `pard_token`",
        "several tokens for the time of one, where such a draft exists",
        {"parallel_tokens": 8},
    ),
    Method(
        "cascade, vertical",
        Place.POOL,
        "cascade",
        "cascade speculative drafting (2312.11462)",
        "any causal language model with the target's tokenizer",
        "a draft model that is slow itself: n-grams guess for it",
        {"drafters": [{"kind": "ngram"}], "lengths": [4]},
    ),
    Method(
        "n-grams",
        Place.POOL,
        "ngram",
        "prompt lookup decoding (Saxena 2023)",
        "",
        "output that repeats its input: summaries, edits, extraction; no model, no training",
    ),
    Method(
        "suffixes",
        Place.POOL,
        "suffix",
        "suffix decoding (2411.04975)",
        "",
        "agents that write long passages again, within a session or across sessions (`shared_tokens`, `corpus`)",
    ),
    Method(
        "plugin",
        Place.POOL,
        "plugin",
        "your own ([example](own-drafters.md))",
        "",
        "whatever you know of your texts",
        {"drafter": "bigrams"},
    ),
    Method(
        "prompt lookup",
        Place.TARGET,
        "",
        "prompt lookup decoding (Saxena 2023)",
        "",
        "always on with `adaptive`: it serves what the others miss, at no cost",
    ),
    Method(
        "Medusa",
        Place.TARGET,
        "medusa",
        "Medusa (2401.10774)",
        "FasterDecoding, Medusa 2 without LM heads, vLLM's blocks",
        "where such heads exist for the target; the cheapest ones to train",
        _TOKENS,
    ),
    Method(
        "MLP speculator",
        Place.TARGET,
        "mlp_speculator",
        "MLP speculators (2404.19124)",
        "IBM's, tied or not",
        "where such heads exist for the target: the Granite and Llama families",
        _TOKENS,
    ),
    Method(
        "MTP",
        Place.TARGET,
        "mtp",
        "DeepSeek-V3 (2412.19437)",
        "the target's own files: DeepSeek, GLM, Qwen; or a folder of its modules alone",
        "the first choice where the target comes with such modules",
        _TOKENS,
    ),
    Method(
        "EAGLE",
        Place.TARGET,
        "eagle",
        "EAGLE (2401.15077), EAGLE-2 (2406.16858)",
        "SafeAILab's",
        "where no EAGLE-3 exists for the target",
        _TOKENS,
    ),
    Method(
        "EAGLE-3",
        Place.TARGET,
        "eagle3",
        "EAGLE-3 (2503.01840)",
        "SafeAILab's, vLLM's, the speculators library's",
        "general text on dense targets; the format that most published heads have",
        _TOKENS,
    ),
    Method(
        "P-EAGLE",
        Place.TARGET,
        "peagle",
        "P-EAGLE (2602.01469)",
        "as EAGLE-3, with `mask_hidden`",
        "as EAGLE-3, at many tokens a round: all of them come from one pass",
        _TOKENS,
    ),
    Method(
        "DFlash, DFlash 2",
        Place.TARGET,
        "dflash",
        "DFlash (2602.06036), DFlash 2 (z-lab 2026)",
        "z-lab's, the speculators library's",
        "general text where such a head exists for the target: several layers, all tokens from one pass",
        _TOKENS,
    ),
    Method(
        "DSpark",
        Place.TARGET,
        "dspark",
        "DSpark (DeepSpec 2026)",
        "DeepSpec's, the speculators library's",
        "as DFlash; a head that says how sure it is, and ends its proposals by that",
        _TOKENS,
    ),
    Method(
        "JetSpec",
        Place.TARGET,
        "jetspec",
        "JetSpec (2606.18394)",
        "as DFlash",
        "as DFlash, where many rows are cheap: it is trained for trees",
        _TOKENS,
    ),
    Method(
        "early exit",
        Place.TARGET,
        "early_exit",
        "LayerSkip (2404.16710)",
        "",
        "targets that were trained for it, with layer dropout and an exit loss; no weights of its own",
        {"boundaries": [6], **_TOKENS},
    ),
    Method(
        "early exit, trained",
        Place.TARGET,
        "early_exit",
        "Kangaroo (2404.18911)",
        "an exit head of `paceline train-head early_exit`",
        "targets that were not trained to exit early: a small adapter is, and nothing of the target changes",
        _TOKENS,
    ),
    Method(
        "speculative streaming",
        Place.TARGET,
        "speculative_streaming",
        "speculative streaming (2402.11131)",
        "a head of `paceline train-head speculative_streaming`",
        "targets of many layers, of which the last few draft with low-rank additions: all tokens come from one pass",
        _TOKENS,
    ),
    Method(
        "Gemma 4's drafter",
        Place.TARGET,
        "gemma4_assistant",
        "Gemma 4 (Google 2026), by the reference in transformers",
        "`google/gemma-4-*-it-assistant`: `gemma4_assistant`, `gemma4_unified_assistant`",
        "the first choice for a Gemma 4: small, and without a cache of its own",
        _TOKENS,
    ),
    Method(
        "lookahead",
        Place.TARGET,
        "lookahead",
        "lookahead decoding (2402.02057)",
        "",
        "targets whose rows are nearly free, on greedy text that comes back to itself; no model, no training",
        {"lookahead": {"window": 5, "ngram": 4, "guesses": 5}, **_TOKENS},
    ),
    Method(
        "suffixes, in the target",
        Place.TARGET,
        "suffix",
        "suffix decoding (2411.04975)",
        "",
        "the same texts without a draft pool, or beside a draft, for what that misses",
        _TOKENS,
    ),
    Method(
        "draft model, co-located",
        Place.TARGET,
        "draft_model",
        "speculative decoding (2211.17192, 2302.01318)",
        "any causal language model with the target's tokenizer",
        "a draft so small that it needs no device of its own",
        _TOKENS,
    ),
)
"""Those that need no hidden states, or are in the target that has them."""

METHODS: tuple[Method, ...] = (
    *_PLACED,
    *(
        replace(
            method,
            name=f"{method.name}, in the pool",
            place=Place.POOL,
            kind="head",
            when="targets whose devices have no room for it, or no time",
            options={"method": method.kind},
        )
        for method in _PLACED
        if method.kind in REMOTE_METHODS
    ),
)
"""All of them, in the order of the table. Heads of the pool read the states that the target sends."""


def method_named(name: str) -> Method:
    """The entry of this name. Raises KeyError if there is none."""
    return {method.name: method for method in METHODS}[name]
