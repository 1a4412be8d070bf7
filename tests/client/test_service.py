"""A client in many threads and tasks, what it says of the service, waiting for one that starts, and TLS."""

import asyncio
import subprocess
import threading

import grpc
import pytest
from tests.client.support import TEXT
from tests.support.fake_service import FakeService

from paceline.client import AsyncClient, Client, Tls
from paceline.client.connection import Patience
from paceline.cluster.ports import free_ports
from paceline.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    ResourceExhaustedError,
)


def test_one_client_in_several_threads(server, client):
    texts, errors = {}, []

    def work(name):
        try:
            for i in range(20):
                stream = client.generate(name, request_id=f"{name}-{i}")
                texts[name, i] = "".join(c.text for c in stream)
                assert client.model_info().model_id == "big"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"thread-{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert errors == []
    assert len(texts) == 160
    assert set(texts.values()) == {TEXT}


async def test_many_async_streams_at_once(server):
    async with AsyncClient(server.address) as client:
        streams = [client.generate("hi") for _ in range(64)]
        assert [r.text for r in await asyncio.gather(*(s.result for s in streams))] == [TEXT] * 64


def info(client, server):
    return client.model_info(), client.server_info()


async def async_info(server):
    async with AsyncClient(server.address) as client:
        return await client.model_info(), await client.server_info()


def test_what_is_served_and_how_it_is(server, client):
    model, state = info(client, server)
    assert (model, state) == asyncio.run(async_info(server))
    assert (model.model_id, model.draft_model_id, model.eos_token_ids) == ("big", "small", (0, 7))
    assert (model.vocab_size, model.max_context_length, model.max_draft_tokens) == (1024, 2048, 32)
    assert model.modes == ("plain", "sequential", "overlapped")
    assert list(state.pools) == ["target", "draft"]
    assert state.pools["draft"] == ()
    assert state.pools["target"][0].replica_id == "t1"
    assert state.pools["target"][0].counters == {"steps": 3.0}
    assert (state.sessions_running, state.sessions_queued) == (2, 1)
    assert (state.acceptance_rate, state.acceptance_length, state.hit_rate) == (0.5, 2.5, 0.75)


def test_errors_of_the_other_calls(server, client):
    server.info_error = ResourceExhaustedError("busy", 1.5)
    with pytest.raises(ResourceExhaustedError, match="busy") as caught:
        client.model_info()
    assert caught.value.retry_after_s == 1.5
    with pytest.raises(ResourceExhaustedError, match="busy"):
        asyncio.run(async_info(server))
    with pytest.raises(InvalidRequestError, match="timeout_s is -1"):
        client.model_info(timeout_s=-1)


def test_waiting_for_a_service_that_is_full_lasts_as_long_as_it_says():
    patience = Patience("localhost:1", 60.0)
    assert patience.pause_s(EngineError("loading")) < 1.0
    assert patience.pause_s(ResourceExhaustedError("full", 7.0)) == 7.0
    with pytest.raises(DeadlineExceededError, match="full"):
        patience.pause_s(ResourceExhaustedError("full", 61.0))


async def _async_ready(address, timeout_s):
    async with AsyncClient(address) as client:
        return await client.wait_ready(timeout_s)


def _ready(address, timeout_s):
    with Client(address) as client:
        return client.wait_ready(timeout_s)


either = pytest.mark.parametrize("ready", [_ready, lambda a, t: asyncio.run(_async_ready(a, t))])


@either
def test_waiting_for_a_service_that_starts(ready):
    (port,) = free_ports(1)
    service = FakeService(port=port)
    service.info_error = NotFoundError("no application yet")
    service.health = "NOT_SERVING"
    timers = [
        threading.Timer(0.3, service.__enter__),
        threading.Timer(0.6, setattr, (service, "info_error", None)),
        threading.Timer(0.9, setattr, (service, "health", "SERVING")),
    ]
    for timer in timers:
        timer.start()
    try:
        assert ready(f"127.0.0.1:{port}", 60).model_id == "big"
    finally:
        for timer in timers:
            timer.join()
        service.stop()


