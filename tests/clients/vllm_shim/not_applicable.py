"""vLLM's tests of its HTTP API that do not apply, and those that apply and fail because Paceline means to differ.

A test that asks no server is none of the HTTP API: it is not counted, and needs no line here.
"""

from __future__ import annotations

import re

NOT_APPLICABLE: dict[str, str] = {
    # features that docs/limits.md says are missing
    r"zephyr-lora|test_check_models$": "LoRA adapters",
    r"test_batch_completions": "beam search",
    r"thinking_token_budget": "budgets of thoughts",
    r"kv_transfer": "KV caches from another server",
    r"test_background": "responses in the background",
    r"namespace_tool": "namespaces of tools",
    r"decisions": "classification by /v1/decisions",
    r"translategemma|test_openapi_stateless": "images",
    r"with_prompt_embeds": "prompts as embeddings",
    # what the test needs of the model
    r"test_single_chat_session": "the numbers of Zephyr's tokenizer",
    r"gpt_oss": "a checkpoint of gpt-oss",
    r"test_complex_message_content$|test_response_format_json_(object|schema)$": "a model that can reckon",
    r"test_basic.py::test_(simple_input|instructions)$|test_lm_eval_accuracy": "a model that can reckon",
    r"n_parameter_non_streaming|test_completion_stream_options_and_logprobs_with_long|test_comparison_with_prompt": (
        "a model whose answer is never empty"
    ),
    r"streaming_expected_arguments": "a model that chooses two tools by itself",
}
"""Pattern of a test's id below ``tests/entrypoints/openai`` -> the feature or the model that it needs."""

DIFFERENT: dict[str, str] = {
    r"test_custom_role$": "a role that the chat template drops is refused",
    r"test_long_seed$": "seeds up to 2^64 - 1 are allowed",
    r"test_invocations$": "a choice tells how it speculated, with its seed and its times",
    r"test_empty_prompt$": "refused with status 400, in other words",
}
"""Pattern of a test's id -> why it fails, although it applies."""


def reason_of(test: str, among: dict[str, str]) -> str | None:
    """The reason of a test; None: it has none."""
    return next((reason for pattern, reason in among.items() if re.search(pattern, test)), None)
