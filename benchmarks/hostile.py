"""What hostile clients do to the streams at their side: `python benchmarks/hostile.py`.

Eight streams run on a real `paceline serve --local` (the embedded target, eager, no draft). Attacks come one after the
other, each before a window without any. Printed for each: the longest gap of a stream, the status and its time, the
memory and the descriptors of the service, its threads, and what is left of the attack's sessions.

Attacks whose names end in gRPC are sent by a process of its own, costly forms four times at once.

    python benchmarks/hostile.py [--streams 8] [--seconds 4] [--rounds 2] [--attacks NAME ...] [--json FILE]

``--clock LIBRARY``: libfaketime.so.1 of the Debian package, by which the attack "the clock jumps" moves the service's
wall clock. ``--descriptors N``: the service may open so many files, for the attacks that use them up.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from paceline.client import Client
from paceline.errors import PacelineError
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc as rpc
from paceline.v1 import types_pb2
from paceline_bench.processes import family, num_descriptors, read_process

MIB = 1 << 20
LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER of a connection that is reset when it is closed."""
_JSON = {"content-type": "application/json"}
_PAUSE_S = 5.0
_SHORT = b'{"prompt": "a", "max_tokens": 2}'


class Service:
    """A service of this machine, and the streams that run on it."""

    def __init__(self, streams: int, target: str | None, clock: Path | None, descriptors: int | None) -> None:
        """``clock``: a library that shifts the wall clock of the service. ``descriptors``: its limit of them."""
        command = [sys.executable, "-m", "paceline", "serve", "--local", "--drafter", "none", "--no-compile"]
        command += [] if target is None else ["--target", target]
        with socket.socket() as http_socket, socket.socket() as grpc_socket:
            for one in (http_socket, grpc_socket):
                one.bind(("127.0.0.1", 0))
            self.port, self.grpc_port = (one.getsockname()[1] for one in (http_socket, grpc_socket))
        self._command = [*command, "--http-port", str(self.port), "--grpc-port", str(self.grpc_port)]
        self._shift = Path(tempfile.mkdtemp(prefix="paceline-")) / "shift"
        self._shift.write_text("+0")
        faked = {"TIMESTAMP_FILE": str(self._shift), "CACHE_DURATION": "1", "DONT_FAKE_MONOTONIC": "1"}
        self.faked, self.descriptors, self._environment = clock is not None, descriptors, dict(os.environ)
        if self.faked:
            self._environment |= {"LD_PRELOAD": str(clock)} | {f"FAKETIME_{k}": value for k, value in faked.items()}
        self._process = self._start()
        self._running = True
        self.begin()
        for _ in range(streams):
            threading.Thread(target=self._stream, daemon=True).start()
        while self.num_chunks < 20 * streams:
            time.sleep(0.1)
        self.post("/v1/completions", _form(regex="[a-z]{4}"))  # the first form starts the process that tries forms

    def begin(self) -> None:
        """What streams saw before is forgotten."""
        self.longest_s, self.num_chunks, self.num_failed, self.began = 0.0, 0, 0, time.monotonic()

    def _start(self) -> subprocess.Popen[str]:
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "env": self._environment}
        if (limit := self.descriptors) is not None:
            options["preexec_fn"] = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        process = subprocess.Popen(self._command, text=True, **options)
        assert process.stdout is not None
        if not any(line.strip() == "ready" for line in process.stdout):
            raise SystemExit("the service has not started")
        threading.Thread(target=process.stdout.read, daemon=True).start()
        return process

    def _stream(self) -> None:
        body = json.dumps({"prompt": "def main():", "stream": True, **ENDLESS})
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
        """Memory of all its processes."""
        return sum(one.rss_bytes for one in family(self._process.pid)) / MIB

    @property
    def num_descriptors(self) -> int:
        """Open descriptors of all its processes."""
        return sum(num_descriptors(one.pid) or 0 for one in family(self._process.pid))

    def left(self, streams: int) -> str:
        """What is there beyond the well-behaved streams, once it is no more, or after ten seconds."""
        end = time.monotonic() + 10
        with Client(f"127.0.0.1:{self.grpc_port}") as client:
            while True:
                try:
                    info = client.server_info()
                    sessions = info.sessions_running + info.sessions_queued
                except PacelineError as error:
                    return f"no status: {error}"
                if sessions <= streams or time.monotonic() > end:
                    break
                time.sleep(0.1)
        threads = sum(one.threads for one in family(self._process.pid))
        return f"{sessions} sessions, {threads} threads, {self.rss_mb:.0f} MB, {self.num_descriptors} descriptors"

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
        found = self.post("/v1/completions", _SHORT)
        for connection in connections:
            connection.close()
        return found

    def at_once(self, count: int, path: str, body: bytes) -> str:
        """The statuses of equal requests at the same time."""
        with ThreadPoolExecutor(count) as pool:
            return " ".join(sorted(pool.map(lambda _: self.post(path, body)[:3], range(count))))

    def unread(self, count: int, wait_s: float = 0.0, **fields: Any) -> str:
        """A request while as many answers over HTTP are never read; it is sent after ``wait_s``."""
        body = json.dumps(fields).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                one = stack.enter_context(socket.socket())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.connect(("127.0.0.1", self.port))
                one.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            time.sleep(wait_s)
            return self._beside()

    def silent_grpc(self, count: int) -> str:
        """A request while as many connections to the port of gRPC say nothing; descriptors before and after a while."""
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(socket.create_connection(("127.0.0.1", self.grpc_port)))
            found = self._beside()
            full = self.num_descriptors
            time.sleep(12.0)
            return f"{found}, {full} descriptors, {self.num_descriptors} after 15 s"

    def unread_grpc(self, count: int) -> str:
        """A request while as many streams of gRPC are never read."""
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                stub = stack.enter_context(self._stub())
                call = stub.Generate(_asking(400))
                stack.callback(call.cancel)
            return self._beside()

    def _beside(self) -> str:
        time.sleep(3.0)
        return f"{self.post('/v1/completions', _SHORT)}at {self.rss_mb:.0f} MB"

    @contextlib.contextmanager
    def _stub(self) -> Iterator[rpc.GenerationServiceStub]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", options) as channel:
            yield rpc.GenerationServiceStub(channel)

    def storm(self, count: int, times: int) -> str:
        """Streams that are all reset once they have begun, again and again."""
        body = json.dumps({"prompt": "def f(", "stream": True, **ENDLESS}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        found: Counter[str] = Counter()
        for _ in range(times):
            connections = [socket.create_connection(("127.0.0.1", self.port), timeout=60) for _ in range(count)]
            for one in connections:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
                one.sendall(head % len(body) + body)
            found.update(one.recv(12).decode()[9:] for one in connections[: count // 4])
            for one in connections:
                one.close()
        return f"{times} x {count} streams, of a quarter {dict(found)}"

    def storm_grpc(self, count: int, times: int) -> str:
        """Connections of gRPC that end under their streams, again and again."""
        found: Counter[str] = Counter()
        for _ in range(times):
            with contextlib.ExitStack() as stack:
                stubs = [stack.enter_context(self._stub()) for _ in range(count // 8)]
                calls = [stub.Generate(_asking(400)) for stub in stubs for _ in range(8)]
                for call in calls[: count // 4]:
                    try:
                        next(call)
                    except grpc.RpcError as error:
                        found[error.code().name] += 1
                    else:
                        found["begun"] += 1
        return f"{times} x {count} streams, of a quarter {dict(found)}"

    def rpc(self, name: str) -> str:
        """The status of a huge request, or of the last of some that are costly."""
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            process.submit(int).result()  # its start takes a core
            self.begin()
            return process.submit(send, f"127.0.0.1:{self.grpc_port}", name).result()

    def jump(self, hours: int) -> str:
        """The service's wall clock jumps there and back, under requests with a deadline."""
        if not self.faked:
            return "left out: --clock is not given"
        found = []
        with self._stub() as stub:
            for shift in (f"{hours:+d}h", f"{-hours:+d}h", "+0"):
                call = stub.Generate(_asking(100), timeout=60)
                next(call)
                self._shift.write_text(shift)
                time.sleep(1.5)
                try:
                    found.append(f"{shift} {sum(1 for _ in call) + 1} messages")
                except grpc.RpcError as error:
                    found.append(f"{shift} {error.code().name}")
        return ", ".join(found)

    def crowd(self, count: int) -> str:
        """A request of a client that is connected, while others hold all descriptors, and one of a new client after."""
        if self.descriptors is None:
            return "left out: --descriptors is not given"
        with self._stub() as stub, contextlib.ExitStack() as stack:
            for _ in stub.Generate(_asking(2)):
                pass
            for _ in range(count):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", self.grpc_port))
            time.sleep(2.0)
            full = self.num_descriptors
            for _ in range(20):
                answered = sum(1 for _ in stub.Generate(_asking(2), timeout=20))
        began = time.monotonic()
        with self._stub() as stub:
            late = sum(1 for _ in stub.Generate(_asking(2), timeout=60, wait_for_ready=True))
        took = time.monotonic() - began
        return f"{full} descriptors; connected: {answered} messages; new after {took:.1f} s: {late}"

    def twice(self) -> str:
        """The same command once more."""
        done = subprocess.run(self._command, capture_output=True, text=True, timeout=120, check=False)
        return f"exit {done.returncode}: {(done.stderr or done.stdout).strip().splitlines()[-1][:150]}"

    def killed(self) -> str:
        """The service is killed with SIGKILL and started again at the same ports."""
        before = family(self._process.pid)
        self._process.kill()
        self._process.wait()
        began = time.monotonic()
        while any((now := read_process(one.pid)) and now.started == one.started for one in before):
            if time.monotonic() - began > 10:
                return "processes of it stay"
            time.sleep(0.1)
        self._process = self._start()
        return f"ready again after {time.monotonic() - began:.1f} s"

    def stop(self) -> None:
        """Ends the streams and the service."""
        self._running = False
        self._process.terminate()
        self._process.wait(60)


def _asking(max_tokens: int) -> pb.GenerateRequest:
    sampling = types_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return pb.GenerateRequest(text="def f(", sampling_params=sampling, logprobs=True)


def _text(size: int) -> pb.GenerateRequest:
    """A request of a text of so many bytes that looks like code."""
    return pb.GenerateRequest(text=("def read_file(path):\n    return open(path).read()  # x\n" * (size // 50))[:size])


def _costly(**form: Any) -> pb.GenerateRequest:
    """A request whose output has a costly form."""
    sampling = types_pb2.SamplingParams(structured_output=types_pb2.StructuredOutput(**form), max_tokens=900)
    return pb.GenerateRequest(text="x", sampling_params=sampling)


def send(address: str, name: str) -> str:
    """Sends a request of ``REQUESTS``, a costly form four times at once; what became of the last."""
    request = REQUESTS[name]()
    data = request.SerializeToString()
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        grpc.channel_ready_future(channel).result(30)
        call, said = channel.unary_stream("/paceline.v1.GenerationService/Generate"), "OK"
        copies = 4 if request.sampling_params.HasField("structured_output") else 1
        for answers in [call(data, timeout=240) for _ in range(copies)]:
            try:
                for _ in answers:
                    pass
            except grpc.RpcError as error:
                said = f"{error.code().name} {error.details()[:90]}"
    return f"{len(data)} bytes: {said}"


REQUESTS: dict[str, Callable[[], pb.GenerateRequest]] = {
    "64 MB of text": lambda: _text(64 * 10**6),
    "12 MB of text": lambda: _text(12 * 10**6),
    "1 MB of text": lambda: _text(10**6),
    "the longest text that is tokenized": lambda: _text(40_000),
    "4 million token ids": lambda: pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[7] * 4_000_000)),
    "4 million empty bad_words": lambda: pb.GenerateRequest(
        text="x", sampling_params=types_pb2.SamplingParams(bad_words=[types_pb2.TokenSequence()] * 4_000_000)
    ),
    "2,400 rules of GBNF": lambda: _costly(
        grammar="\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1}' for i in range(2400)), 'r2400 ::= "z"'])
    ),
    "a choice of 8,000": lambda: _costly(
        choice=types_pb2.StructuredOutput.Choice(texts=[f"c{i}" for i in range(8000)])
    ),
    "nullable grammar": lambda: _costly(grammar='start: s\ns: s s s s s s s s | a? | b?\na: s "a" s\nb: s "b" s'),
}


def _prompt(text: bytes) -> bytes:
    return b'{"prompt":"' + text + b'"}'


def _form(**form: Any) -> bytes:
    """A request whose output has a costly form."""
    return json.dumps({"prompt": "a", "max_tokens": 400, "structured_outputs": form}).encode()


def _optional(count: int) -> dict[str, Any]:
    """An object of so many optional properties."""
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def _doubled(levels: int, width: int) -> bytes:
    """A chat with a tool whose argument's type names the one before it, several times, and so on."""
    definitions: dict[str, Any] = {"a0": {"type": "string"}}
    for i in range(levels):
        definitions[f"a{i + 1}"] = {"anyOf": [{"$ref": f"#/$defs/a{i}"}] * width}
    properties = {"p": {"$ref": f"#/$defs/a{levels}"}}
    parameters = {"type": "object", "$defs": definitions, "properties": properties}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    messages = [{"role": "user", "content": "a"}]
    return json.dumps({"max_tokens": 1, "messages": messages, "tools": [tool], "tool_choice": "required"}).encode()


def _messages(count: int) -> bytes:
    return json.dumps({"max_tokens": 1, "messages": [{"role": "user", "content": "a"}] * count}).encode()


ENDLESS: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}
LARGE: dict[str, Any] = {"prompt": "a b " * 500, "max_tokens": 1, "n": 8, "prompt_logprobs": 20}
ATTACKS: dict[str, Callable[[Service], str]] = {
    "16 MiB of {}": lambda s: s.post("/v1/chat/completions", b'{"messages":[' + b"{}," * (5 * MIB) + b"{}]}"),
    "4 MiB of {}": lambda s: s.post("/v1/chat/completions", b'{"messages":[' + b"{}," * MIB + b"{}]}"),
    "2 million token ids": lambda s: s.post("/v1/completions", b'{"prompt":[' + b"7," * (2 * MIB) + b"7]}"),
    "4 MiB of text": lambda s: s.post("/v1/completions", _prompt(b"a b " * MIB)),
    "1 MiB of text, 7 at once": lambda s: s.at_once(7, "/v1/completions", _prompt(b"a b " * (MIB // 4))),
    "4 MiB to /tokenize": lambda s: s.post("/tokenize", _prompt(b"a b " * MIB)),
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
    "64 streams never read": lambda s: s.unread(64, prompt="a", stream=True, logprobs=5, **ENDLESS),
    "4 answers of 8 x 1,000 log probabilities": lambda s: s.at_once(4, "/v1/completions", json.dumps(LARGE).encode()),
    "log probabilities beyond the bound": lambda s: s.post(
        "/v1/completions", json.dumps({"prompt": "a b " * 900, "n": 16, "prompt_logprobs": 20}).encode()
    ),
    "16 large answers never read": lambda s: s.unread(16, 20.0, **LARGE),
    "400 silent gRPC connections": lambda s: s.silent_grpc(400),
    "a tool's type doubled by $ref": lambda s: s.at_once(4, "/v1/chat/completions", _doubled(15, 3)),
    "a user of 1 MB": lambda s: s.post(
        "/v1/responses", json.dumps({"input": "a", "user": "u" * MIB, "max_output_tokens": 1}).encode()
    ),
    "64 gRPC streams never read": lambda s: s.unread_grpc(64),
    "a storm of resets": lambda s: s.storm(200, 5),
    "a storm of lost gRPC": lambda s: s.storm_grpc(200, 5),
    **{f"{name}, gRPC": lambda s, name=name: s.rpc(name) for name in REQUESTS},  # type: ignore[misc]
    "the clock jumps": lambda s: s.jump(6),
    "gRPC takes all descriptors": lambda s: s.crowd(600),
    "the same command again": lambda s: s.twice(),
    "killed and started again": lambda s: s.killed(),
}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a window")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--target", metavar="MODEL", help="another target; chats need one with a chat template")
    parser.add_argument("--clock", type=Path, metavar="LIBRARY")
    parser.add_argument("--descriptors", type=int, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the lines there, too")
    args = parser.parse_args()
    service = Service(args.streams, args.target, args.clock, args.descriptors)
    first = service.rss_mb
    chosen = {name: ATTACKS[name] for name in args.attacks}
    lines = []
    for _ in range(args.rounds):
        for name, attack in ((one, call) for each in chosen.items() for one, call in (("none", lambda _: ""), each)):
            service.begin()
            said = attack(service)
            took = time.monotonic() - service.began
            time.sleep(max(0.0, args.seconds - took))
            lines.append(
                f"{name}: longest gap {1e3 * service.longest_s:.0f} ms, "
                f"{service.num_chunks / (time.monotonic() - service.began):.0f} chunks/s, {service.num_failed} failed; "
                f"{said} in {1e3 * took:.0f} ms; after it {service.left(args.streams)}"
            )
            print(lines[-1], flush=True)
    last = service.rss_mb
    time.sleep(_PAUSE_S)
    print(f"memory at the begin {first:.0f} MB, at the end {last:.0f} MB, {_PAUSE_S:g} s later {service.rss_mb:.0f} MB")
    service.stop()
    if args.json is not None:
        args.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
