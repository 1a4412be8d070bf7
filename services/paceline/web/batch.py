"""OpenAI's batch files: the requests of one JSONL file, their answers in another, over any OpenAI-compatible HTTP.

    input ── read_requests: every line is checked ──▶ Batch.run: several at once ──▶ output.partial, as they end
                                                                       Batch.finish: output, in the input's order

A request with an answer in ``output.partial`` is not sent again, so an interrupted batch resumes where it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from paceline.errors import ConfigError, EngineError, InvalidRequestError
from paceline.errors.files import MOST_TEXT_BYTES, read_bytes

log = logging.getLogger(__name__)

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
"""Values of ``url`` that a line may have."""
_AGAIN = (429, 502, 503, 504)
"""Statuses of a service that may answer later."""
FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_KEYS = {"custom_id": str, "method": str, "url": str, "body": dict}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of an input file."""

    custom_id: str
    """Names the request in its file and its answer."""
    path: str
    """One of ``PATHS``."""
    body: bytes
    """The JSON body, as it is sent."""

    @property
    def digest(self) -> str:
        """Tells a request from another one of the same ``custom_id``."""
        return hashlib.sha256(self.path.encode() + b"\0" + self.body).hexdigest()


def read_requests(path: Path) -> list[BatchRequest]:
    """Reads a whole input file. Blank lines are left out.

    Raises:
        ConfigError: the file cannot be read.
        InvalidRequestError: a line is no request of a batch, or two have one ``custom_id``; it names file and line.
    """
    lines = read_bytes(path, f"--input is {str(path)!r}", MOST_TEXT_BYTES).splitlines()
    found: dict[str, tuple[int, BatchRequest]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = _request(line)
        except ValueError as error:
            raise InvalidRequestError(f"{path.name}:{number}: {error}") from None
        if (other := found.get(request.custom_id)) is not None:
            raise InvalidRequestError(
                f"{path.name}:{number}: custom_id is {request.custom_id!r}, as in line {other[0]}: each needs its own"
            )
        found[request.custom_id] = number, request
    if not found:
        raise InvalidRequestError(f"{path.name} holds no request: at least one line is needed")
    return [request for _, request in found.values()]


def _request(line: bytes) -> BatchRequest:
    """Raises ValueError for a line that is no request, in words that follow its place."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"it is no JSON object: one with {', '.join(_KEYS)} is needed")
    if more := sorted(values.keys() - _KEYS.keys()):
        raise ValueError(f"{more[0]!r} is no key of a request: {', '.join(_KEYS)} are")
    for key, kind in _KEYS.items():
        if not isinstance(values.get(key), kind):
            kinds = {str: "a string", dict: "an object"}
            raise ValueError(f"{key} is {json.dumps(values.get(key))[:100]}: {kinds[kind]} is needed")
    if values["method"] != "POST":
        raise ValueError(f"method is {values['method']!r}: only POST is allowed")
    if values["url"] not in PATHS:
        raise ValueError(f"url is {values['url']!r}: it must be one of {', '.join(PATHS)}")
    if values["body"].get("stream"):
        raise ValueError("body.stream is true: the answers of a batch are not streamed")
    return BatchRequest(values["custom_id"], values["url"], json.dumps(values["body"]).encode())


class Batch:
    """The requests of a file and their answers so far; a resumed batch starts with some."""

    def __init__(self, requests: Sequence[BatchRequest], output: Path) -> None:
        """Reads the answers that an earlier run left in ``output.partial``.

        Raises:
            ConfigError: ``output`` exists, or ``output.partial`` belongs to other requests or cannot be written.
        """
        self._requests, self._output = requests, output
        self._partial = output.with_name(output.name + ".partial")
        self._answers: dict[str, str] = {}
        if output.exists():
            raise ConfigError(f"--output is {str(output)!r}, which exists: name a file that does not")
        with self._writing():
            if self._partial.exists():
                self._take_up()
            with self._partial.open("ab"):
                pass

    @property
    def num_done(self) -> int:
        """Number of requests that have been answered."""
        return len(self._answers)

    @property
    def num_refused(self) -> int:
        """Number of answers whose status is not 200."""
        return sum(json.loads(line)["response"]["status_code"] != 200 for line in self._answers.values())

    def _take_up(self) -> None:
        content = self._partial.read_bytes()
        whole = content.rfind(b"\n") + 1  # what follows was cut off in the middle of a line
        known = {request.custom_id: request.digest for request in self._requests}
        for line in content[:whole].splitlines():
            kept = json.loads(line)
            custom_id = kept["answer"]["custom_id"]
            if known.get(custom_id) != kept["digest"]:
                raise ConfigError(
                    f"{self._partial.name} holds an answer to {custom_id!r}, which --input asks otherwise or not at "
                    "all: give the input that it was begun with, or another --output"
                )
            self._answers[custom_id] = json.dumps(kept["answer"])
        if whole < len(content):
            os.truncate(self._partial, whole)

    async def run(
        self,
        client: httpx2.AsyncClient,
        concurrency: int,
        patience_s: float = 300.0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Asks for every answer that is missing, at most ``concurrency`` at once.

        A request that finds the service full or gone is sent again, for ``patience_s`` seconds. ``progress`` is called
        with the numbers of answers and of requests.

        Raises:
            EngineError: the service did not come back in that time. Earlier answers are kept.
            ConfigError: the output cannot be written.
        """
        left = iter([request for request in self._requests if request.custom_id not in self._answers])
        progress(self.num_done, len(self._requests))
        with self._writing(), self._partial.open("ab") as file:

            async def work(requests: Iterator[BatchRequest]) -> None:
                for request in requests:
                    answer = await _ask(client, request, patience_s)
                    kept = {"digest": request.digest, "answer": answer}
                    file.write(json.dumps(kept).encode() + b"\n")
                    file.flush()
                    self._answers[request.custom_id] = json.dumps(answer)
                    progress(self.num_done, len(self._requests))

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(concurrency):
                        group.create_task(work(left))
            except* (EngineError, OSError) as errors:
                raise errors.exceptions[0] from None

    def finish(self) -> None:
        """Writes all answers in the order of their requests, at once; the partial file is gone then.

        Raises ConfigError if the output cannot be written; the partial file is left.
        """
        whole = self._partial.with_suffix(".whole")
        try:
            with self._writing():
                whole.write_text("".join(self._answers[request.custom_id] + "\n" for request in self._requests))
                os.replace(whole, self._output)
        finally:
            whole.unlink(missing_ok=True)
        self._partial.unlink()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"--output is {str(self._output)!r}: it cannot be written ({error.strerror})") from None