@either
def test_a_service_that_does_not_start_in_time(server, ready):
    server.info_error = EngineError("no target yet")
    sentence = rf"the service at {server.address} was not ready within 1 s: no target yet"
    with pytest.raises(DeadlineExceededError, match=sentence):
        ready(server.address, 1)


@either
def test_a_service_that_is_up_and_not_ready(server, ready):
    server.health = "NOT_SERVING"
    with pytest.raises(DeadlineExceededError, match=r"not ready within 1 s: it is up, and reports NOT_SERVING"):
        ready(server.address, 1)


@either
def test_waiting_ends_at_once_if_it_cannot_help(server, ready):
    server.info_error = ConfigError("the models do not fit")
    with pytest.raises(ConfigError, match="the models do not fit"):
        ready(server.address, 60)


# -- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a self-signed certificate for the name "paceline.test" and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    name = ["-subj", "/CN=paceline.test", "-addext", "subjectAltName=DNS:paceline.test"]
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    try:
        subprocess.run([*new, "-keyout", key, "-out", cert, *name], check=True, capture_output=True, timeout=300)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return cert, key


def test_tls(certificate):
    cert, key = certificate
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    with FakeService(credentials=credentials) as server:
        with Client(server.address, tls=Tls(ca_file=cert, server_name="paceline.test")) as client:
            assert client.generate("hi").result.text == TEXT
        given = grpc.ssl_channel_credentials(cert.read_bytes())
        with Client(f"localhost:{server.port}", credentials=given) as client, pytest.raises(EngineError):
            _ = client.generate("hi").result  # the certificate is for another name
        for other in (Client(server.address), Client(server.address, tls=Tls(server_name="paceline.test"))):
            with other, pytest.raises(EngineError, match="cannot be reached"):
                _ = other.generate("hi").result

        async def main():
            async with AsyncClient(server.address, tls=Tls(ca_file=cert, server_name="paceline.test")) as client:
                return await client.generate("hi").result

        assert asyncio.run(main()).text == TEXT


def keys_of(server):
    return [dict(metadata).get("authorization") for metadata in server.metadata]


def test_the_api_key_goes_with_every_call(monkeypatch):
    monkeypatch.setenv("PACELINE_API_KEY", "of-the-environment")
    with FakeService() as server:
        for options, header in (({}, "of-the-environment"), ({"api_key": "given"}, "given"), ({"api_key": ""}, None)):
            server.metadata.clear()
            with Client(server.address, **options) as client:
                assert client.generate("hi").result.text == TEXT
                client.model_info()
                client.server_info()
                client.cancel("x")
            header = header and f"Bearer {header}"
            assert keys_of(server) == [header] * 4

            async def main(options=options):
                async with AsyncClient(server.address, **options) as client:
                    await client.generate("hi").result
                    await client.model_info()

            asyncio.run(main())
            assert keys_of(server) == [header] * 6


def test_an_api_key_that_no_header_can_carry_is_refused_unquoted():
    for key in ("two words", "line\n", "schlüssel"):
        with pytest.raises(ConfigError, match="the API key holds characters") as refused:
            Client("a:1", api_key=key)
        assert key not in str(refused.value)


def test_tls_settings_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match=r"ca_file is '.*none\.pem': it cannot be read \(No such file"):
        Client("a:1", tls=Tls(ca_file=tmp_path / "none.pem"))
    (tmp_path / "key.pem").write_bytes(b"")
    with pytest.raises(ConfigError, match="go together"):
        Client("a:1", tls=Tls(key_file=tmp_path / "key.pem"))
    with pytest.raises(ConfigError, match="give one or the other"):
        Client("a:1", tls=Tls(), credentials=grpc.ssl_channel_credentials())
