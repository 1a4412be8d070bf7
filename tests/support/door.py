"""The public service on a grpc.aio server of its own: the ring's real sockets without Ray, as Serve hosts it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from paceline.config import ServiceConfig
from paceline.metrics.tracing import Tracing
from paceline.router.router import Router
from paceline.router.service import GenerationService
from paceline.rpc.bounds import parse
from paceline.rpc.services import add_generation, add_health, add_reflection
from paceline.rpc.status import to_status
from paceline.v1 import generation_pb2 as pb


class Door:
    """GenerationService and health over one router. Methods are given bytes, as with Serve."""

    def __init__(self, router: Router, tracing: Tracing | None = None) -> None:
        self.router, self.service = router, GenerationService(router, tracing)

    async def Generate(self, request: bytes, context: Any) -> AsyncIterator[Any]:
        try:
            answer = self.service.generate(request, metadata=context.invocation_metadata())
            async with contextlib.aclosing(answer) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            _fail(context, error)

    async def Cancel(self, request: bytes, context: Any) -> Any:
        try:
            return pb.CancelResponse(cancelled=self.service.cancel(parse(pb.CancelRequest, request).request_id))
        except Exception as error:
            _fail(context, error)
            return pb.CancelResponse()

    async def GetModelInfo(self, request: bytes, context: Any) -> Any:
        info = self.router.info
        return pb.GetModelInfoResponse(
            vocab_size=info.tokenizer.vocab_size,
            max_context_length=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
        )

    async def GetServerInfo(self, request: bytes, context: Any) -> Any:
        return pb.GetServerInfoResponse(sessions_running=self.router.num_running)

    async def Check(self, request: bytes, context: Any) -> Any:
        try:
            parse(health_pb2.HealthCheckRequest, request)
        except Exception as error:
            _fail(context, error)
        return health_pb2.HealthCheckResponse(status=1 if self.router.ready else 2)

    async def List(self, request: bytes, context: Any) -> Any:
        return health_pb2.HealthListResponse()

    async def Watch(self, request: bytes, context: Any) -> AsyncIterator[Any]:
        yield await self.Check(request, context)


def _fail(context: Any, error: Exception) -> None:
    code, details, trailers = to_status(error)
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(trailers)


@contextlib.asynccontextmanager
async def opened(
    router: Router, max_message_bytes: int | None = None, tracing: Tracing | None = None, port: int = 0
) -> AsyncIterator[str]:
    """Serves a router; yields HOST:PORT. ``max_message_bytes``: None: the configuration's default, -1: no limit."""
    limit = max_message_bytes or ServiceConfig().server.max_message_bytes
    options = [("grpc.max_receive_message_length", limit), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options)
    door = Door(router, tracing)
    for add in (add_generation, add_health, add_reflection):
        add(door, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
