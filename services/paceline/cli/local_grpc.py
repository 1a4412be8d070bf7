"""The gRPC port of ``paceline serve --local``: the methods, refusals, keys and TLS of the service, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.local import LocalPipeline
from paceline.router.public import PublicMethods, model_info
from paceline.router.service import GenerationService
from paceline.rpc.services import add_generation, add_health, add_reflection
from paceline.rpc.transport import start_server
from paceline.security.access import Access
from paceline.security.certificates import Certificates
from paceline.types import ModelInfo, ServerInfo


class LocalPublic(PublicMethods):
    """The public methods over the pipeline of this process."""

    def __init__(self, pipeline: LocalPipeline, service: GenerationService, access: Access, model_id: str) -> None:
        self._pipeline, self.service, self.access, self._model_id = pipeline, service, access, model_id

    async def model_info(self) -> ModelInfo:
        config, targets = self._pipeline.config, self._pipeline.server_info().pools["target"]
        draft = config.draft
        name = None if draft is None else Path(getattr(draft, "path", "")).name or getattr(draft, "kind", None)
        return model_info(
            self._pipeline.info,
            model_id=self._model_id,
            draft_model_id=name,
            dtype=config.target.dtype,
            speculates=config.target_setup().speculates,
            batch_invariant=next((status.batch_invariant for status in targets), ""),
        )

    async def server_info(self) -> ServerInfo:
        return self._pipeline.server_info()


async def serve_grpc(
    public: PublicMethods,
    host: str,
    port: int,
    max_message_bytes: int,
    certificates: Certificates | None,
    max_age_s: float | None = None,
) -> Any:
    """Starts a server of the public methods, which its caller stops. Raises ConfigError if it cannot listen."""

    def add(server: Any) -> None:
        for service in (add_generation, add_health, add_reflection):
            service(public, server)

    address = f"[{host}]" if ":" in host else host
    try:
        server, _ = await start_server(
            add,
            address,
            port,
            certificates=certificates,
            max_message_bytes=max_message_bytes,
            internal=False,
            max_age_s=max_age_s,
        )
    except OSError as error:
        raise ConfigError(f"server.grpc_port is {port}: it cannot be used on {host} ({error})") from error
    return server
