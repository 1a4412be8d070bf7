"""``paceline serve --local``: both engines in processes of this machine behind the HTTP port, without Ray and gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn

from paceline.checkpoint.chat import load_chat
from paceline.cli.startup import StartView, next_steps
from paceline.config import EMBEDDED_TARGET, LocalConfig, ServerConfig
from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.metrics.access import AccessMetrics
from paceline.metrics.registry import Registry
from paceline.security.access import Access
from paceline.security.keys import KeyRing
from paceline.web.app import make_app
from paceline.web.service import Edge

_GOODBYE_S = 5
_RELOAD_S = 1.0


def serve_local(config: LocalConfig, server: ServerConfig, model_id: str = EMBEDDED_TARGET) -> None:
    """Serves until a signal arrives; SIGINT leaves as KeyboardInterrupt.

    Raises:
        ConfigError: models, files or the port cannot be used.
        EngineError: an engine could not be started.
    """
    keys = None if server.api_keys is None else KeyRing(server.api_keys)
    if (tls := server.tls) is not None and tls.client_ca is not None:
        raise ConfigError("server.tls.client_ca is set: the HTTP port asks for no certificate of the client")
    certificate, key = (None, None) if tls is None else (_file(tls.certificate), _file(tls.key))
    pipeline = LocalPipeline(config)
    edge = local_edge(pipeline, server, model_id, keys)
    with contextlib.closing(_listening(server)) as listening, contextlib.ExitStack() as stack:
        with StartView() as view:
            stack.enter_context(pipeline)
        scheme = "http" if tls is None else "https"
        steps = next_steps(server, grpc=False, https=tls is not None, chats=edge.chat is not None)
        one = _Server(
            uvicorn.Config(
                make_app(edge),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=_GOODBYE_S,
                ssl_certfile=certificate,
                ssl_keyfile=key,
            ),
            keys,
            [
                f"HTTP     {scheme}://{server.host}:{server.http_port}/v1  OpenAI-compatible",
                "ready",
                *steps,
            ],
            view,
        )
        with _signals():
            one.run([listening])


def local_edge(pipeline: LocalPipeline, server: ServerConfig, model_id: str, keys: KeyRing | None = None) -> Edge:
    """The edge of HTTP over a pipeline of this machine. Raises ConfigError for a template that cannot be read."""
    target = pipeline.config.target
    chat = load_chat(target.path, server.chat_template, target.trust_remote_code)
    access = Access(keys, AccessMetrics(Registry()))
    return Edge(
        model_id,
        pipeline,
        access,
        server.max_message_bytes,
        chat=chat,
        status=partial(asyncio.to_thread, pipeline.server_info),
        playground=server.playground,
    )


def _listening(server: ServerConfig) -> socket.socket:
    """The port, taken before a model is loaded. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        return socket.create_server((server.host, server.http_port), family=family)
    except OSError as error:
        raise ConfigError(
            f"server.http_port is {server.http_port}: it cannot be used on {server.host} ({error.strerror})"
        ) from error


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Handlers for the signal that uvicorn raises again at its end, also where a shell had SIGINT ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signal.SIGTERM: _done, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _done(number: int, frame: FrameType | None) -> None:
    """Takes the signal that uvicorn raises again after it has ended."""


def _file(path: str) -> str:
    found = Path(path).expanduser()
    if not found.is_file():
        raise ConfigError(f"server.tls names {path!r}: there is no such file")
    return str(found)


class _Server(uvicorn.Server):
    """Says where it listens, and takes the keys again when their file has changed."""

    def __init__(self, config: uvicorn.Config, keys: KeyRing | None, lines: Sequence[str], view: StartView) -> None:
        super().__init__(config)
        self._keys, self._lines, self._view = keys, lines, view

    async def main_loop(self) -> None:
        print("\n".join(self._lines), flush=True)
        print(f"paceline: ready after {self._view.elapsed_s:.1f} s", file=sys.stderr, flush=True)
        async with _every(_RELOAD_S, self._keys):
            await super().main_loop()


@contextlib.asynccontextmanager
async def _every(period_s: float, keys: KeyRing | None) -> AsyncIterator[None]:
    async def work() -> None:
        while keys is not None:
            await asyncio.sleep(period_s)
            keys.refresh()

    task = asyncio.create_task(work(), name="paceline-keys")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
