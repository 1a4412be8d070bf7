"""The part of vLLM that a benchmark uses: an engine that counts on from the last token of a prompt."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

__version__ = "0.0"
SamplingParams = SimpleNamespace


class LLM:
    """Steps bring one token to each request, or K + 1 with a draft model."""

    def __init__(self, model: str, speculative_config: dict[str, Any] | None = None, **options: Any) -> None:
        if "broken" in model:
            raise ValueError(f"{model} cannot be read")
        assert options["dtype"] == "bfloat16"
        assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
        self.llm_engine = self
        self._a_step = 1 + (speculative_config or {}).get("num_speculative_tokens", 0)
        self._open: dict[str, tuple[int, int, list[int]]] = {}

    def add_request(self, request_id: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert sampling.ignore_eos
        self._open[f"{request_id}-1a2b"] = prompt["prompt_token_ids"][-1], sampling.max_tokens, []

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def step(self) -> list[Any]:
        time.sleep(0.002)
        outputs = []
        for name, (last, most, made) in list(self._open.items()):
            if last == 13:
                os._exit(3)
            made += [last + len(made) + 1 + i for i in range(min(self._a_step, most - len(made)))]
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(made))]))
            if len(made) == most:
                del self._open[name]
        return outputs
