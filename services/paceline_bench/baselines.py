"""transformers in a process of its own with one torch thread, in the modes that it has.

    transformers   ``generate``; several prompts are one static batch, padded on the left
    assisted       ``generate`` with the draft as ``assistant_model``; one prompt after the other, it takes no batch
    lookup         ``generate`` with ``prompt_lookup_num_tokens``; one prompt after the other
    continuous     continuous batching over its paged cache
    universal      as assisted, across tokenizers: with the tokenizers of both
    early_exit     ``generate`` with ``assistant_early_exit`` at three quarters of the target's layers
    mtp            ``generate`` with ``use_mtp``

Only `paceline bench compare` uses the last three.
The process is pinned like the target engine. It waits in ``recv`` between requests, so it is idle while the
engines run, and they are idle while it runs.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint.files import Checkpoint
from paceline.config import DType
from paceline.errors import EngineError
from paceline_bench.children import Child
from paceline_bench.jobs import Reply
from paceline_bench.records import RoundRecord

MODES = ("transformers", "assisted", "lookup", "continuous")
NAMES = {
    "transformers": "transformers generate",
    "assisted": "assisted generate",
    "lookup": "prompt lookup generate",
    "continuous": "continuous batching",
}
"""Names in reports."""
_LOOKUP_TOKENS = 10
"""The value of transformers' documentation."""
_EXIT = 3, 4
"""The share of the layers below an early exit."""
_BLOCK_TOKENS = 256
"""Page size of transformers' cache."""
_BATCH_TOKENS = 512
_RESULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Prompts that are submitted together."""

    mode: str
    """Mode of transformers: one of ``MODES``, or ``universal``, ``early_exit`` or ``mtp``."""
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    """Limit of each prompt."""
    temperature: float
    seed: int


class Streamer:
    """Notes when the tokens of ``batch`` prompts arrive; the first call brings the prompts."""

    def __init__(self, batch: int = 1) -> None:
        self._batch = batch
        self.times_s: list[float] = []
        self.sizes: list[int] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Called by transformers with the tokens of a step."""
        if self._prompt_seen:
            self.times_s.append(time.perf_counter())
            self.sizes.append(int(value.numel()) // self._batch)
        self._prompt_seen = True

    def end(self) -> None:
        """Called by transformers after the last token."""


class GenerateProcess(Child):
    """Client of the process. A context manager."""

    def __init__(self, target: str, draft: str | None, dtype: DType, core: int | None) -> None:
        super().__init__("transformers", core, _transformers, target, draft, dtype)

    def generate(self, request: GenerateRequest) -> list[Reply]:
        """Runs a request; one reply per prompt.

        Raises:
            EngineError: the process failed.
        """
        self.send(request)
        replies: list[Reply] = self.receive()
        return replies


@contextlib.contextmanager
def _transformers(target: str, draft: str | None, dtype: DType) -> Iterator[Callable[[GenerateRequest], list[Reply]]]:
    import torch
    from transformers.utils import logging as hf_logging

    from paceline.model.device import resolve_dtype
    from paceline.model.loading import load_pretrained

    hf_logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # requests carry their errors
    torch.set_num_threads(1)
    kind = resolve_dtype(dtype, torch.device("cpu"))
    models: list[Any] = [load_pretrained(Checkpoint.open(path), kind).eval() for path in (target, draft) if path]
    for model in models:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    yield lambda request: _generate(models, request)


def _options(models: Sequence[Any], mode: str) -> dict[str, Any]:
    """Arguments of ``generate`` that choose one of the modes that take one prompt after the other."""
    if mode == "assisted":
        return {"assistant_model": models[1]}
    if mode == "universal":
        from transformers import AutoTokenizer

        paths = [model.name_or_path for model in models]
        tokenizer, other = (AutoTokenizer.from_pretrained(path, trust_remote_code=False) for path in paths)
        return {"assistant_model": models[1], "tokenizer": tokenizer, "assistant_tokenizer": other}
    if mode == "early_exit":
        part, of = _EXIT
        return {"assistant_early_exit": models[0].config.num_hidden_layers * part // of}
    return {"use_mtp": True} if mode == "mtp" else {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}


def _generate(models: Sequence[Any], request: GenerateRequest) -> list[Reply]:
    if request.mode == "continuous":
        return _continuous(models[0], request)
    started_s = time.perf_counter()
    if request.mode == "transformers":
        return _batch(models[0], request, {}, started_s)
    options = _options(models, request.mode)
    replies: list[Reply] = []
    for i, (prompt, max_tokens) in enumerate(zip(request.prompts, request.max_tokens, strict=True)):
        one = GenerateRequest(request.mode, (prompt,), (max_tokens,), request.temperature, request.seed + i)
        replies += _batch(models[0], one, options, started_s)
    return replies


def _sampling(temperature: float) -> dict[str, Any]:
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return {"do_sample": False}


def _reply(token_ids: Sequence[int], sizes: Sequence[int], times_s: Sequence[float], started_s: float) -> Reply:
    """Reply with a round per forward: ``sizes`` tokens each, seen at ``times_s``."""
    rounds = tuple(RoundRecord(0, 0, size, "", at - started_s) for size, at in zip(sizes, times_s, strict=True))
    return Reply.timed_by_rounds(tuple(token_ids), rounds)


def _batch(model: Any, request: GenerateRequest, options: dict[str, Any], started_s: float) -> list[Reply]:
    """One call of ``generate``. A prompt that wants fewer tokens than others gets its own share of them."""
    import torch

    longest = max(map(len, request.prompts))
    padding = [longest - len(prompt) for prompt in request.prompts]
    ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, request.prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])  # [prompts, longest]
    streamer = Streamer(len(request.prompts))
    torch.manual_seed(request.seed)
    options = {**_sampling(request.temperature), **options, "max_new_tokens": max(request.max_tokens)}
    output = model.generate(ids, attention_mask=mask, streamer=streamer, **options)
    replies = []
    for row, wanted in zip(output[:, longest:].tolist(), request.max_tokens, strict=True):
        sizes, times_s, left = [], [], wanted
        for size, at_s in zip(streamer.sizes, streamer.times_s, strict=True):
            if left > 0:
                sizes.append(min(size, left))
                times_s.append(at_s)
                left -= size
        replies.append(_reply(row[:wanted], sizes, times_s, started_s))
    return replies


