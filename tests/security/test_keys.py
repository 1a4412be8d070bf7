"""API keys and the decision about each call. No socket."""

import contextlib
import hashlib
import logging

import pytest
from tests.security.conftest import digest, write, write_keys
from tests.support.fakes import Clock

from paceline.errors import ConfigError, ResourceExhaustedError, UnauthenticatedError
from paceline.metrics.access import AccessMetrics
from paceline.metrics.registry import Registry
from paceline.security import keys as keys_module
from paceline.security.access import Access
from paceline.security.haproxy_config import TLS_HEADER
from paceline.security.keys import KeyRing
from paceline.types import Usage

ALICE, BOB = "alice-0123456789abcdef", "bob-fedcba9876543210"


@pytest.fixture
def path(tmp_path):
    return write_keys(
        tmp_path / "keys.yaml",
        {"name": "alice", "sha256": digest(ALICE), "max_requests": 2, "tokens_per_minute": 600},
        {"name": "bob", "sha256": [digest(BOB), digest("bob-next")]},
    )


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def access(path, registry):
    return Access(KeyRing(path), AccessMetrics(registry), clock=Clock(100.0))


def bearer(key: str):
    return [("user-agent", "x"), ("authorization", f"Bearer {key}")]


# -- who -----------------------------------------------------------------------------------------------------------


def test_a_key_stands_for_its_name(access):
    assert access.identify(bearer(ALICE)) == "alice"
    assert access.identify(bearer(BOB)) == access.identify(bearer("bob-next")) == "bob"
    assert access.identify([("x-api-key", BOB)]) == "bob"
    assert access.identify([("authorization", f"bearer {BOB}")]) == "bob"


WRONG = [
    [],
    bearer(""),
    bearer(ALICE[:-1]),
    bearer(ALICE[:4]),
    bearer(ALICE + "x"),
    bearer(ALICE.upper()),
    bearer(digest(ALICE)),
    [("authorization", f"Basic {ALICE}")],
    [("authorization", ALICE)],
    [("x-api-key", "")],
    [("x-api-key", "\udcff\u20ac")],
    [("authorization-bin", ALICE.encode())],
]


@pytest.mark.parametrize("metadata", WRONG)
def test_anything_else_is_refused_with_one_text(access, registry, metadata):
    with pytest.raises(UnauthenticatedError) as refused:
        access.identify(metadata)
    assert str(refused.value) == "the API key is missing or wrong: send one as `authorization: Bearer KEY`"
    assert registry.samples()["paceline_unauthenticated_total"] == {(): 1}


@pytest.mark.parametrize(
    "same",
    [
        lambda given, stored: stored.startswith(given[:2]),  # only a prefix is compared
        lambda given, stored: True,
    ],
)
def test_a_comparison_that_takes_too_much_is_noticed(access, monkeypatch, same):
    monkeypatch.setattr(keys_module.hmac, "compare_digest", same)
    accepted = []
    for number in range(70_000):  # one of 65,536 begins with the same two bytes
        key = f"guess-{number}"
        if hashlib.sha256(key.encode()).hexdigest()[:4] in (digest(ALICE)[:4], digest(BOB)[:4]):
            accepted.append(key)
            break
    for key in [*accepted, ALICE[:-1]]:
        try:
            access.identify(bearer(key))
        except UnauthenticatedError:
            continue
        return
    pytest.fail("every wrong key was refused all the same")


def test_every_digest_is_compared_whatever_comes(access, monkeypatch):
    """The time says neither how much of a key is right nor whose it is."""
    seen = []
    monkeypatch.setattr(keys_module.hmac, "compare_digest", lambda a, b: bool(seen.append((len(a), len(b)))) or a == b)
    for metadata in (bearer(ALICE), bearer(BOB), bearer("x"), []):
        seen.clear()
        with contextlib.suppress(UnauthenticatedError):
            access.identify(metadata)
        assert seen == [(32, 32)] * 3


def test_without_a_file_everybody_may_call(registry):
    access = Access(None, AccessMetrics(registry))
    assert access.identify([]) == access.identify(bearer("x")) == ""
    for _ in range(3):
        with access.enter("") as charge:
            charge.note(Usage(10, 5, 0))
    assert "paceline_key_tokens_total" not in registry.samples()


def test_a_plain_connection_is_refused_where_tls_is_required(path, registry):
    access = Access(KeyRing(path), AccessMetrics(registry), require_tls=True)
    for header in ([], [(TLS_HEADER, "0")]):
        with pytest.raises(ConfigError, match="not encrypted"):
            access.identify(bearer(ALICE) + header)
    assert access.identify([*bearer(ALICE), (TLS_HEADER, "1")]) == "alice"


# -- how much ------------------------------------------------------------------------------------------------------


