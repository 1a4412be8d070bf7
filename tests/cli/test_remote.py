"""The flags that name a running service: what is read, and what is refused before anything is asked."""

from __future__ import annotations

import argparse

import pytest

from paceline.cli import batch, chat
from paceline.cli.remote import service_of
from paceline.errors import ConfigError

INPUT = ("--input", "a.jsonl", "--output", "b.jsonl")


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    batch.add_flags(parser)
    return parser.parse_args([*INPUT, *flags])


def test_an_address_has_a_key_and_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)
    assert service_of(parsed()) is None
    service = service_of(parsed("--address", "http://host:1/v1/"))
    assert service is not None
    assert (service.url, service.tls) == ("http://host:1", None)
    assert service.headers == {"content-type": "application/json"}
    monkeypatch.setenv("PACELINE_API_KEY", "from-outside")
    for flags, key in (((), "from-outside"), (("--api-key", "given"), "given")):
        service = service_of(parsed("--address", "https://host", *flags))
        assert service is not None
        assert service.headers["authorization"] == f"Bearer {key}"
        assert service.tls is not None


REFUSED = [
    (("--address", "host"), "--address is 'host': http://HOST:PORT"),
    (("--address", "grpc://host:1"), "--address is 'grpc://host:1': http://HOST:PORT"),
    (("--address", "host:8000x"), "--address is 'host:8000x': http://HOST:PORT"),
    (("--address", "[::1]"), r"--address is '\[::1\]': http://HOST:PORT"),
    (("--address", "https://host:99999"), "--address is 'https://host:99999': http://HOST:PORT"),
    (("--address", "http://a host:1"), "--address is 'http://a host:1': http://HOST:PORT"),
    (("--address", "http://h:1:2"), "--address is 'http://h:1:2': http://HOST:PORT"),
    (("--address", "http://h", "--target", "x"), "--target is given with --address"),
    (("--api-key", "x"), "--api-key is given without --address"),
    (("--address", "http://h", "--tls-ca", "x"), "--tls-ca is given, but --address is 'http://h'"),
    (("--address", "https://h", "--tls-ca", "nowhere.pem"), "--tls-ca is 'nowhere.pem': it holds no certificates"),
]


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_what_contradicts_itself_is_refused(flags: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        service_of(parsed(*flags))


def test_a_chat_reads_the_same_flags() -> None:
    parser = argparse.ArgumentParser()
    chat.add_flags(parser)
    service = service_of(parser.parse_args(["--address", "http://host:1"]))
    assert service is not None
    assert service.url == "http://host:1"
    assert service_of(parser.parse_args(["--address", "host:1"])) == service
