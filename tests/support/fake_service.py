"""A real grpc.aio server in a thread of its own, that says what a test tells it to say."""

import asyncio
import contextlib
import socket
import struct
import threading
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.rpc.status import to_status
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import types_pb2 as types
from paceline.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

WORDS = ("def ", "main", "():", "\n", "    ", "return ", "木", "😀", "\n")
SEED = 2**63 + 5


def chunk(request, index, text, *, tokens=2, prompt_tokens=3, cached=1, cause=types.CAUSE_HIT):
    """The message of one round that emits ``tokens`` tokens, all but the last of them drafted."""
    token_ids = [100 * index + i for i in range(tokens)]
    logprobs = [-0.125 * (i + 1) for i in range(tokens)] if request.logprobs else []
    drafted = [i < tokens - 1 for i in range(tokens)]
    return pb.GenerateResponse(
        request_id=request.request_id,
        chunk=pb.GenerateStreamChunk(
            token_ids=token_ids,
            text=text,
            segments=[pb.TextSegment(text=text[:1], drafted=True), pb.TextSegment(text=text[1:], drafted=False)],
            output_logprobs=logprobs,
            drafted=drafted,
            round=types.SpeculationRound(drafted=tokens + 1, accepted=tokens - 1, cause=cause),
            prompt_tokens=prompt_tokens,
            completion_tokens=tokens * (index + 1),
            cached_tokens=cached,
        ),
    )


def complete(request, num_rounds, *, finish_reason="stop", tokens=2, seed=None, **matched):
    """The last message of a stream of ``num_rounds`` chunks."""
    return pb.GenerateResponse(
        request_id=request.request_id,
        complete=pb.GenerateComplete(
            finish_reason=finish_reason,
            prompt_tokens=3,
            completion_tokens=tokens * num_rounds,
            cached_tokens=1,
            spec_accepted_tokens=num_rounds,
            spec_draft_tokens=3 * num_rounds,
            speculation=pb.SpeculationStats(
                rounds=num_rounds,
                drafted=3 * num_rounds,
                accepted=num_rounds,
                hits=num_rounds,
                causes={"hit": num_rounds},
                acceptance_histogram=[0, num_rounds],
            ),
            timing=pb.Timing(queue_s=0.5, prefill_s=0.25, decode_s=2.0, tokens_per_s=8.0),
            seed=request.sampling_params.seed if seed is None else seed,
            **matched,
        ),
    )


async def sentence(request, context):
    """A short stream to its natural end."""
    for index, word in enumerate(WORDS):
        yield chunk(request, index, word)
    yield complete(request, len(WORDS))


async def endless(request, context):
    """A stream that goes on until somebody ends it."""
    index = 0
    while True:
        yield chunk(request, index, f"{index} ")
        index += 1
        await asyncio.sleep(0.002)


async def silent(request, context):
    """No message, ever."""
    await asyncio.sleep(3600)
    yield complete(request, 0)


def failing(error, after=0):
    """A stream that fails with ``error`` after as many chunks."""

    return _ending(lambda context: abort(context, error), after)


def aborting(code, details, trailers=(), after=0):
    """A stream that ends with a status of its own after as many chunks."""

    return _ending(lambda context: context.abort(code, details, trailers), after)


def _ending(end, after):
    async def script(request, context):
        for index in range(after):
            yield chunk(request, index, WORDS[index])
        await end(context)

    return script


async def abort(context, error):
    """Ends an RPC with an error, as the service's door does."""
    code, details, trailers = to_status(error)
    await context.abort(code, details, trailers)


class FakeService(GenerationServiceServicer, health_pb2_grpc.HealthServicer):
    """The servicer and its server; ``script`` is what ``Generate`` says. A context manager."""

    def __init__(self, script=sentence, port=0, credentials=None):
        self.script = script
        self.requests = []
        self.metadata = []
        self.cancelled = {}
        """request_id to the time at which its cancellation was seen."""
        self.finished = []
        self.info_error = None
        self.health = "SERVING"
        self.running = {}
        self._port = port
        self._credentials = credentials
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake-service")

    async def _serve(self):
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._server = grpc.aio.server(options=[*options, ("grpc.so_reuseport", 0)])
        add_GenerationServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self, self._server)
        address = f"127.0.0.1:{self._port}"
        if self._credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, self._credentials)
        await self._server.start()
        self._started.set()
        await self._stop.wait()
        await self._server.stop(None)

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(60)
        self.address = f"127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        """Ends the server and every stream at once."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def wait_cancelled(self, request_id, timeout_s=60.0):
        """Returns when the server has seen that the client cancelled this request."""
        wait_until(lambda: request_id in self.cancelled, timeout_s)

    # -- the RPCs ------------------------------------------------------------------------------------------

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(context.invocation_metadata())
        self.running[request.request_id] = asyncio.Event()
        try:
            async for message in self.script(request, context):
                yield message
                if self.running[request.request_id].is_set():
                    yield complete(request, 1, finish_reason="abort")
                    break
            self.finished.append(request.request_id)
        except (asyncio.CancelledError, GeneratorExit):  # the latter if grpc.aio was writing when it came
            self.cancelled[request.request_id] = time.monotonic()
            raise
        finally:
            del self.running[request.request_id]

    async def Cancel(self, request, context):
        self.metadata.append(context.invocation_metadata())
        if request.request_id in self.running:
            self.running[request.request_id].set()
            return pb.CancelResponse(cancelled=True)
        return pb.CancelResponse(cancelled=False)

    async def GetModelInfo(self, request, context):
        self.metadata.append(context.invocation_metadata())
        if self.info_error is not None:
            await abort(context, self.info_error)
        return pb.GetModelInfoResponse(
            model_id="big",
            draft_model_id="small",
            tokenizer_fingerprint="abc",
            vocab_size=1024,
            max_context_length=2048,
            eos_token_ids=[0, 7],
            dtype="float32",
            modes=["plain", "sequential", "overlapped"],
            acceptances=["coupled", "rejection"],
            max_draft_tokens=32,
        )

    async def Check(self, request, context):
        assert request.service == "paceline.v1.GenerationService"
        return health_pb2.HealthCheckResponse(status=self.health)

    async def GetServerInfo(self, request, context):
        self.metadata.append(context.invocation_metadata())
        replica = types.ReplicaStatus(replica_id="t1", kind="target", max_sessions=16, counters={"steps": 3.0})
        return pb.GetServerInfoResponse(
            version="0.1.0",
            uptime_s=12.5,
            pools=[pb.Pool(name="target", replicas=[replica]), pb.Pool(name="draft")],
            sessions_running=2,
            sessions_queued=1,
            acceptance_rate=0.5,
            acceptance_length=2.5,
            hit_rate=0.75,
        )


def wait_until(condition, timeout_s=60.0):
    """Returns when ``condition()`` is true."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.002)


class Wire:
    """A TCP relay to a server, to be cut in the middle of a stream. A context manager."""

    def __init__(self, port):
        self._upstream = port
        self._sockets = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="wire", daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cut()

    def cut(self):
        """Resets every connection and refuses new ones."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RD)  # wakes the pump
            end.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._upstream))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, sink), name="wire", daemon=True).start()

    @staticmethod
    def _pump(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