def _continuous(model: Any, request: GenerateRequest) -> list[Reply]:
    """One run of the continuous batching manager; the time that it takes to start is not counted."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks = sum(
        -(-(len(p) + n) // _BLOCK_TOKENS) + 1 for p, n in zip(request.prompts, request.max_tokens, strict=True)
    )
    config = ContinuousBatchingConfig(
        num_blocks=2 * blocks,
        page_size=_BLOCK_TOKENS,
        max_batch_tokens=_BATCH_TOKENS,
        allow_block_sharing=False,
        cpu_offload_space=0.0,
    )
    generation = GenerationConfig(
        max_new_tokens=max(request.max_tokens), eos_token_id=-1, pad_token_id=0, **_sampling(request.temperature)
    )
    torch.manual_seed(request.seed)
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(request.prompts))}
    times_s: dict[str, list[float]] = {name: [] for name in tokens}
    sizes: dict[str, list[int]] = {name: [] for name in tokens}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, warmup=False
    ) as manager:
        started_s = time.perf_counter()
        for name, prompt, wanted in zip(tokens, request.prompts, request.max_tokens, strict=True):
            manager.add_request(list(prompt), request_id=name, max_new_tokens=wanted, streaming=True, eos_token_id=-1)
        left = len(tokens)
        while left:
            result = manager.get_result(timeout=_RESULT_TIMEOUT_S)
            if result is None:
                raise EngineError(f"continuous batching gave nothing for {_RESULT_TIMEOUT_S:g} s")
            if result.error is not None:
                raise EngineError(f"continuous batching failed: {result.error}")
            name, seen = result.request_id, list(result.generated_tokens)
            if len(seen) > len(tokens[name]):
                times_s[name].append(time.perf_counter())
                sizes[name].append(len(seen) - len(tokens[name]))
                tokens[name] = seen
            left -= result.is_finished()
    return [_reply(tokens[name], sizes[name], times_s[name], started_s) for name in tokens]
