"""The public gRPC methods over one ``GenerationService``: requests, cancellations, model and service information,
health.

A host is given the bytes of a request and a context of the call. Ray Serve calls the methods by their RPCs' names
(``cluster.ingress``); where there is no Ray, a server of grpc.aio does (``cli.local_grpc``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]  # no stubs

from paceline import logs
from paceline.errors import NotFoundError, PacelineError, RouterStoppedError
from paceline.router.admission import TargetInfo
from paceline.router.service import GenerationService
from paceline.rpc.bounds import parse
from paceline.rpc.generation import model_info_to_proto, server_info_to_proto
from paceline.rpc.status import to_status
from paceline.security.access import Access
from paceline.security.haproxy_config import TLS_HEADER
from paceline.types import MAX_DRAFT_TOKENS, Acceptance, Mode, ModelInfo, SamplingParams, ServerInfo
from paceline.v1.generation_pb2 import (
    CancelRequest,
    CancelResponse,
    GetModelInfoResponse,
    GetServerInfoResponse,
)

log = logging.getLogger(__name__)

_HEALTH_SERVICES = ("", "paceline.v1.GenerationService")
_HEALTH_PERIOD_S = 0.5


class PublicMethods:
    """The public gRPC methods. A subclass sets the attributes, and describes the model and the service."""

    service: GenerationService
    access: Access
    _leaving = False
    """Clients are sent to another router: nothing without an end of its own goes on."""

    async def model_info(self) -> ModelInfo:
        """The model that is served."""
        raise NotImplementedError

    async def server_info(self) -> ServerInfo:
        """The state of the service, as clients may see it. Raises EngineError."""
        raise NotImplementedError

    async def cancel_elsewhere(self, request_id: str, owner: str) -> bool:
        """Cancels a request at another router; False: no other router has it."""
        return False

    # -- paceline.v1.GenerationService --

    async def Generate(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """Streams the chunks of one request, then its result (generation.proto)."""
        try:
            metadata = _metadata(grpc_context)
            name = self.access.identify(metadata)
            with self.access.enter(name) as charge:
                answer = self.service.generate(request, name, charge.note, metadata)
                async with contextlib.aclosing(answer) as responses:
                    async for response in responses:
                        yield response
        except Exception as error:
            _set_status(grpc_context, error)

    async def Cancel(self, request: Any, grpc_context: Any) -> Any:
        """Cancels a request of the caller by its id (generation.proto), on this router or another one.

        The answer is the same for a request that does not exist and for one of another key.
        """
        try:
            name = self.access.identify(_metadata(grpc_context))
            request_id = parse(CancelRequest, request).request_id
            cancelled = self.service.cancel(request_id, name)
        except PacelineError as error:
            _set_status(grpc_context, error)
            return CancelResponse()
        if not cancelled and request_id:
            cancelled = await self.cancel_elsewhere(request_id, name)
        return CancelResponse(cancelled=cancelled)

    async def GetModelInfo(self, request: Any, grpc_context: Any) -> Any:
        """Describes the model that is served (generation.proto)."""
        try:
            self.access.identify(_metadata(grpc_context))
        except PacelineError as error:
            _set_status(grpc_context, error)
            return GetModelInfoResponse()
        return model_info_to_proto(await self.model_info())

    async def GetServerInfo(self, request: Any, grpc_context: Any) -> Any:
        """Describes the state of the whole service (generation.proto)."""
        try:
            self.access.identify(_metadata(grpc_context))
            info = await self.server_info()
        except PacelineError as error:
            _set_status(grpc_context, error)
            return GetServerInfoResponse()
        return server_info_to_proto(info)

    # -- grpc.health.v1.Health --

    async def Check(self, request: Any, grpc_context: Any) -> Any:
        """grpc.health.v1: whether a request would be served now."""
        try:
            service = parse(health_pb2.HealthCheckRequest, request).service
            if service not in _HEALTH_SERVICES:
                raise NotFoundError(f"no service {service[:60]!r}: {_HEALTH_SERVICES[1]} is served")
        except PacelineError as error:
            _set_status(grpc_context, error)
            return health_pb2.HealthCheckResponse()
        return self._health(service)

    async def List(self, request: Any, grpc_context: Any) -> Any:
        """grpc.health.v1: the status of every service."""
        return health_pb2.HealthListResponse(statuses={name: self._health(name) for name in _HEALTH_SERVICES})

    async def Watch(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """grpc.health.v1: the status now, and again whenever it changes, until this router is stopped."""
        try:
            service = parse(health_pb2.HealthCheckRequest, request).service
        except PacelineError as error:
            _set_status(grpc_context, error)
            return
        last = None
        while not self._leaving:
            now = self._health(service)
            if now != last:
                yield now
            last = now
            await asyncio.sleep(_HEALTH_PERIOD_S)
        _set_status(grpc_context, RouterStoppedError("this router is being stopped: watch another one"))

    def _health(self, service: str) -> Any:
        answer = health_pb2.HealthCheckResponse
        if service not in _HEALTH_SERVICES:
            return answer(status=answer.SERVICE_UNKNOWN)
        return answer(status=answer.SERVING if self.service.ready else answer.NOT_SERVING)


def model_info(
    facts: TargetInfo,
    *,
    model_id: str,
    draft_model_id: str | None,
    dtype: str,
    speculates: bool,
    batch_invariant: str,
) -> ModelInfo:
    """The description of a model that is served. ``speculates``: sessions may be given draft tokens."""
    return ModelInfo(
        model_id=model_id,
        draft_model_id=draft_model_id,
        tokenizer_fingerprint=facts.tokenizer.fingerprint,
        vocab_size=facts.num_token_ids,
        max_context_length=facts.max_model_len,
        eos_token_ids=facts.eos_token_ids,
        dtype=dtype,
        modes=tuple(Mode) if speculates else (Mode.PLAIN,),
        acceptances=tuple(Acceptance),
        max_draft_tokens=MAX_DRAFT_TOKENS if speculates else 0,
        batch_invariant=batch_invariant,
        default_sampling=SamplingParams().with_defaults(facts.defaults),
    )


def _metadata(grpc_context: Any) -> list[tuple[str, str | bytes]]:
    """Returns the metadata of a call; its encryption is the connection's, not the caller's claim."""
    metadata = [(name, value) for name, value in grpc_context.invocation_metadata() if name != TLS_HEADER]
    encrypted = b"ssl" in grpc_context.auth_context().get("transport_security_type", ())
    return [*metadata, (TLS_HEADER, "1")] if encrypted else metadata


def _set_status(grpc_context: Any, error: Exception) -> None:
    """Ends a call with an error. The method then has to return: on a raise Serve would drop the trailers."""
    code, details, trailers = to_status(error)
    if not isinstance(error, PacelineError):
        logs.unexpected(log, error)
    grpc_context.set_code(code)
    grpc_context.set_details(details)
    grpc_context.set_trailing_metadata(list(trailers))
