"""``tests.utils`` of vLLM's tests, with servers of Paceline's behind ``RemoteOpenAIServer``."""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

VLLM_PATH = Path(__file__).parent.parent
ROCM_EXTRA_ARGS: list[str] = []

NOT_SERVED = {
    "--enable-prompt-embeds": "prompts as embeddings",
    "--root-path": "a root path, which a proxy in front adds",
    "--watermark-config": "watermarks",
    "--uds": "HTTP over Unix sockets",
    "--limit-mm-per-prompt": "images",
    "--tool-server": "tools of the server's own",
    "--return-tokens-as-token-ids": "tokens named by their ids without being asked",
    "--max-logprobs": "log probabilities of a whole vocabulary",
    "--reasoning-config": "budgets of thoughts",
}
"""Options that ask for what Paceline does not serve -> what that is."""
num_servers = 0
"""Servers that tests have asked for."""


def multi_gpu_only(*, num_gpus: int = 2) -> Any:
    return pytest.mark.skip(reason="needs several GPUs")


def requires_fp8(test: Any) -> Any:
    return pytest.mark.skip(reason="needs a GPU with fp8")(test)


class RemoteOpenAIServer:
    """A server that runs already: of the checkpoint that thinks if the options name a reasoning parser, and one that
    tells its token counts without being asked if the options say so."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model: str, args: list[str], **_: Any) -> None:
        global num_servers
        num_servers += 1
        for option, what in NOT_SERVED.items():
            if option in args:
                pytest.skip(f"not served: {what} ({option})")
        kind = "CLIENTS_THINKING" if "--reasoning-parser" in args else "CLIENTS_PLAIN"
        self.url_root = os.environ["CLIENTS_COUNTING" if "--enable-force-include-usage" in args else kind]
        at = urllib.parse.urlsplit(self.url_root)
        self.host, self.port = at.hostname, at.port

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._options(options))

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 90, **given}