def test_requests_at_once(access, registry):
    running = registry.samples
    first = access.enter("alice")
    first.__enter__()
    with access.enter("alice"):
        assert running()["paceline_key_requests_running"] == {("alice",): 2}
        with pytest.raises(ResourceExhaustedError, match="2 requests of this API key are in progress: at most 2"):
            access.enter("alice").__enter__()
        with access.enter("bob"), access.enter("bob"), access.enter("bob"):
            pass
    with access.enter("alice"):
        pass
    first.__exit__(None, None, None)
    assert running()["paceline_key_requests_running"] == {("alice",): 0, ("bob",): 0}
    assert running()["paceline_key_requests_refused_total"] == {("alice", "requests"): 1}


def test_tokens_a_minute_and_when_to_come_again(access, registry):
    clock = access.clock
    with access.enter("alice") as charge:
        charge.note(Usage(500, 1, 0))
        charge.note(Usage(500, 90, 0))
        charge.note(Usage(500, 90, 0))
        with access.enter("alice"):  # ten tokens are left
            pass
        charge.note(Usage(500, 160, 0))  # a request in progress is not cut
    with pytest.raises(ResourceExhaustedError, match="600 a minute are allowed, prompt and generated") as refused:
        access.enter("alice").__enter__()
    hint = refused.value.retry_after_s
    assert hint == pytest.approx(6.1)
    clock.now += hint - 0.2
    with pytest.raises(ResourceExhaustedError):
        access.enter("alice").__enter__()
    clock.now += 0.2
    with access.enter("alice"):
        pass
    assert registry.samples()["paceline_key_tokens_total"] == {("alice", "prompt"): 500, ("alice", "completion"): 160}


def test_over_ten_minutes_a_key_gets_its_tokens_and_no_more(access):
    clock, total = access.clock, 0
    end = clock.now + 600
    while clock.now < end:
        try:
            with access.enter("alice") as charge:
                charge.note(Usage(20, 30, 0))
                total += 50
        except ResourceExhaustedError as error:
            clock.now += error.retry_after_s
    assert 6000 <= total <= 6600 + 50 + 10


def test_the_hint_for_requests_at_once_is_the_pace_of_their_ends(access):
    clock = access.clock
    for _ in range(4):
        with access.enter("alice"):
            clock.now += 3.0
    with access.enter("alice"), access.enter("alice"), pytest.raises(ResourceExhaustedError) as refused:
        access.enter("alice").__enter__()
    assert refused.value.retry_after_s == pytest.approx(3.0)


# -- the file ------------------------------------------------------------------------------------------------------


def test_a_new_version_of_the_file_is_used_and_a_broken_one_is_not(path, access, caplog):
    ring = access._keys
    write_keys(path, {"name": "carol", "sha256": digest("carol")})
    ring.refresh()
    assert access.identify(bearer("carol")) == "carol"
    with pytest.raises(UnauthenticatedError):
        access.identify(bearer(ALICE))
    for broken in (b"keys: [", b"", b"keys: []"):
        write(path, broken)
        for _ in range(3):
            ring.refresh()
        assert access.identify(bearer("carol")) == "carol"
    assert ring.num_failures == 3
    path.unlink()
    ring.refresh()
    assert ring.num_failures == 4
    assert access.identify(bearer("carol")) == "carol"
    assert "the API keys stay as they were" in caplog.text


SECRET = "this-is-the-key-itself"


@pytest.mark.parametrize(
    ("entry", "refusal"),
    [
        ({"name": "a", "sha256": SECRET}, r"keys\[0\].*64 hexadecimal digits"),
        ({"name": "a", "sha256": digest("")}, r"keys\[0\].*an empty key"),
        ({"name": "a", "key": SECRET}, r"keys\[0\]"),
        ({"name": "a", "sha256": digest("x"), "key": SECRET}, r"keys\[0\]"),
        ({"name": f"{SECRET} ", "sha256": digest("x")}, r"keys\[0\]\.name"),
        ({"name": "a", "sha256": digest("x"), "max_requests": 0}, r"keys\[0\]\.max_requests"),
        ({"name": "a", "sha256": digest("x"), "tokens_per_minute": SECRET}, r"keys\[0\]\.tokens_per_minute"),
        ({"name": "a", "sha256": []}, r"keys\[0\]\.sha256"),
        (SECRET, r"keys\[0\]"),
    ],
)
def test_a_refusal_names_the_place_and_never_a_secret(tmp_path, entry, refusal):
    with pytest.raises(ConfigError, match=refusal) as refused:
        KeyRing(write_keys(tmp_path / "keys.yaml", entry))
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None


def test_names_and_keys_are_given_once(tmp_path):
    for other, refusal in (
        ({"name": "a", "sha256": digest("y")}, "each name is given once"),
        ({"name": "b", "sha256": digest("x").upper()}, "a key has one name"),
    ):
        with pytest.raises(ConfigError, match=refusal):
            KeyRing(write_keys(tmp_path / "keys.yaml", {"name": "a", "sha256": digest("x")}, other))


def test_a_file_that_others_may_read_is_warned_about(path, caplog):
    KeyRing(path)
    assert not caplog.records
    path.chmod(0o644)
    KeyRing(path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "may be read by others (mode 644): chmod 600" in record.getMessage()