async def _ask(client: httpx2.AsyncClient, request: BatchRequest, patience_s: float) -> dict[str, Any]:
    """The line of one answer. Raises EngineError if there was none for ``patience_s`` seconds."""
    pause_s, until = FIRST_PAUSE_S, time.monotonic() + patience_s
    while True:
        try:
            reply = await client.post(request.path, content=request.body)
        except httpx2.TransportError as error:
            problem = f"{client.base_url} cannot be reached: {error or type(error).__name__}"
        else:
            if reply.status_code not in _AGAIN:
                return _answer(request, reply)
            problem = f"the service answered with HTTP status {reply.status_code}: {reply.text[:200]}"
            with_hint = reply.headers.get("retry-after", "")
            pause_s = max(pause_s, float(with_hint)) if with_hint.isdigit() else pause_s
        if time.monotonic() + pause_s > until:
            raise EngineError(f"{request.custom_id!r} has no answer after {patience_s:g} s: {problem}")
        log.info("%r again in %.1f s: %s", request.custom_id, pause_s, problem)
        await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _answer(request: BatchRequest, reply: httpx2.Response) -> dict[str, Any]:
    try:
        body = reply.json()
    except ValueError:
        body = {"error": {"message": reply.text[:1000], "type": "server_error"}}
    response = {
        "status_code": reply.status_code,
        "request_id": reply.headers.get("x-request-id", ""),
        "body": body,
    }
    return {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": request.custom_id,
        "response": response,
        "error": None,
    }
