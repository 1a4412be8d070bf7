"""Fields of bodies that Paceline has no parameter for: what clients of other servers send.

A field that cannot change the answer is accepted. One that would change it is refused by its name, unless its value
changes nothing. An unknown field is accepted, named in a header of the answer, and logged once.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator

from paceline.errors import InvalidRequestError
from paceline.errors.refusals import Fault, shown

log = logging.getLogger(__name__)

HEADER = "x-paceline-ignored-fields"
"""Names the fields of a request that were ignored: a list of RFC 9651, with suggestions as parameters."""

Values = tuple[Any, ...]
ANY: Values = (...,)
"""Every value changes nothing."""
NOTHING: Values = ()
"""Every value but null has an effect."""
OFF: Values = (False, 0, "", [], {})
"""Values that switch a feature off."""
NOTED = "noted"
"""Marks the served values of a field. Any other value has no effect, and the response's header names it."""

MAX_NAMED = 20
_MAX_LOGGED = 1000
_LONGEST_NAME = 64


def _each(names: str, values: Values) -> dict[str, Values]:
    return dict.fromkeys(names.split(), values)


_USE = {
    "max_new_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "min_length": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "do_sample": "temperature",
    "no_stop_trim": "include_stop_str_in_output",
    "stop_sequences": "stop",
    "return_full_text": "echo",
    "truncate": "truncate_prompt_tokens",
    "return_tokens": "return_token_ids",
    "n_probs": "logprobs",
    "format": "response_format",
    "num_return_sequences": "n",
    "prefix": "continue_final_message",
    "partial": "continue_final_message",
    "extra_body": "its fields in the body itself",
}
"""Field of another server -> the parameter that does the same here."""

_BOOKKEEPING = {
    **_each("user metadata safety_identifier prompt_cache_key prompt_cache_retention", ANY),  # OpenAI
    "service_tier": ("auto", "default", NOTED),
    "store": (False, NOTED),
    # vLLM, SGLang
    **_each("session_id rid extra_key custom_labels stream_interval return_token_offsets return_mm_kwargs", ANY),
    **_each("media_io_kwargs mm_processor_kwargs routed_experts_prompt_start routed_experts_start_len", ANY),
    **_each("routed_dp_rank disagg_prefill_dp_rank data_parallel_rank guided_decoding_backend ngram_corpus_id", ANY),
    **_each("max_dynamic_patch min_dynamic_patch stream_reasoning return_cached_tokens_details", ANY),
    "priority": (0, NOTED),
    # llama.cpp, Ollama
    **_each("cache_prompt id_slot slot_id n_cache_reuse n_keep n_discard timings_per_token return_progress", ANY),
    **_each("response_fields backend_sampling thinking_forced_open keep_alive num_ctx num_keep num_thread", ANY),
    **_each("num_gpu main_gpu num_batch use_mmap use_mlock numa low_vram f16_kv vocab_only shift logits_all", ANY),
    **_each("speculative.n_max speculative.n_min speculative.p_min speculative.type", ANY),
    # LiteLLM, Open WebUI, OpenRouter
    **_each("litellm_metadata litellm_params litellm_call_id litellm_trace_id litellm_session_id tags caching", ANY),
    **_each("proxy_server_request drop_params allowed_openai_params api_key api_base base_url api_version", ANY),
    **_each("custom_llm_provider extra_headers extra_query num_retries max_retries timeout cache no-log", ANY),
    **_each("chat_id message_id parent_id parent_message user_message model_item background_tasks variables", ANY),
    **_each("id title features provider usage", ANY),
    **_each("files filter_ids tool_ids tool_servers params transforms plugins", ([], {}, NOTED)),
}
"""Accounts, scheduling, caches and places of prompts: none of them changes the text of an answer."""

_SAMPLERS = {
    # of vLLM and OpenAI
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "prompt_logprobs": NOTHING,
    "best_of": (1,),
    "thinking_token_budget": (-1,),
    **_each("repetition_detection vllm_xargs kv_transfer_params ec_transfer_params logits_processors", OFF),
    **_each("logits_processor watermarking watermark return_prompt_text", OFF),
    **_each("prompt_embeds guided_whitespace_pattern", NOTHING),
    # of SGLang
    **_each("stop_regex custom_logit_processor custom_params lora_path session_params images_config task", OFF),
    **_each("no_stop_trim return_hidden_states return_routed_experts return_meta_info input_ids", OFF),
    **_each("return_prompt_token_ids use_audio_in_video bootstrap_host bootstrap_port bootstrap_room", OFF),
    "separate_reasoning": (True,),
    # of llama.cpp and Ollama
    "n_predict": (-1,),
    "num_predict": (-1,),
    **_each("typical_p typ_p tfs_z tfs repeat_penalty", (1,)),
    **_each("top_a mirostat mirostat_mode xtc_probability dry_multiplier dynatemp_range smoothing_factor", (0,)),
    **_each("mirostat_tau mirostat_eta xtc_threshold dry_base dry_allowed_length dry_penalty_last_n dry_range", ANY),
    **_each("dry_sequence_breakers dynatemp_exponent smoothing_curve repeat_last_n penalize_nl", ANY),
    **_each("penalize_newline min_keep", ANY),
    "top_n_sigma": (-1, 0),
    "reasoning_format": ("auto", "deepseek", "deepseek-legacy"),
    "parse_tool_calls": (True,),
    **_each("samplers sampler_order n_probs post_sampling_probs lora t_max_predict_ms t_max_prompt_ms n_indent", OFF),
    **_each("image_data images context raw template system format return_tokens", OFF),
    # of TGI and transformers
    **_each("max_new_tokens max_length do_sample", NOTHING),
    **_each("min_new_tokens min_length no_repeat_ngram_size penalty_alpha eta_cutoff epsilon_cutoff", (0,)),
    **_each("num_beams num_return_sequences encoder_repetition_penalty guidance_scale", (1,)),
    **_each("decoder_input_details return_full_text top_n_tokens truncate adapter_id negative_prompt", OFF),
    **_each("stop_sequences ban_eos_token custom_token_bans dynamic_temperature temperature_last", OFF),
    "details": (False, NOTED),
    # of other services
    **_each("extra_body data_sources safe_prompt random_seed mock_response prompt_mode thinking_budget", OFF),
}
"""Fields that would change the answer -> the values with which they do not."""

