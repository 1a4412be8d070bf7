"""The application on a port of the loopback, over the one-process pipeline."""

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import uvicorn

from paceline.local import LocalPipeline
from paceline.metrics.access import AccessMetrics
from paceline.metrics.registry import Registry
from paceline.router.service import GenerationService
from paceline.security.access import Access
from paceline.web.app import make_app
from paceline.web.service import Edge

MODEL = "tests/target"


def edge_over(service, *, keys=None, require_tls=False, **options):
    """An edge without keys unless they are given, over a service or a pipeline."""
    service = GenerationService(service.router) if isinstance(service, LocalPipeline) else service
    access = Access(keys, AccessMetrics(Registry()), require_tls=require_tls)
    return Edge(MODEL, service, access, **options)


@contextlib.contextmanager
def served(edge: Edge, **options) -> Iterator[str]:
    """The URL of the application while it is served. ``options``: those of uvicorn."""
    options = {"lifespan": "off", "log_config": None, "timeout_graceful_shutdown": 5} | options
    config = uvicorn.Config(make_app(edge), port=0, **options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


def call(url, body=None, headers=(), method=None):
    """(status, headers, parsed body) of one request without a client library."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, dict(headers) | {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            status, got, text = reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        status, got, text = error.code, error.headers, error.read()
    with contextlib.suppress(ValueError):
        text = json.loads(text)
    return status, got, text


def refusal(url, body):
    """The sentence with which a request is refused."""
    status, _, answer = call(url, body)
    assert status == 400, answer
    return answer["error"]["message"]


def events(url, body):
    """The events of a stream, parsed; the last is ``[DONE]`` if it came."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line.strip() for line in reply if line.strip()]
    found = [line.removeprefix(b"data: ") for line in lines]
    return [item.decode() if item == b"[DONE]" else json.loads(item) for item in found]
