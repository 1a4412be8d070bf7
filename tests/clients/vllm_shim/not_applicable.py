"""vLLM's tests that do not apply: for what Paceline refuses by name, or what a small checkpoint cannot know."""

from __future__ import annotations

import re

_WEIGHTS = "the answer needs a model that knows something"
_LAST_DELTA = "OpenAI's own streams end with an empty delta; there, the last one holds text, too"

REASONS: dict[str, str] = {
    # refused by name, or not there
    r"lora": "no LoRA adapters",
    r"_echo_and_continue_final_message\[test_case0\]": "refused by name: echo in chats",
    r"test_chat_echo.py::test_(prompt|top)_logprobs$": "refused by name: the whole vocabulary's log probabilities",
    r"test_custom_role$": "refused by name: roles that no chat template knows",
    r"test_batched_chat_completions": "no batch of chats in one request: vLLM's own path",
    r"logprob_token_ids": "refused by name: logprob_token_ids",
    r"thinking_token_budget": "refused by name: thinking_token_budget",
    r"kv_transfer": "refused by name: kv_transfer_params",
    r"per_request_metrics": "an option of vLLM's server: --enable-per-request-metrics",
    r"force_include_usage": "an option of vLLM's server: --enable-force-include-usage, ours is set by configuration",
    # the weights
    r"test_complex_message_content$": _WEIGHTS,
    r"test_response_format_json_(object|schema)$": _WEIGHTS,
    r"test_structured_outputs_(choice|json|regex)_chat$": _WEIGHTS + ": two turns have two answers",
    r"test_single_chat_session": "counts tokens of Zephyr's tokenizer",
    r"test_basic.py::test_(chat|instructions|simple_input)$": _WEIGHTS,
    r"test_completion.py::test_single_completion": _WEIGHTS + ": five zeros are no end of a text",
    r"test_named_tool_use$": _WEIGHTS + ": an object of two turns",
    # the form of streams and messages
    r"test_chat_streaming\[": _LAST_DELTA,
    r"test_chat_completion_stream_options\[": _LAST_DELTA,
    r"test_chat_logit_bias_multiple_non_integer_keys$": "a refusal names the first wrong key, not all",
    r"test_(long_seed|empty_prompt|out_of_vocab_token_ids)$": "refused with 400, in other words than vLLM's",
    r"test_check_models$": "root and permission of vLLM's list of models",
    # what vLLM alone has, or its own code over mocks
    r"gpt_oss": "another checkpoint: gpt-oss",
    r"decisions": "no /v1/decisions",
    r"test_batch_completions": "refused by name: beam search",
    r"load_prompt_embeds": "needs vLLM's own code",
    r"test_streaming_errors_preserve_envelope": "needs vLLM's own code",
    r"text_offset_matches_non_stream_with_stop_holdback": "needs vLLM's own code",
}
"""Pattern of a test's id below ``tests/entrypoints/openai`` -> why it does not apply."""


def reason_of(test: str) -> str | None:
    """Why a test does not apply; None: it does."""
    return next((reason for pattern, reason in REASONS.items() if re.search(pattern, test)), None)