INERT: Mapping[str, Values] = MappingProxyType({**_BOOKKEEPING, **_SAMPLERS})
"""Field of a body that has no parameter here -> its values that change nothing; null is always one."""


class Ignored:
    """The fields of one request that were accepted and ignored."""

    def __init__(self, *, strict: bool = False) -> None:
        """``strict``: such a field is refused instead."""
        self._strict = strict
        self._names: dict[str, str | None] = {}

    def note(self, name: str, value: Any, known: Iterable[str] = ()) -> None:
        """Records a field by its place without indices. Raises InvalidRequestError if unknown fields are refused.

        ``known``: names of the parameters in this place, of which the nearest one is suggested.
        """
        if not self._strict and (name in self._names or len(self._names) > MAX_NAMED):  # no more are shown
            return
        place, _, last = name.rpartition(".")
        close = difflib.get_close_matches(last[:_LONGEST_NAME], list(known), n=1, cutoff=0.8)
        if self._strict:
            hint = f"did you mean {close[0]}?" if close else "server.strict_fields refuses unknown fields"
            raise InvalidRequestError(f"{name[:_LONGEST_NAME]} is {shown(value)}, but there is no such key: {hint}")
        self._names.setdefault(name, f"{place}.{close[0]}".lstrip(".") if close else None)

    @property
    def header(self) -> dict[str, str]:
        """The header that names the fields; empty if there are none."""
        if not self._names:
            return {}
        named = [
            _token(name) + ("" if close is None else f";did_you_mean={_token(close)}")
            for name, close in list(self._names.items())[:MAX_NAMED]
        ]
        return {HEADER: ", ".join(named + ["..."] * (len(self._names) > MAX_NAMED))}

    def warn(self) -> None:
        """Logs each field that this process has not logged yet."""
        for name, close in self._names.items():
            if name in logged_fields or len(logged_fields) >= _MAX_LOGGED:
                continue
            logged_fields.add(name)
            hint = "" if close is None else f" (did you mean {close}?)"
            log.warning("requests hold the field %s, which is ignored%s", _token(name), hint)


logged_fields: set[str] = set()


def _token(name: str) -> str:
    """A name as a header and a log line may hold it: short, in ASCII, quoted unless it is a token."""
    name = name[:_LONGEST_NAME]
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.:-]*", name):
        return name
    return "".join(c if c.isprintable() else " " for c in json.dumps(name))


def check(name: str, value: Any, inert: Values, ignored: Ignored) -> None:
    """Raises Fault for a value that would have to change something."""
    if ... in inert or any(value == item and isinstance(value, bool) is isinstance(item, bool) for item in inert):
        return
    if NOTED in inert:
        ignored.note(name, value)
        return
    if (ours := _USE.get(name.rpartition(".")[2])) is not None:
        raise Fault(name, f"is {shown(value)}: use {ours}")
    if not inert or inert is OFF:
        raise Fault(name, f"is {shown(value)}: it is not supported")
    raise Fault(name, f"is {shown(value)}: only {' or '.join(map(shown, inert))} is supported")


class BodyPart(BaseModel):
    """A part of a body, of which null fields are absent and unknown ones ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    PLACE: ClassVar[str] = ""
    """Where parts of this kind appear in a body, such as ``messages``."""
    INERT: ClassVar[Mapping[str, Values]] = MappingProxyType({})
    """Field that has no meaning here -> its values that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _only_known(cls, data: Any, info: ValidationInfo) -> Any:
        ignored = info.context if isinstance(info.context, Ignored) else Ignored()
        return only_known(cls, data, ignored) if isinstance(data, dict) else data


_COMMON = _each(
    "cache_control provider_specific_fields extra_content extra_body defer_loading annotations citations id index", ANY
)
"""Marks of prompt caches, signatures of other services and the like, which clients hang on any part."""


def only_known(kind: type[BodyPart], data: Mapping[str, Any], ignored: Ignored) -> dict[str, Any]:
    """The fields of a part that have a meaning. Raises Fault for one that is not served."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        if value is None:
            continue
        if name in kind.model_fields or kind.model_config.get("extra") == "allow":
            found[name] = value
        else:
            disregard(f"{kind.PLACE}.{name}", value, kind.INERT, ignored, kind.model_fields)
    return found


def disregard(name: str, value: Any, inert: Mapping[str, Values], ignored: Ignored, known: Iterable[str] = ()) -> None:
    """Leaves out a field of a part, by its place. Raises Fault for one that would change the answer."""
    last = name.rpartition(".")[2]
    if last in inert:
        check(last, value, inert[last], ignored)
    elif last not in _COMMON:
        ignored.note(name, value, known)
