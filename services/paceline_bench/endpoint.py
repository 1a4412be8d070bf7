"""Any server that speaks the OpenAI API, measured like our own: streamed completions over HTTP, real tokens counted.

A chunk's tokens come from its ``usage`` if the server sends it with every chunk (``continuous_usage_stats``). They are
one if each chunk has one token. Otherwise they are unknown, and there is no ITL.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from prometheus_client.parser import text_string_to_metric_families

from paceline.errors import ConfigError, DeadlineExceededError, EngineError
from paceline.errors.refusals import is_http_url
from paceline.types import SpeculationParams
from paceline_bench.jobs import Job, Reply
from paceline_bench.records import RoundRecord

if TYPE_CHECKING:
    import aiohttp

APIS = ("completions", "chat")
_TIMEOUT_S = 300.0
_CONNECT_TIMEOUT_S = 30.0
_SPEC_DECODE = "vllm:spec_decode_"
_EXTRA = {"ignore_eos": True}
"""Fields beyond OpenAI's own: servers of open models have it, and without it requests differ in length."""


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Address of a server, and how requests to it are made."""

    url: str
    """``http://host:port``, with or without ``/v1``."""
    model: str | None = None
    """Name of the model; None for the first that the server lists."""
    api: str = "completions"
    """API of the requests, one of ``APIS``."""
    key: str | None = field(default=None, repr=False)
    """Sent as a bearer token; never written anywhere."""
    extra: Mapping[str, Any] = field(default_factory=lambda: dict(_EXTRA))
    """Added to the body of every request."""

    @property
    def base(self) -> str:
        """The URL without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")

    def public(self) -> EndpointSettings:
        """These settings without the key."""
        return replace(self, key=None)

    def check(self) -> None:
        """Checks the URL.

        Raises:
            ConfigError: it is not an HTTP URL.
        """
        if not is_http_url(self.url):
            raise ConfigError(f"--endpoint is {self.url!r}: http://HOST:PORT or https://HOST:PORT is needed")


class Endpoint:
    """A client of the server. An async context manager, which needs aiohttp."""

    def __init__(self, settings: EndpointSettings, runner: asyncio.Runner | None = None) -> None:
        """``runner`` is what ``counters`` needs.

        Raises:
            ConfigError: the URL is not an HTTP URL.
        """
        settings.check()
        self.settings, self._runner = settings, runner
        self.model = settings.model or ""

    async def __aenter__(self) -> Self:
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError("--endpoint needs aiohttp: pip install 'paceline[endpoint]'") from error
        headers = {"Authorization": f"Bearer {self.settings.key}"} if self.settings.key else {}
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)  # no limit: one connection per request
        self._http = aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector)
        try:
            if not self.model:
                self.model = await self._first_model()
        except BaseException:
            await self._http.close()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    async def send(self, job: Job, params: SpeculationParams) -> Reply:
        """Streams one completion. ``params`` are ignored: they are for our own servers."""
        chat = self.settings.api == "chat"
        asked = {"messages": [{"role": "user", "content": job.prompt.text}]} if chat else {"prompt": job.prompt.text}
        body = {
            "model": self.model,
            **asked,
            "max_tokens": job.sampling.max_tokens,
            "temperature": job.sampling.temperature,
            "seed": job.sampling.seed,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **self.settings.extra,
        }
        path = "/v1/chat/completions" if chat else "/v1/completions"
        started = time.perf_counter()
        arrived: list[tuple[float, int | None]] = []
        """Arrival of each chunk, and the tokens so far if the server reports them."""
        total = 0
        async for event in self._events("POST", path, body):
            at = time.perf_counter() - started
            seen = _usage(event)
            total = max(total, seen or 0)
            if _text(event, chat):
                arrived.append((at, seen))
        if not arrived:
            raise EngineError(f"{self.settings.url} sent no tokens")
        if not total:
            raise EngineError(f"{self.settings.url} does not count tokens: usage by stream_options is needed")
        return Reply.timed_by_rounds((), _rounds(arrived, total), num_counted=total)

    def counters(self) -> dict[str, float]:
        """The server's counters of speculative decoding (``vllm:spec_decode_..._total``), summed over labels, by the
        part of their name in between; empty if it has none."""
        assert self._runner is not None
        return self._runner.run(self.scrape())

    async def scrape(self) -> dict[str, float]:
        """Reads ``counters`` in the running loop."""
        import aiohttp

        try:
            async with self._http.get(f"{self.settings.base}/metrics") as answer:
                return spec_decode_counters(await answer.text()) if answer.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, ValueError):  # no metrics, or none in Prometheus' form
            return {}

    async def _first_model(self) -> str:
        async for answer in self._events("GET", "/v1/models", None):
            listed = answer.get("data")
            if isinstance(listed, list) and listed and isinstance(listed[0], dict) and "id" in listed[0]:
                return str(listed[0]["id"])
        raise ConfigError(f"{self.settings.url} lists no models: give --endpoint-model")

    async def _events(self, method: str, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream, or the one of a plain answer.

        Raises:
            EngineError: the server refused or broke off.
            DeadlineExceededError: it took too long.
        """
        import aiohttp

        place = self.settings.base + path
        try:
            async with self._http.request(method, place, json=body) as answer:
                if answer.status != 200:
                    raise EngineError(f"{place} answered {answer.status}: {(await answer.text())[:200]!r}")
                if body is None:
                    yield _object(await answer.text(), place)
                    return
                async for event in _stream(answer, place):
                    yield event
        except TimeoutError as error:
            raise DeadlineExceededError(f"{place} took longer than {_TIMEOUT_S:g} s") from error
        except aiohttp.ClientConnectorError as error:  # its own text speaks of TLS for any URL
            raise EngineError(f"{place} cannot be reached: {error.os_error.strerror or error.os_error}") from error
        except aiohttp.ClientError as error:
            raise EngineError(f"{place}: {error or type(error).__name__}") from error


