"""Registers the public gRPC services with a server, so that their methods are given the bytes of a request.

A server that parses requests itself answers bytes that are not protobuf with UNKNOWN and a Python error. The methods
parse them with ``bounds.parse``, which refuses them by name. Responses are serialized by the server.

Ray Serve is given the ``add_*`` functions by their import paths (``grpc_options.grpc_servicer_functions``).
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]  # no stubs
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]  # no stubs

from paceline.v1 import generation_pb2

GENERATION: ServiceDescriptor = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
HEALTH: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION = "grpc.reflection.v1.ServerReflection"
"""The name under which clients ask for reflection first; its messages equal v1alpha's."""


def add_generation(servicer: Any, server: Any) -> None:
    """Adds ``paceline.v1.GenerationService``."""
    _add(GENERATION, servicer, server)


def add_health(servicer: Any, server: Any) -> None:
    """Adds ``grpc.health.v1.Health``."""
    _add(HEALTH, servicer, server)


def add_reflection(servicer: Any, server: Any) -> None:
    """Adds ``grpc.reflection.v1.ServerReflection``, answered by the server itself: ``servicer`` is not used."""
    names = (GENERATION.full_name, HEALTH.full_name, REFLECTION, reflection.SERVICE_NAME)
    answer = reflection.aio.ReflectionServicer(names).ServerReflectionInfo
    handler = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    if hasattr(server, "add_passthrough_service"):  # Serve's server would call the deployment
        server.add_passthrough_service(REFLECTION)
    _register(REFLECTION, {"ServerReflectionInfo": handler}, server)


def _add(service: ServiceDescriptor, servicer: Any, server: Any) -> None:
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        kind = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        serialize = GetMessageClass(method.output_type).SerializeToString
        handlers[method.name] = kind(getattr(servicer, method.name), response_serializer=serialize)
    _register(service.full_name, handlers, server)


def _register(name: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]], server: Any) -> None:
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    server.add_registered_method_handlers(name, handlers)
