"""What hostile HTTP requests do to the streams at their side: `python benchmarks/hostile_http.py`.

Eight streams run on a real `paceline serve --local` (the embedded target, eager, no draft). Attacks come one after the
other, each before a window without any. Printed for each: the longest gap of a stream, the status and its time, and
the memory of the process that answers HTTP.

    python benchmarks/hostile_http.py [--streams 8] [--seconds 4] [--rounds 2]
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline_bench.processes import read_process

MIB = 1 << 20
_JSON = {"content-type": "application/json"}
_PAUSE_S = 5.0


class Service:
    """A service of this machine, and the streams that run on it."""

    def __init__(self, streams: int) -> None:
        command = [sys.executable, "-m", "paceline", "serve", "--local", "--drafter", "none", "--no-compile"]
        with socket.socket() as http_socket, socket.socket() as grpc_socket:
            for one in (http_socket, grpc_socket):
                one.bind(("127.0.0.1", 0))
            self.port, grpc_port = http_socket.getsockname()[1], grpc_socket.getsockname()[1]
        command += ["--http-port", str(self.port), "--grpc-port", str(grpc_port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        if not any(line.strip() == "ready" for line in self._process.stdout):
            raise SystemExit("the service has not started")
        threading.Thread(target=self._process.stdout.read, daemon=True).start()
        self.longest_s, self.num_chunks, self.num_failed, self._running = 0.0, 0, 0, True
        for _ in range(streams):
            threading.Thread(target=self._stream, daemon=True).start()
        while self.num_chunks < 20 * streams:
            time.sleep(0.1)

    def _stream(self) -> None:
        body = json.dumps({"prompt": "def main():", "max_tokens": 400, "stream": True, "ignore_eos": True})
        while self._running:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                connection.request("POST", "/v1/completions", body, _JSON)
                response, last = connection.getresponse(), None
                while response.readline():
                    now = time.monotonic()
                    self.longest_s, last = max(self.longest_s, now - (last or now)), now
                    self.num_chunks += 1
            except OSError:
                self.num_failed += 1
                time.sleep(0.1)

    @property
    def rss_mb(self) -> float:
        """Memory of the process that answers."""
        found = read_process(self._process.pid)
        assert found is not None
        return found.rss_bytes / MIB

    def post(self, path: str, body: bytes) -> str:
        """The status of a request, and the first words of its error."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            connection.request("POST", path, body, _JSON)
            answer = connection.getresponse()
            text = answer.read(400).decode(errors="replace")
        except OSError as error:
            return f"closed ({type(error).__name__})"
        return f"{answer.status} {text[:70] if answer.status != 200 else ''}"

    def send(self, head: bytes, times: int) -> str:
        """What becomes of a connection that sends an endless head."""
        sent = 0
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            try:
                for _ in range(times):
                    connection.sendall(head)
                    sent += len(head)
            except OSError:
                return f"closed after {sent >> 10} KiB"
        return f"open after {sent >> 10} KiB"

    def idle(self, count: int) -> str:
        """A request while as many connections say nothing."""
        connections = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(count)]
        found = self.post("/v1/completions", b'{"prompt": "a", "max_tokens": 2}')
        for connection in connections:
            connection.close()
        return found

    def at_once(self, count: int, path: str, body: bytes) -> str:
        """The statuses of equal requests at the same time."""
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(self.post(path, body)[:3])) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return " ".join(sorted(found))

    def stop(self) -> None:
        """Ends the streams and the service."""
        self._running = False
        self._process.terminate()
        self._process.wait(60)


def _form(**form: Any) -> bytes:
    """A request whose output has a costly form."""
    return json.dumps({"prompt": "a", "max_tokens": 400, "structured_outputs": form}).encode()


def _optional(count: int) -> dict[str, Any]:
    """An object of so many optional properties."""
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def _messages(count: int) -> bytes:
    return json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * count}).encode()


ATTACKS: dict[str, Callable[[Service], str]] = {
    "16 MiB of {}": lambda s: s.post("/v1/chat/completions", b'{"messages":[' + b"{}," * (5 * MIB) + b"{}]}"),
    "4 MiB of {}": lambda s: s.post("/v1/chat/completions", b'{"messages":[' + b"{}," * MIB + b"{}]}"),
    "2 million token ids": lambda s: s.post("/v1/completions", b'{"prompt":[' + b"7," * (2 * MIB) + b"7]}"),
    "4 MiB of text": lambda s: s.post("/v1/completions", b'{"prompt":"' + b"a b " * MIB + b'"}'),
    "1 MiB of text, 7 at once": lambda s: s.at_once(
        7, "/v1/completions", b'{"prompt":"' + b"a b " * (MIB // 4) + b'"}'
    ),
    "4 MiB to /tokenize": lambda s: s.post("/tokenize", b'{"prompt":"' + b"a b " * MIB + b'"}'),
    "15,000 unknown fields": lambda s: s.post(
        "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1} | {f"x{i}": i for i in range(15_000)}).encode()
    ),
    "an endless header": lambda s: s.send(b"GET / HTTP/1.1\r\nx: " + b"a" * MIB, 600),
    "endless headers": lambda s: s.send(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 10_000, 600),
    "800 idle connections": lambda s: s.idle(800),
    "a chat of 8,000 messages": lambda s: s.post("/v1/chat/completions", _messages(8_000)),
    "a chat of 16,000 messages": lambda s: s.post("/v1/chat/completions", _messages(16_000)),
    "ambiguous grammar, 8 at once": lambda s: s.at_once(
        8, "/v1/completions", _form(grammar='root ::= s\ns ::= s s s s s s | [a-z ] | "0.5"')
    ),
    "1,000 optional properties, 8 at once": lambda s: s.at_once(8, "/v1/completions", _form(json=_optional(1_000))),
    "1,800 optional properties": lambda s: s.post("/v1/completions", _form(json=_optional(1_800))),
    "multiples of two primes": lambda s: s.post(
        "/v1/completions", _form(json={"allOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]})
    ),
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    service = Service(args.streams)
    first = service.rss_mb
    for _ in range(args.rounds):
        for name, attack in ((one, call) for each in ATTACKS.items() for one, call in (("none", lambda _: ""), each)):
            service.longest_s, service.num_chunks, service.num_failed, began = 0.0, 0, 0, time.monotonic()
            said = attack(service)
            took = time.monotonic() - began
            time.sleep(max(0.0, args.seconds - took))
            print(
                f"{name}: longest gap {1e3 * service.longest_s:.0f} ms, "
                f"{service.num_chunks / (time.monotonic() - began):.0f} chunks/s, {service.num_failed} failed; "
                f"{service.rss_mb:.0f} MB; {said} in {1e3 * took:.0f} ms",
                flush=True,
            )
    last = service.rss_mb
    time.sleep(_PAUSE_S)
    print(f"memory at the begin {first:.0f} MB, at the end {last:.0f} MB, {_PAUSE_S:g} s later {service.rss_mb:.0f} MB")
    service.stop()


if __name__ == "__main__":
    main()