async def _stream(answer: aiohttp.ClientResponse, place: str) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events up to ``[DONE]``."""
    async for raw in answer.content:
        line = raw.decode(errors="replace").strip()
        if not line or line.startswith(":"):
            continue
        name, _, data = line.partition(":")
        if name in ("event", "id", "retry"):
            continue
        if name != "data":
            raise EngineError(f"{place} sent a line that is not a server-sent event: {line[:200]!r}")
        if data.strip() == "[DONE]":
            return
        event = _object(data, place)
        if "error" in event:
            raise EngineError(f"{place} sent an error: {str(event['error'])[:200]}")
        yield event
    raise EngineError(f"{place} ended its stream before [DONE]")


def _object(text: str, place: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise EngineError(f"{place} sent invalid JSON: {text.strip()[:200]!r}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{place} sent something that is not an object: {text.strip()[:200]!r}")
    return value


def _usage(event: Mapping[str, Any]) -> int | None:
    usage = event.get("usage")
    seen = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return seen if isinstance(seen, int) else None


def _text(event: Mapping[str, Any], chat: bool) -> bool:
    choices = event.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    delta = choice.get("delta")
    return bool((delta.get("content") if isinstance(delta, dict) else None) if chat else choice.get("text"))


def _rounds(arrived: list[tuple[float, int | None]], total: int) -> tuple[RoundRecord, ...]:
    """A round per chunk; its tokens are 0 where the server does not report how many it holds."""
    if any(seen is None for _, seen in arrived):
        each = 1 if len(arrived) == total else 0
        return tuple(RoundRecord(0, 0, each, "", at) for at, _ in arrived)
    counts = [seen or 0 for _, seen in arrived]
    counts[-1] = total  # tokens that came without text of their own
    return tuple(
        RoundRecord(0, 0, now - before, "", at)
        for (at, _), before, now in zip(arrived, [0, *counts], counts, strict=False)
    )


def spec_decode_counters(exposition: str) -> dict[str, float]:
    """Reads ``num_drafts``, ``num_draft_tokens``, ``num_accepted_tokens``, ... from Prometheus' text.

    Raises:
        ValueError: it is not in Prometheus' form.
    """
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.startswith(_SPEC_DECODE) and sample.name.endswith("_total"):
                name = sample.name.removeprefix(_SPEC_DECODE).removesuffix("_total")
                if "position" in sample.labels:
                    name = f"{name}.{sample.labels['position']}"
                found[name] = found.get(name, 0.0) + sample.value
    return found
