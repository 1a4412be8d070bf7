"""The public gRPC port over real sockets: what is not a request gets a status that says so, reflection and health."""

import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tests.config.support import needs_ray
from tests.support.door import opened
from tests.support.letters import Letters

from paceline.client import AsyncClient
from paceline.config import RouterConfig
from paceline.errors import InvalidRequestError
from paceline.metrics.access import AccessMetrics
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.router.admission import TargetInfo
from paceline.router.pool import Member, StaticPool
from paceline.router.router import Router
from paceline.rpc.services import GENERATION, HEALTH, REFLECTION
from paceline.security.access import Access
from paceline.security.haproxy_config import TLS_HEADER
from paceline.v1 import generation_pb2 as pb

pytestmark = needs_ray
GENERATE = f"/{GENERATION.full_name}/Generate"


@contextlib.asynccontextmanager
async def served(**options: Any) -> AsyncIterator[tuple[aio.Channel, str]]:
    """A channel to the port of a router without replicas, and its address."""
    pool = StaticPool("target", [Member("target-0", "127.0.0.1:1")])
    metrics = RouterMetrics(Registry("router"), "none")
    info = TargetInfo(Letters(), 4096, ())  # type: ignore[arg-type]
    router = Router(info, pool, None, RouterConfig(), metrics=metrics)
    await router.start()
    try:
        async with opened(router, **options) as address, aio.insecure_channel(address) as channel:
            yield channel, address
    finally:
        await router.stop()


async def refusal(channel: aio.Channel, path: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    """The status of a call that must fail."""
    with pytest.raises(aio.AioRpcError) as caught:
        async for _ in channel.unary_stream(path)(data, timeout=60):
            pass
    return caught.value.code(), caught.value.details() or ""


async def test_bytes_that_are_not_protobuf_are_the_caller_s_mistake() -> None:
    async with served() as (channel, _):
        for method in ("Generate", "Cancel"):
            code, details = await refusal(channel, f"/{GENERATION.full_name}/{method}", b"\x0a\xff\xff")
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"3 bytes that are not a valid paceline.v1.{method}Request" in details


async def test_a_text_that_cannot_fit_is_refused_with_its_size_and_the_bound() -> None:
    async with served() as (channel, address):
        data = pb.GenerateRequest(text="x" * 2_000_000).SerializeToString()
        code, details = await refusal(channel, GENERATE, data)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "text has 200000" in details
        assert "at most 4096 can fit the model's context of 4096 tokens" in details
        async with AsyncClient(address) as client:
            with pytest.raises(InvalidRequestError, match="text has 200000"):
                await client.generate("x" * 2_000_000).result


async def test_a_message_beyond_the_limit_is_not_even_read() -> None:
    """gRPC refuses it by its length; our clients know that trying again is no use."""
    async with served(max_message_bytes=1000000) as (channel, address):
        data = pb.GenerateRequest(text="x" * 2_000_000).SerializeToString()
        code, details = await refusal(channel, GENERATE, data)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "(2000004 vs. 1000000)" in details
        async with AsyncClient(address) as client:
            with pytest.raises(InvalidRequestError, match=r"longer than the service accepts: .* vs\. 1000000"):
                await client.generate("x" * 2_000_000).result


async def test_reflection_answers_under_its_present_name() -> None:
    async with served() as (channel, _):

        async def requests() -> Any:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=GENERATION.full_name)

        call = channel.stream_stream(
            f"/{REFLECTION}/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        listed, file = [answer async for answer in call(requests())]
        names = {service.name for service in listed.list_services_response.service}
        assert {GENERATION.full_name, HEALTH.full_name, REFLECTION} <= names
        assert file.file_descriptor_response.file_descriptor_proto


async def test_an_unknown_method_is_unimplemented() -> None:
    async with served() as (channel, _):
        code, _details = await refusal(channel, f"/{GENERATION.full_name}/Nothing", b"")
        assert code is grpc.StatusCode.UNIMPLEMENTED


# -- the ingress's own methods -----------------------------------------------------------------------------------------


class Context:
    """Keeps the status that a method sets."""

    code: grpc.StatusCode | None = None
    details = ""

    def __init__(self, *metadata: tuple[str, str], security: bytes = b"insecure") -> None:
        self._metadata, self._security = metadata, security

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"transport_security_type": [self._security]}

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailers: Any) -> None:
        pass


def test_the_ingress_serves_every_method_of_the_services() -> None:
    """Serve calls a method by its RPC's name; one that is missing would name all the others to the caller."""
    from paceline.cluster.ingress import Ingress

    for service in (GENERATION, HEALTH):
        for method in service.methods:
            assert callable(getattr(Ingress, method.name))


async def test_health_of_the_ingress() -> None:
    from paceline.cluster.ingress import Ingress

    ingress = object.__new__(Ingress)
    ingress.service = SimpleNamespace(ready=True)  # type: ignore[assignment]
    ingress.access = SimpleNamespace(identify=lambda _: "")  # type: ignore[assignment]
    listed = await ingress.List(b"", Context())
    assert set(listed.statuses) == {"", GENERATION.full_name}
    good = health_pb2.HealthCheckRequest(service=GENERATION.full_name).SerializeToString()
    assert (await ingress.Check(good, Context())).status == health_pb2.HealthCheckResponse.SERVING
    for data, code in (
        (b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (health_pb2.HealthCheckRequest(service="no" * 1000).SerializeToString(), grpc.StatusCode.NOT_FOUND),
    ):
        context = Context()
        await ingress.Check(data, context)
        assert context.code is code
        assert len(context.details) < 200
    context = Context()
    assert [answer async for answer in ingress.Watch(b"\xff", context)] == []
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    context = Context()
    await ingress.Cancel(b"\xff", context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    watching = ingress.Watch(good, context := Context())
    assert (await anext(watching)).status == health_pb2.HealthCheckResponse.SERVING
    ingress._leaving = True  # what has no end of its own would hold a router that is stopped
    assert [answer async for answer in watching] == []
    assert context.code is grpc.StatusCode.UNAVAILABLE


async def test_whether_a_call_is_encrypted_is_what_its_connection_says() -> None:
    """Serve's own proxy, which passes calls on in clear text, would pass on this header, too."""
    from paceline.cluster.ingress import Ingress

    ingress = object.__new__(Ingress)
    ingress.access = Access(None, AccessMetrics(Registry()), require_tls=True)
    ingress.service = SimpleNamespace(cancel=lambda request_id, name: True)  # type: ignore[assignment]

    refused = grpc.StatusCode.FAILED_PRECONDITION
    for security, status in ((b"insecure", refused), (b"ssl", None)):
        for headers in ([], [(TLS_HEADER, "1")], [(TLS_HEADER, "0")]):
            context = Context(*headers, security=security)
            await ingress.Cancel(pb.CancelRequest(request_id="x").SerializeToString(), context)
            assert context.code is status
