"""The testbed's API server in this process, for helm, which writes the Secrets of its releases as protobuf."""

from __future__ import annotations

import base64
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.k8s.support import TESTBED

ENVELOPE = b"k8s\x00"
"""What comes before a message of Kubernetes' protobuf."""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a message: an int, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        value, at = _varint(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        yield key >> 3, value


def _pairs(messages: list[bytes]) -> dict[str, bytes]:
    entries = [dict(_fields(message)) for message in messages]
    return {entry[1].decode(): entry.get(2, b"") for entry in entries}


def _all(data: bytes, number: int) -> list[Any]:
    return [value for found, value in _fields(data) if found == number]


def secret(data: bytes) -> dict[str, Any]:
    """A Secret of helm: k8s.io.apimachinery.pkg.runtime.Unknown with a k8s.io.api.core.v1.Secret."""
    (message,) = _all(data.removeprefix(ENVELOPE), 2)
    (meta,) = _all(message, 1)
    labels = {key: value.decode() for key, value in _pairs(_all(meta, 11)).items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": _all(meta, 1)[0].decode(), "labels": labels},
        "data": {key: base64.b64encode(value).decode() for key, value in _pairs(_all(message, 2)).items()},
        "type": _all(message, 3)[0].decode(),
    }


@contextmanager
def api_server(folder: Path) -> Iterator[tuple[Any, Path]]:
    """Runs one. Gives what it holds, and a kubeconfig in ``folder`` that leads to it."""
    sys.path.insert(0, str(TESTBED / "k8s"))
    try:
        import fake_apiserver
    finally:
        sys.path.remove(str(TESTBED / "k8s"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves files to be closed by the interpreter
        server = fake_apiserver.serve(0, str(TESTBED / "crds"))
    handler = server.RequestHandlerClass
    plain = handler.body

    def body(self: Any) -> Any:
        if "protobuf" not in self.headers.get("Content-Type", ""):
            return plain(self)
        message = self.rfile.read(int(self.headers["Content-Length"]))
        return secret(message) if self.command in ("POST", "PUT") else None  # or DeleteOptions

    handler.body = body
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        config = folder / "kubeconfig"
        address = f"http://127.0.0.1:{server.server_address[1]}"
        config.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "t", "cluster": {"server": address}}],
                    "contexts": [{"name": "t", "context": {"cluster": "t", "user": "t"}}],
                    "users": [{"name": "t", "user": {}}],
                    "current-context": "t",
                }
            )
        )
        yield handler.api, config
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
