"""The flags that name a running service: what is read, and what is refused before anything is asked."""

from __future__ import annotations

import argparse

import pytest

from paceline.cli import batch, chat
from paceline.cli.remote import service_of

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


def test_a_chat_reads_the_same_flags() -> None:
    parser = argparse.ArgumentParser()
    chat.add_flags(parser)
    service = service_of(parser.parse_args(["--address", "http://host:1"]))
    assert service is not None
    assert service.url == "http://host:1"
    assert service_of(parser.parse_args(["--address", "host:1"])) == service
