"""A checkpoint's generation_config.json: defaults for parameters that a request omits, and settings that are not
honored, which a warning names when the checkpoint is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from paceline.errors import ConfigError
from paceline.types import SamplingParams

_PARAMETERS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
}
"""Key of the file -> name of the parameter in ``SamplingParams``."""
_FORBIDDEN = ("bad_words_ids", "suppress_tokens")
"""Keys that forbid tokens: they become ``bad_words``."""
HONORED = frozenset({*_PARAMETERS, *_FORBIDDEN, "do_sample", "eos_token_id"})
"""Keys that are honored."""
NOT_HONORED: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "forced_decoder_ids": ([],),
    "force_words_ids": ([],),
    "constraints": ([],),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "diversity_penalty": (0,),
    "penalty_alpha": (0,),
    "dola_layers": (),
    "typical_p": (1,),
    "top_h": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "no_repeat_ngram_size": (0,),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "watermarking_config": (),
    "token_healing": (False,),
    "max_time": (),
}
"""Keys that would change the output -> values other than null with which they change nothing."""
WITHOUT_EFFECT = frozenset(
    {
        *("max_length", "min_length"),  # of prompt and answer together, with meaningless defaults
        *("early_stopping", "length_penalty"),  # of beams
        *("encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "decoder_start_token_id"),  # of encoders
        *("pad_token_id", "bos_token_id", "renormalize_logits", "remove_invalid_values"),
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config", "return_dict_in_generate"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight", "speculation_type", "use_mtp"),
        *("transformers_version", "_from_model_config"),
    }
)
"""Keys that change no token here: they set encoders, caches, or transformers' own speculation and outputs."""


def sampling_defaults(content: Mapping[str, Any], path: str, vocab_size: int) -> SamplingParams:
    """Returns the parameters that the file sets, as vLLM and transformers read them; the others stay unset.

    ``do_sample: false`` means temperature 0; ``true`` without a temperature means 1. Forbidden tokens outside the
    vocabulary are left out. ``path``: of the checkpoint, for the error.

    Raises:
        ConfigError: a value is not allowed.
    """
    found = {name: content[key] for key, name in _PARAMETERS.items() if content.get(key) is not None}
    if content.get("do_sample") is True:
        found.setdefault("temperature", 1.0)
    elif content.get("do_sample") is False:
        found["temperature"] = 0.0
    try:
        if words := [*(content.get("bad_words_ids") or ()), *([one] for one in content.get("suppress_tokens") or ())]:
            found["bad_words"] = tuple(tuple(word) for word in words if all(one < vocab_size for one in word))
        return SamplingParams(**found)
    except TypeError:
        name, value, problem = _FORBIDDEN[0], content.get(_FORBIDDEN[0]), "lists of token ids are needed"
    except ValidationError as error:
        first = error.errors()[0]
        name, value, problem = ".".join(map(str, first["loc"])), first["input"], first["msg"]
    where = f"in the generation_config.json of {path!r}"
    raise ConfigError(f"{name} is {value!r} {where}: {problem}; generation_config: none ignores the file")


def not_honored(content: Mapping[str, Any]) -> list[str]:
    """Returns each setting that would change the output and is not honored, as ``key is value``."""
    found = []
    for key, value in content.items():
        if value is None or key in HONORED or key in WITHOUT_EFFECT:
            continue
        if value not in NOT_HONORED.get(key, ()):
            found.append(f"{key} is {value!r}"[:80])
    return found
