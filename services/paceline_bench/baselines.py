"""transformers in a process of its own with one torch thread, in the modes that it has.

    transformers   ``generate``; several prompts are one static batch, padded on the left
    assisted       ``generate`` with the draft as ``assistant_model``; one prompt after the other, it takes no batch
    lookup         ``generate`` with ``prompt_lookup_num_tokens``; likewise
    continuous     continuous batching over its paged cache

The process is pinned like the target engine. It waits in ``recv`` between requests, so it is idle while the
engines run, and they are while it runs.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Self

from paceline.config import DType, apply_worker_environment
from paceline.errors import EngineError
from paceline.runtime.workers import pin

MODES = ("transformers", "assisted", "lookup", "continuous")
NAMES = {
    "transformers": "transformers generate",
    "assisted": "assisted generate",
    "lookup": "prompt lookup generate",
    "continuous": "continuous batching",
}
"""As they are reported."""
_LOOKUP_TOKENS = 10
"""As transformers' documentation has it."""
_BLOCK_TOKENS = 256
"""transformers' page size."""
_BATCH_TOKENS = 512
_STOP_TIMEOUT_S = 5.0
_RESULT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Prompts that are there at once."""

    mode: str
    """One of MODES."""
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    """Of each prompt."""
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """What one prompt got, and when: one entry of ``times_s`` and ``sizes`` per target forward."""

    token_ids: tuple[int, ...]
    started_s: float
    """When all prompts were submitted, by ``time.perf_counter``."""
    times_s: tuple[float, ...]
    sizes: tuple[int, ...]


class Streamer:
    """Notes when tokens arrive; the first call brings the prompt. ``batch``: prompts whose tokens come together."""

    def __init__(self, batch: int = 1) -> None:
        self._batch = batch
        self.times_s: list[float] = []
        self.sizes: list[int] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """See transformers' BaseStreamer."""
        if self._prompt_seen:
            self.times_s.append(time.perf_counter())
            self.sizes.append(int(value.numel()) // self._batch)
        self._prompt_seen = True

    def end(self) -> None:
        """See transformers' BaseStreamer."""


class GenerateProcess:
    """Client of the process. A context manager."""

    def __init__(self, target: str, draft: str | None, dtype: DType, core: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(
            target=_main,
            args=(child, target, draft, dtype, core),
            name="paceline-transformers",
            daemon=True,
        )
        self._child = child

    def __enter__(self) -> Self:
        self._process.start()
        self._child.close()
        try:
            self._receive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(_STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def generate(self, request: GenerateRequest) -> list[GenerateReply]:
        """Runs a request; one reply per prompt. Raises EngineError if the process failed."""
        self._connection.send(request)
        replies: list[GenerateReply] = self._receive()
        return replies

    def _receive(self) -> Any:
        try:
            reply = self._connection.recv()
        except EOFError:
            raise EngineError("the transformers baseline's process ended") from None
        if isinstance(reply, str):
            raise EngineError(f"the transformers baseline failed: {reply}")
        return reply


def _main(connection: Connection, target: str, draft: str | None, dtype: DType, core: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    apply_worker_environment()
    pin(core)
    try:
        import torch
        from transformers.utils import logging as hf_logging

        from paceline.model.device import resolve_dtype
        from paceline.model.loading import load_pretrained

        hf_logging.set_verbosity_error()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # requests carry their errors
        torch.set_num_threads(1)
        kind = resolve_dtype(dtype, torch.device("cpu"))
        models: list[Any] = [load_pretrained(path, kind).eval() for path in (target, draft) if path]
        for model in models:
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        connection.send(True)
        while (request := connection.recv()) is not None:
            connection.send(_generate(models, request))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")


def _generate(models: Sequence[Any], request: GenerateRequest) -> list[GenerateReply]:
    if request.mode == "continuous":
        return _continuous(models[0], request)
    if request.mode == "transformers":
        return _batch(models[0], request, {})
    options = {"assistant_model": models[1]} if request.mode == "assisted" else {}
    options = options or {"prompt_lookup_num_tokens": _LOOKUP_TOKENS}
    replies: list[GenerateReply] = []
    for i, (prompt, max_tokens) in enumerate(zip(request.prompts, request.max_tokens, strict=True)):
        one = GenerateRequest(request.mode, (prompt,), (max_tokens,), request.temperature, request.seed + i)
        replies += _batch(models[0], one, options)
    return [replace(reply, started_s=replies[0].started_s) for reply in replies]


def _sampling(temperature: float) -> dict[str, Any]:
    if temperature > 0:
        return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return {"do_sample": False}


def _batch(model: Any, request: GenerateRequest, options: dict[str, Any]) -> list[GenerateReply]:
    """One call of ``generate``. A prompt that wants fewer tokens than others gets its own share of them."""
    import torch

    longest = max(map(len, request.prompts))
    padding = [longest - len(prompt) for prompt in request.prompts]
    ids = torch.tensor([[0] * pad + list(prompt) for pad, prompt in zip(padding, request.prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    streamer = Streamer(len(request.prompts))
    torch.manual_seed(request.seed)
    started_s = time.perf_counter()
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=max(request.max_tokens), streamer=streamer,
        **_sampling(request.temperature), **options,
    )  # fmt: skip
    replies = []
    for row, wanted in zip(output[:, longest:].tolist(), request.max_tokens, strict=True):
        sizes, times_s, left = [], [], wanted
        for size, at_s in zip(streamer.sizes, streamer.times_s, strict=True):
            if left > 0:
                sizes.append(min(size, left))
                times_s.append(at_s)
                left -= size
        replies.append(GenerateReply(tuple(row[:wanted]), started_s, tuple(times_s), tuple(sizes)))
    return replies


def _continuous(model: Any, request: GenerateRequest) -> list[GenerateReply]:
    """One run of the continuous batching manager; what it takes to start is not counted."""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig

    blocks = sum(
        -(-(len(p) + n) // _BLOCK_TOKENS) + 1 for p, n in zip(request.prompts, request.max_tokens, strict=True)
    )
    config = ContinuousBatchingConfig(
        num_blocks=2 * blocks, page_size=_BLOCK_TOKENS, max_batch_tokens=_BATCH_TOKENS, allow_block_sharing=False,
        cpu_offload_space=0.0,
    )  # fmt: skip
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
    return [GenerateReply(tuple(tokens[name]), started_s, tuple(times_s[name]), tuple(sizes[name])) for name in tokens]
