"""The gRPC port of ``paceline serve --local``: the service's own client, with keys, TLS, health and cancellation.

Mutants: no ``identify`` in a method; ``cancel_request`` that finds nothing; a server without the client's authority.
"""

from __future__ import annotations

import asyncio
import http.server
import io
import threading
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.local.test_local import config_of
from tests.security.conftest import Mounted, digest, write_keys
from tests.support.models import prompt, save_pair

from paceline import Client
from paceline.cli.local_grpc import LocalPublic, serve_grpc
from paceline.cli.local_service import _listening, _with_grpc_port, local_edge
from paceline.cli.main import main
from paceline.client import Tls
from paceline.cluster.ports import free_ports
from paceline.config import ServerConfig
from paceline.errors import ConfigError, EngineError, InvalidRequestError, UnauthenticatedError
from paceline.local import LocalPipeline
from paceline.router.service import GenerationService
from paceline.security.certificates import CertificateFiles, Certificates
from paceline.security.keys import KeyRing
from paceline.types import FinishReason


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory) -> Iterator[LocalPipeline]:
    with LocalPipeline(config_of(save_pair(tmp_path_factory.mktemp("models")))) as started:
        yield started


class Serving:
    """A gRPC port over a pipeline, on an event loop of its own."""

    def __init__(self, pipeline: LocalPipeline, keys: KeyRing | None = None, tls: Certificates | None = None) -> None:
        edge = local_edge(pipeline, ServerConfig(), "tiny", keys)
        assert isinstance(edge.service, GenerationService)
        self._public, self._tls = LocalPublic(pipeline, edge.service, edge.access, "tiny"), tls
        self.port = free_ports(1)[0]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> str:
        self._thread.start()
        self._server = self._call(serve_grpc(self._public, "127.0.0.1", self.port, 1 << 20, self._tls))
        return f"localhost:{self.port}"

    def __exit__(self, *_: object) -> None:
        self._call(self._server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, made):
        return asyncio.run_coroutine_threadsafe(made, self._loop).result(60)


def test_the_service_s_client_finds_all_that_a_service_has(pipeline):
    token_ids = prompt(1, 30)
    expected = pipeline.generate(token_ids, None, max_tokens=8, seed=1).result
    with Serving(pipeline) as address, Client(address) as client:
        client.wait_ready(60)
        result = client.generate(token_ids, max_tokens=8, seed=1).result
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        assert client.model_info().model_id == "tiny"
        assert client.model_info().max_context_length == pipeline.max_model_len
        assert client.server_info().pools["target"][0].kind == "target"
        with pytest.raises(InvalidRequestError, match="max_tokens is 100000"):
            _ = client.generate(token_ids, max_tokens=100000).result
        with grpc.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            serving = health_pb2.HealthCheckResponse.SERVING
            assert health.Check(health_pb2.HealthCheckRequest()).status == serving
            pipeline.router.closed = EngineError("the target hangs")
            try:
                assert health.Check(health_pb2.HealthCheckRequest()).status != serving
                with pytest.raises(EngineError, match="the target hangs"):
                    _ = client.generate(token_ids, max_tokens=8, resume=False).result
            finally:
                pipeline.router.closed = None


def test_a_request_is_cancelled_by_its_id(pipeline):
    with Serving(pipeline) as address, Client(address) as client:
        stream = client.generate(prompt(1, 9), max_tokens=1900, ignore_eos=True, request_id="one")
        next(stream)
        assert client.cancel("one")
        assert stream.result.finish_reason is FinishReason.ABORT
        assert not client.cancel("one")
        assert not client.cancel("two")


def test_keys_are_those_of_the_service(pipeline, tmp_path):
    keys = KeyRing(write_keys(tmp_path / "keys.yaml", {"name": "a", "sha256": digest("right")}))
    with Serving(pipeline, keys) as address:
        for key in (None, "wrong"):
            with Client(address, api_key=key) as client:
                for ask in (client.model_info, client.server_info, lambda c=client: c.cancel("one")):
                    with pytest.raises(UnauthenticatedError):
                        ask()
                with pytest.raises(UnauthenticatedError):
                    _ = client.generate(prompt(1, 9), max_tokens=2).result
        with Client(address, api_key="right") as client:
            assert len(client.generate(prompt(1, 9), max_tokens=2, ignore_eos=True).result.token_ids) == 2


def test_it_is_encrypted_and_asks_for_certificates_where_an_authority_is_named(pipeline, tmp_path):
    mounted = Mounted(tmp_path, ("localhost",))
    for ca in (None, str(mounted.ca)):
        files = CertificateFiles.at("server.tls", str(mounted.certificate), str(mounted.key), ca, "client_ca")
        with Serving(pipeline, None, Certificates(files)) as address:
            own = {"certificate_file": mounted.certificate, "key_file": mounted.key}
            with Client(address, tls=Tls(ca_file=mounted.ca, **(own if ca else {}))) as client:
                assert client.model_info().model_id == "tiny"
            if ca is not None:
                with Client(address, tls=Tls(ca_file=mounted.ca)) as client, pytest.raises(EngineError):
                    client.model_info()


def test_the_port_of_the_other_protocol_is_told(pipeline, capsys, monkeypatch, tmp_path):
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    http_port = server.server_address[1]
    with Client(f"localhost:{http_port}") as client:
        said = f"^the port at localhost:{http_port} speaks HTTP: the service's gRPC port is needed, such as 9000$"
        with pytest.raises(ConfigError, match=said):
            _ = client.generate("hi", max_tokens=2).result
        with pytest.raises(ConfigError, match=said):
            client.wait_ready(60)
    server.shutdown()
    server.server_close()
    requests = tmp_path / "requests.jsonl"
    requests.write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}'
    )
    with Serving(pipeline) as address:
        said = f"the port at http://{address} does not speak HTTP: the service's HTTP port is needed, such as 8000"
        for command in (["chat"], ["batch", "--input", str(requests), "--output", str(tmp_path / "answers")]):
            monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
            assert main([*command, "--address", address]) == 2
            assert said in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [requests]


def test_a_taken_port_is_refused_if_it_was_asked_for_and_replaced_if_not(pipeline):
    with Serving(pipeline) as address:
        port = int(address.rpartition(":")[2])
        with pytest.raises(
            ConfigError, match=f"^server.grpc_port is {port}, and another process listens there: --grpc"
        ):
            _with_grpc_port(ServerConfig(grpc_port=port))
        with pytest.raises(
            ConfigError, match=f"^server.http_port is {port}, and another process listens there: --http"
        ):
            _listening(ServerConfig(http_port=port))
        with pytest.raises(ConfigError, match=r"^server.host is '192.0.2.1', which is not an address of this machine"):
            _listening(ServerConfig(host="192.0.2.1"))
        default = ServerConfig.model_construct(set(), grpc_port=port)
        assert _with_grpc_port(default).grpc_port != port
    assert _with_grpc_port(ServerConfig(grpc_port=port)).grpc_port == port
