"""``paceline serve --local``: the HTTP port over both engines, from the flags to the signal that ends it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
import subprocess
import sys

import grpc
import httpx2 as httpx
import openai
import pytest
from tests.security.conftest import Mounted, digest, write_keys
from tests.support.listening import group_of, listening_sockets
from tests.support.local import local_config
from tests.support.models import save_pair
from tests.support.refusals import refusal_of
from tests.support.rings import nightly, slow
from tests.web.support import call, served

from paceline.cli.local_service import _Renewed, local_edge, local_of
from paceline.cli.serve import add_config_flags, read_config
from paceline.cluster.ports import free_ports
from paceline.config import DraftModel, ServerConfig, ServiceConfig
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.local import LocalPipeline
from paceline.metrics.access import AccessMetrics
from paceline.metrics.catalogue import RELOAD_FAILURES
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.security.certificates import CertificateFiles, Certificates
from paceline.v1 import generation_pb2, generation_pb2_grpc


def test_a_port_that_is_taken_is_refused_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for kind in ("http", "grpc"):
            said = refusal_of("serve", "--local", f"--{kind}-port", str(port))
            assert f"server.{kind}_port is {port}, and another process listens there: " in said


def test_a_configuration_names_the_engines_of_this_machine(tmp_path):
    file = tmp_path / "service.yaml"
    file.write_text("target_config: {engine_kwargs: {max_sessions: 3}}\ndraft_config: {kind: ngram}\n")
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    flags = ["--config", str(file), "--set", "router_config.generation_config=none", "--set", "server.playground=false"]
    config = read_config(parser.parse_args([*flags, "--dtype", "float32"]))
    local = local_of(config)
    assert (local.target.max_sessions, local.target.dtype, local.generation_config) == (3, "float32", "none")
    assert local.target.path == str(TARGET_DIR)
    assert local.draft == config.draft_config.engine_kwargs
    assert not config.server.playground
    assert local_of(ServiceConfig()).draft == DraftModel(path=str(DRAFT_DIR))
    one_router = {
        "request_timeout_s": 60,
        "max_queued_requests": 2,
        "chunk_window_s": 0,
        "limits": {"max_stop_strings": 2},
    }
    assert local_of(ServiceConfig.parse({"router_config": one_router})).target_timeout_s == 30.0


def test_requests_and_rounds_are_on_the_page_for_prometheus(tmp_path):
    folder = save_pair(tmp_path)
    config, metrics = local_config(folder / "target", folder / "draft"), RouterMetrics(Registry(), "one")
    with LocalPipeline(config, metrics=metrics) as pipeline, served(local_edge(pipeline, ServerConfig(), "one")) as at:
        body = {"prompt": "lazy", "max_tokens": 20, "ignore_eos": True, "speculation": {"mode": "sequential"}}
        usage = [call(f"{at}/v1/completions", body)[2]["usage"] for _ in range(2)]
        page = call(f"{at}/metrics")[2].decode()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page.splitlines() if line[0] != "#"}
    assert [value for name, value in values.items() if name.startswith("paceline_replica_compiled")] == [0.0, 0.0]
    label = '{engine="0",model_name="one"}'
    assert values[f"vllm:generation_tokens_total{label}"] == 40
    assert values[f"vllm:request_params_max_tokens_sum{label}"] == 40
    assert values[f"vllm:prompt_tokens_total{label}"] == sum(one["prompt_tokens"] for one in usage)
    assert values['vllm:request_success_total{engine="0",finished_reason="length",model_name="one"}'] == 2
    accepted = sum(one["completion_tokens_details"]["accepted_prediction_tokens"] for one in usage)
    assert values[f"vllm:spec_decode_num_accepted_tokens_total{label}"] == accepted > 0
    assert not any("_created" in name for name in values)
    assert values['paceline_kv_pages{kind="target"}'] > values['paceline_kv_pages_used{kind="target"}'] >= 0
    assert values["paceline_target_rounds_total"] > 0 < values["paceline_draft_forwards_total"], "those of the engines"
    assert values[f"vllm:iteration_tokens_total_count{label}"] > 0


def shown(context, authority):
    """The certificate that a server of this context shows, in DER."""
    asking = ssl.create_default_context()
    authority.configure_trust(asking)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = context.wrap_bio(to_server, to_client, server_side=True)
    client = asking.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
    for side in (client, server, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            side.do_handshake()
    return client.getpeercert(binary_form=True)


def test_a_renewed_certificate_is_shown_to_later_connections(tmp_path):
    mounted = Mounted(tmp_path)
    certificates = Certificates(CertificateFiles.at("server.tls", str(mounted.certificate), str(mounted.key)))
    registry = Registry()
    renewed, context = _Renewed(None, certificates, AccessMetrics(registry)), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(mounted.certificate, mounted.key)
    first = shown(context, mounted.authority)
    renewed.refresh(context)
    assert shown(context, mounted.authority) == first
    mounted.renew()
    renewed.refresh(context)
    second = shown(context, mounted.authority)
    assert second != first
    mounted.certificate.write_text("nothing")
    for _ in range(3):
        renewed.refresh(context)
    assert shown(context, mounted.authority) == second
    (failures,) = registry.samples()[RELOAD_FAILURES.name].values()
    assert failures == 1


@pytest.mark.parametrize(
    ("number", "status", "quiet"), [*slow([(signal.SIGTERM, 0, [])]), *nightly([(signal.SIGINT, 130, ["--quiet"])])]
)
def test_it_serves_until_a_signal(tmp_path, number, status, quiet):
    keys = write_keys(tmp_path / "keys.yaml", {"name": "alice", "sha256": digest("key-of-alice")})
    port, grpc_port = free_ports(2)
    command = [sys.executable, "-m", "paceline", "serve", "--local", "--no-compile", "--http-port", str(port)]
    command += ["--grpc-port", str(grpc_port)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [*command, "--api-keys", str(keys), *quiet],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    ) as server:
        try:
            lines = [server.stdout.readline() for _ in range(3)]
            assert lines == [
                f"HTTP     http://127.0.0.1:{port}/v1  OpenAI-compatible\n",
                f"gRPC     127.0.0.1:{grpc_port}\n",
                "ready\n",
            ], server.stderr.read() if server.poll() is not None else lines
            if not quiet:
                generate, curl, page = (server.stdout.readline() for _ in range(3))
                assert generate.startswith("try      paceline generate ")
                assert generate.endswith(f" --address 127.0.0.1:{grpc_port}\n")
                assert curl.startswith(f"         curl http://127.0.0.1:{port}/v1/completions -H")
                assert page == f"page     http://127.0.0.1:{port}/\n"
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="key-of-alice") as client:
                (model,) = client.models.list().data
                answer = client.completions.create(model=model.id, prompt="def read", max_tokens=8)
                assert answer.usage.completion_tokens >= 1
                with pytest.raises(openai.AuthenticationError):
                    client.with_options(api_key="wrong").models.list()
            found = listening_sockets(group_of(server.pid))
            assert found == {(server.pid, "127.0.0.1", port), (server.pid, "127.0.0.1", grpc_port)}
        finally:
            os.killpg(server.pid, number)
            assert server.wait(300) == status
        told = server.stderr.read()
        assert server.stdout.read() == ""
        assert "Traceback" not in told
        if quiet:
            assert told.strip() == ""
            return
        for stage in ("target: loading", "draft: loading", "target: checking that verification"):
            assert re.search(rf"^paceline: {stage}.* \(\d+\.\d s\)$", told, re.MULTILINE), told
        assert re.search(r"^paceline: ready after \d+\.\d s$", told, re.MULTILINE), told


@pytest.mark.slow
def test_after_sigterm_streams_end_by_themselves_or_by_an_event_and_requests_are_refused(tmp_path):
    """None of 12 streams is cut. Mutants: ``_drained`` that does not wait;
    one that does not end what is left."""
    port, grpc_port = free_ports(2)
    command = [
        sys.executable,
        "-m",
        "paceline",
        "serve",
        "--local",
        "--no-compile",
        "--http-port",
        str(port),
    ]
    command += ["--grpc-port", str(grpc_port), "--set", "server.drain_timeout_s=5"]
    command += ["--set", "target_config.engine_kwargs.max_sessions=89"]  # 88,003 tokens outlast 5 s anywhere
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert "ready\n" in [server.stdout.readline() for _ in range(3)]

            async def test():
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                    begun = [asyncio.Event() for _ in range(12)]

                    async def stream(i):
                        body = {"prompt": "def read", "stream": True, "ignore_eos": True, "seed": i}
                        body |= {"max_tokens": 3} if i == 0 else {"max_tokens": 1000, "n": 8}
                        async with client.stream("POST", "/v1/completions", json=body) as answer:
                            lines = []
                            async for line in answer.aiter_lines():
                                lines += [line] if line else []
                                begun[i].set()
                            return lines

                    tasks = [asyncio.create_task(stream(i)) for i in range(12)]
                    await asyncio.gather(*(each.wait() for each in begun))
                    server.terminate()
                    health = await client.get("/health")
                    while health.status_code == 200:
                        health = await client.get("/health")
                    assert (health.status_code, health.text) == (503, "the service is being stopped\n")
                    late = await client.post("/v1/completions", json={"prompt": "def read"})
                    assert late.status_code == 503
                    assert 1 <= int(late.headers["retry-after"]) <= 5
                    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                        stub = generation_pb2_grpc.GenerationServiceStub(channel)
                        with pytest.raises(grpc.RpcError) as refused:
                            list(stub.Generate(generation_pb2.GenerateRequest(text="def read"), timeout=60))
                    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                    assert int(dict(refused.value.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1000
                    return await asyncio.gather(*tasks)

            event = "did not end within the 5 s that the service has to stop: send it again"
            ends = [lines[-1] for lines in asyncio.run(test())]
            assert all(line == "data: [DONE]" or event in line for line in ends), ends
            assert any(event in line for line in ends), "none outlasted the time to stop"
            assert server.wait(300) == 0
        finally:
            server.kill()
        told = server.stderr.read()
        assert "Traceback" not in told
        assert "paceline: requests in progress are being completed; interrupt again to end them" in told
