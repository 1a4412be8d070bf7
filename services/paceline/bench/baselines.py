"""The ``generate`` of transformers, plain and assisted, in a process of its own with one torch thread.

The process is pinned like the target engine. It waits in ``recv`` between requests, so it is idle while the
engines run, and they are while it runs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from paceline.config import DType, apply_worker_environment
from paceline.errors import EngineError

_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One call of ``generate``."""

    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    assisted: bool


@dataclass(frozen=True, slots=True)
class GenerateReply:
    """What it gave, and when: one entry of ``times_s`` and ``sizes`` per target forward."""

    token_ids: tuple[int, ...]
    started_s: float
    times_s: tuple[float, ...]
    sizes: tuple[int, ...]


class Streamer:
    """Notes when tokens arrive; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.sizes: list[int] = []
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """See transformers' BaseStreamer."""
        if self._prompt_seen:
            self.times_s.append(time.perf_counter())
            self.sizes.append(int(value.numel()))
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

    def generate(self, request: GenerateRequest) -> GenerateReply:
        """Runs one request. Raises EngineError if the process failed."""
        self._connection.send(request)
        reply = self._receive()
        assert isinstance(reply, GenerateReply)
        return reply

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
    if core is not None and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {core})
    try:
        import torch
        from transformers.utils import logging as hf_logging

        from paceline.model.loading import load_pretrained, resolve_dtype

        hf_logging.set_verbosity_error()
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


def _generate(models: Sequence[Any], request: GenerateRequest) -> GenerateReply:
    import torch

    streamer = Streamer()
    options: dict[str, Any] = {"assistant_model": models[1]} if request.assisted else {}
    if request.temperature > 0:
        options |= {"do_sample": True, "temperature": request.temperature, "top_k": 0, "top_p": 1.0}
    else:
        options |= {"do_sample": False}
    torch.manual_seed(request.seed)
    ids = torch.tensor([request.token_ids])
    started_s = time.perf_counter()
    output = models[0].generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_tokens,
        streamer=streamer,
        **options,
    )
    tokens = tuple(int(i) for i in output[0, len(request.token_ids) :])
    return GenerateReply(tokens, started_s, tuple(streamer.times_s), tuple(streamer.sizes))
