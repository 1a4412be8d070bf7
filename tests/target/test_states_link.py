"""Hidden states on their way to a head in the draft pool: which ones, how many bytes, and what is lost with them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lossless.methods import Column
from tests.lossless.test_methods import DRAFT_TOKENS, MAX_TOKENS, configuration, plain, pump_of, requests_of
from tests.support.pump import Pump, Request, assert_same
from tests.support.rings import slow

from paceline.checkpoint.files import Checkpoint
from paceline.draft import engine as draft_engine
from paceline.drafters.catalogue import Method, method_named
from paceline.drafters.heads import remote as remote_module
from paceline.drafters.heads.load import open_head
from paceline.drafters.heads.remote import MOST_LAG, RemoteHead
from paceline.drafters.protocol import Candidates, Leaf
from paceline.drafters.training.features import states
from paceline.drafters.training.replay import Agreement, agreement, joined
from paceline.embedded import HEAD_DIRS, TARGET_DIR
from paceline.messages import STATE_BYTES, OpenSession, States
from paceline.model.loading import load_pretrained
from paceline.model.step_plan import SequenceStep
from paceline.rpc.streams import encode_from_target, encode_to_draft
from paceline.target import states_link as link_module
from paceline.target.control.report import explain
from paceline.target.states_link import StatesLink
from paceline.types import PAGE_SIZE, Mode

METHOD = method_named("P-EAGLE, in the pool")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("link")


class Wire:
    """A pump whose messages to the draft are recorded, and may be changed."""

    def __init__(
        self,
        files: Path,
        mode: Mode = Mode.SEQUENTIAL,
        *,
        how: str = "",
        method: Method = METHOD,
        temperature: float = 1.0,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        """``how``: what happens to states on their way; "": nothing."""
        config = configuration(method, Column.COUPLED, files)
        self.source = config.target_setup().source
        self.requests = {
            name: replace(request, sampling=request.sampling.model_copy(update={"max_tokens": max_tokens}))
            for name, request in requests_of(self.source, Column.COUPLED, temperature, mode).items()
        }
        self.pump: Pump = pump_of(method, config)
        self.sent: dict[tuple[str, int], list[States]] = defaultdict(list)
        self.pump.tamper_draft = self._record
        self._how, self._held = how, list[States]()

    def _record(self, message: Any) -> list[Any]:
        if not isinstance(message, States):
            return [message]
        self.sent[message.session_id, message.epoch].append(message)
        return self._tampered(message)

    def _tampered(self, message: States) -> list[States]:
        """What arrives when a message is sent."""
        if self._how == "":
            return [message]
        if self._how == "all dropped":
            return []
        if self._how == "repeated":
            return [message, message]
        if self.pump.rng.random() < 0.5:
            if self._how != "dropped":
                self._held.append(message)
            return []
        if self._how == "reordered" and self._held:
            return [message, self._held.pop()]
        if self._how == "late" and len(self._held) > 1:
            return [self._held.pop(0), message]
        return [message]

    @property
    def link(self) -> StatesLink:
        assert self.pump.target.link is not None
        return self.pump.target.link

    def run(self, names: list[str] | None = None) -> None:
        self.pump.run({name: r for name, r in self.requests.items() if names is None or name in names}, arrivals=0.3)
        assert self.pump.failures == {}

    def check_text(self) -> None:
        assert_same(self.pump.results, plain(self.source, 1.0, False))

    def unpacked(self, name: str, epoch: int = 0) -> dict[int, bytes]:
        """The states by position, each of which comes once."""
        found: dict[int, bytes] = {}
        for message in self.sent[name, epoch]:
            size = STATE_BYTES * message.width
            for i in range(message.num_positions):
                assert message.position + i not in found
                found[message.position + i] = message.packed[i * size : (i + 1) * size]
        return found


def test_every_committed_position_is_sent_once_in_two_bytes_a_number(files: Path) -> None:
    wire = Wire(files)
    wire.run()
    wire.check_text()
    num_sent = 0
    for name, request in wire.requests.items():
        positions = list(wire.unpacked(name))
        assert positions == list(range(len(positions)))
        ends_at = len(request.prompt) + MAX_TOKENS
        assert ends_at - 8 <= len(positions) < ends_at, "all but those of the last round, after which nobody asks"
        num_sent += len(positions)
    stats = wire.pump.target.stats
    assert stats.states_sent == num_sent
    assert stats.states_bytes == num_sent * STATE_BYTES * wire.link.width
    assert wire.pump.draft is not None
    draft = wire.pump.draft.stats
    assert (draft.states, draft.states_bytes) == (num_sent, stats.states_bytes)
    assert draft.states_missing == draft.states_dropped == draft.states_late == 0
    assert wire.pump.draft.overlap is not None
    rounds = wire.pump.draft.overlap.rounds
    assert rounds[False] > 5
    assert rounds[True] == 0, "nothing is drafted ahead in sequential mode"
    assert f"{num_sent} states of {2 * wire.link.width} bytes were sent to drafts" in explain(wire.pump.target)


@pytest.mark.parametrize("num_positions", [1, 3, PAGE_SIZE])
def test_bytes_on_the_wire_are_those_of_one_vector_a_token(num_positions: int) -> None:
    """Of a target of 8 billion parameters, 8 KB a token, on both hops: within five percent, behind a rejection too."""
    assert all(1 <= size / (num_positions * 8192) < 1.05 for size in sizes_on_the_wire(4096, num_positions))


@pytest.mark.parametrize("num_positions", [1, PAGE_SIZE])
@pytest.mark.parametrize("width", [64, 384])
def test_beside_its_vectors_a_message_has_as_many_bytes_at_every_width(width: int, num_positions: int) -> None:
    """Which is much for a narrow one: 39 percent of 64 numbers."""
    assert all(40 < size - STATE_BYTES * width * num_positions < 60 for size in sizes_on_the_wire(width, num_positions))


def sizes_on_the_wire(width: int, num_positions: int) -> list[int]:
    """Bytes of a message of states on its way to the router, and from there to the draft."""
    states = States("s" * 32, 3, 5000, width, bytes(STATE_BYTES * width * num_positions))
    return [batch.ByteSize() for batch in (encode_from_target([states]), encode_to_draft([states]))]


def test_what_is_sent_is_the_fused_state_of_the_position(files: Path) -> None:
    wire = Wire(files)
    wire.run(["s0"])
    request, result = wire.requests["s0"], wire.pump.results["s0"]
    tokens = [*request.prompt, *result.token_ids]
    runner = wire.pump.target.runner
    pages = runner.cache.allocate(3)
    span = range(len(tokens))
    _, states = runner.forward_with_states([SequenceStep(tokens, span, span, pages, num_logits=1)])
    fused = wire.link._fuse(wire.link._of_boundaries(states))
    sent = wire.unpacked("s0")
    got = torch.frombuffer(bytearray(b"".join(sent.values())), dtype=torch.bfloat16).view(len(sent), -1)
    torch.testing.assert_close(got.float(), fused[: len(sent)], atol=1e-4, rtol=1e-2)
    runner.cache.release(pages)


def test_a_prompt_from_the_cache_has_its_states(files: Path) -> None:
    wire = Wire(files)
    wire.run(["s0"])
    wire.run(["s1"])
    assert wire.pump.target.stats.cached_tokens == PAGE_SIZE
    first, second = wire.unpacked("s0"), wire.unpacked("s1")
    assert list(second) == list(range(len(second)))
    assert [second[i] for i in range(PAGE_SIZE)] == [first[i] for i in range(PAGE_SIZE)]


def test_pages_whose_states_were_not_kept_leave_a_hole(files: Path) -> None:
    """A page that the last step of a session has filled has no states: nobody reads what lies there instead."""
    wire = Wire(files)
    prompt = list(wire.requests["s0"].prompt)[: PAGE_SIZE - 4]
    request = wire.requests["s0"]
    short = Request(prompt, request.sampling.model_copy(update={"max_tokens": 5}), request.speculation)
    wire.pump.run({"first": short})
    text = [*prompt, *wire.pump.results["first"].token_ids]
    assert len(text) == PAGE_SIZE + 1
    wire.pump.run({"next": Request([*text, 5, 6, 7], request.sampling, request.speculation)})
    assert wire.pump.target.stats.cached_tokens == PAGE_SIZE
    assert min(wire.unpacked("next")) == PAGE_SIZE
    assert wire.pump.draft is not None
    assert wire.pump.draft.stats.states_missing == PAGE_SIZE


def test_a_session_that_is_computed_again_is_sent_nothing_twice(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(files)
    cache = wire.pump.target.runner.cache
    taken = cache.allocate(cache.num_available - 3)
    monkeypatch.setattr(type(cache), "check_integrity", lambda *_: None)
    try:
        wire.pump.run(wire.requests, arrivals=1.0)
    except AssertionError:  # the pump finds the pages that are taken here
        assert len(wire.pump.results) == 3
    wire.check_text()
    assert wire.pump.target.stats.preemptions > 0
    for name in wire.requests:
        positions = list(wire.unpacked(name))
        assert positions == list(range(len(positions)))
    cache.release(taken)


def test_a_draft_that_is_opened_anew_is_sent_everything(files: Path) -> None:
    wire = Wire(files)
    wire.pump.submit("s0", wire.requests["s0"])
    while len(wire.sent["s0", 0]) < 3:
        wire.pump.tick()
    session = wire.pump.sessions["s0"]
    wire.pump.send(session.on_draft_down())
    wire.pump.send(session.on_draft_up())
    assert session.draft_epoch == 1
    wire.run([])
    positions = list(wire.unpacked("s0", 1))
    assert positions == list(range(len(positions)))
    assert len(positions) > len(wire.requests["s0"].prompt)


def test_a_step_sends_a_bounded_number_and_the_rest_follows(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(files)
    monkeypatch.setattr(link_module, "STEP_BYTES", 7 * STATE_BYTES * wire.link.width)
    wire.run()
    wire.check_text()
    for name in wire.requests:
        messages = wire.sent[name, 0]
        assert max(m.num_positions for m in messages) <= 7
        positions = list(wire.unpacked(name))
        assert positions == list(range(len(positions)))
        assert len(positions) >= len(wire.requests[name].prompt)


LOSSES = ("dropped", "all dropped", "late", "reordered", "repeated")
FAST = [("dropped", Mode.SEQUENTIAL), ("reordered", Mode.OVERLAPPED)]
ALL = [(how, mode) for how in LOSSES for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED)]


@pytest.mark.parametrize(("how", "mode"), [*FAST, *slow([case for case in ALL if case not in FAST])])
def test_without_all_states_the_text_is_the_same_and_it_is_counted(how, mode, files, monkeypatch) -> None:
    if how != "all dropped":
        monkeypatch.setattr(draft_engine, "LATE_S", 0.0)  # nobody waits, however fast the machine is
    wire = Wire(files, mode, how=how)
    wire.run()
    wire.check_text()
    assert wire.pump.draft is not None
    stats = wire.pump.draft.stats
    assert stats.failed_sessions == 0
    if how == "all dropped":
        assert stats.states == stats.leaves == 0
    if how in ("dropped", "late", "reordered"):
        assert stats.states_missing > 0
        assert stats.states_late > 0, "it went on with states of its own"
    if how in ("late", "reordered", "repeated"):
        assert stats.states_dropped > 0
    if how == "repeated":
        assert stats.states_missing == 0


def test_states_of_another_epoch_are_not_relayed(files: Path) -> None:
    wire = Wire(files)
    wire.pump.submit("s0", wire.requests["s0"])
    session = wire.pump.sessions["s0"]
    states = States("s0", 0, 0, 4, bytes(8))
    assert session.on_target(states).to_draft == [states]
    session.on_draft_down()
    (opened,) = session.on_draft_up().to_draft
    assert isinstance(opened, OpenSession)
    assert opened.epoch == 1
    assert session.on_target(states).to_draft == []
    assert session.relay_stats.stale == 1


def test_a_link_that_sends_states_of_the_next_row_is_noticed(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of ``test_what_is_sent_is_the_fused_state_of_the_position``."""
    keep = StatesLink.keep
    monkeypatch.setattr(StatesLink, "keep", lambda self, computed, states: keep(self, computed, states.roll(1, 0)))
    with pytest.raises(AssertionError, match="not close"):
        test_what_is_sent_is_the_fused_state_of_the_position(files)


def accepted(files: Path, name: str, temperature: float) -> int:
    """Tokens of a method that were accepted, in sequential mode or in the target."""
    method = method_named(name)
    pump = pump_of(method, configuration(method, Column.COUPLED, files))
    mode = Mode.SEQUENTIAL if method.kind == "head" else Mode.OVERLAPPED
    requests = requests_of(str(TARGET_DIR), Column.COUPLED, temperature, mode)
    requests = {n: replace(r, sampling=r.sampling.model_copy(update={"max_tokens": 60})) for n, r in requests.items()}
    counted = [result.speculation for result in pump.run(requests).values()]
    return sum(each.accepted for each in counted)


@pytest.mark.slow
def test_in_sequential_mode_a_head_brings_what_it_brings_in_the_target(files, monkeypatch) -> None:
    """States are rounded to bfloat16 on their way, which may change a choice in a hundred. The mutant, states of the
    position before, brings less; so does one that never gets the last state of a round, and goes on with its own."""
    here, there = accepted(files, "MTP", 0.0), accepted(files, "MTP, in the pool", 0.0)
    assert here > 40
    assert abs(there - here) <= 0.05 * here
    feed = RemoteHead.feed
    before: dict[str, torch.Tensor] = {}

    def shifted(self: RemoteHead, name: str, position: int, states: torch.Tensor) -> int:
        rows = torch.cat([before.get(name, states[:1]), states[:-1]])
        before[name] = states[-1:]
        return feed(self, name, position, rows)

    def stale(self: RemoteHead, name: str, position: int, states: torch.Tensor) -> int:
        return feed(self, name, position, states[:-1]) if len(states) > 1 else -1

    monkeypatch.setattr(RemoteHead, "feed", shifted)
    assert accepted(files, "MTP, in the pool", 0.0) < 0.9 * there
    monkeypatch.setattr(RemoteHead, "feed", stale)
    assert 0.8 * there < accepted(files, "MTP, in the pool", 0.0) < there


def lagged(
    files: Path, monkeypatch: pytest.MonkeyPatch, how: str, method: str = "MTP, in the pool"
) -> tuple[Wire, int, Counter[int]]:
    """A run, the tokens that were accepted, and its proposals by the committed tokens whose states were missing."""
    lags: Counter[int] = Counter()
    expand = RemoteHead.expand

    def counted(self: RemoteHead, leaves: Sequence[Leaf]) -> Candidates:
        made = expand(self, leaves)
        lags.update(len(self.sessions[leaf.session_id].lag()[1]) for leaf in leaves if not leaf.path)
        return made

    wire = Wire(files, how=how, method=method_named(method), temperature=0.0, max_tokens=60)
    with monkeypatch.context() as patch:
        patch.setattr(draft_engine, "LATE_S", 0.0)  # nobody waits, however fast the machine is
        patch.setattr(RemoteHead, "expand", counted)
        wire.run()
    return wire, sum(result.speculation.accepted for result in wire.pump.results.values()), lags


@torch.no_grad()
def replayed(wire: Wire) -> Agreement:
    """The trainer's replay of the embedded MTP head on the texts of a run, as deep as any lag takes it."""
    checkpoint = Checkpoint.open(str(TARGET_DIR))
    head = open_head("mtp", str(HEAD_DIRS["mtp"]), checkpoint).load(torch.float32, torch.device("cpu"))
    model = load_pretrained(checkpoint, torch.float32).eval()
    depths, parts = MOST_LAG + DRAFT_TOKENS, []
    for name, request in wire.requests.items():
        text = torch.tensor([[*request.prompt, *wire.pump.results[name].token_ids]])
        found = agreement(
            head.module.unroll,
            torch.empty(0),  # of no use where the text is greedy
            text,
            torch.cat(states(model, text, head.features.boundaries), -1).float(),
            torch.tensor([len(request.prompt)]),
            torch.tensor([text.shape[1]]),
            depths,
            greedy=True,
        )
        width = 300
        padded = torch.zeros(1, width, depths)
        padded[:, : found.probability.shape[1]] = found.probability
        parts.append(Agreement(padded, found.start, found.end))
    return joined(parts)


def expected(replay: Agreement, lags: Counter[int]) -> tuple[float, float]:
    """Mean and standard deviation of the accepted tokens of as many proposals: one with a lag starts as many depths
    further down the replay."""
    mean = variance = 0.0
    for lag, count in lags.items():
        if lag <= MOST_LAG:
            behind = Agreement(replay.probability[..., lag : lag + DRAFT_TOKENS], replay.start, replay.end)
            mean += count * behind.accepted_per_round(DRAFT_TOKENS)
            variance += count * float(behind.probability[behind.inside()].cumprod(-1).sum(-1).var())
    return mean, variance**0.5


def within(got: int, bound: tuple[float, float]) -> bool:
    """Two and a half standard deviations. Nothing of a run depends on chance or on a clock, only the texts do."""
    mean, deviation = bound
    return abs(got - mean) <= 2.5 * deviation


@pytest.mark.slow
def test_with_states_missing_a_head_brings_what_the_replay_says_of_its_lag(files, monkeypatch) -> None:
    """What has a lag of l tokens is drafted at depths l + 1 to l + K. The mutant: own states of wrong tokens."""
    fresh, most, lags = lagged(files, monkeypatch, "")
    replay = replayed(fresh)
    bound = expected(replay, lags)
    assert within(most, bound)
    assert bound[1] < 0.2 * bound[0], "the bound is worth something"
    for how in ("dropped", "late", "reordered"):
        wire, got, lags = lagged(files, monkeypatch, how)
        assert_same(wire.pump.results, fresh.pump.results)
        assert sum(lags[lag] for lag in range(2, MOST_LAG)) > 20, "states were missing"
        assert within(got, expected(replay, lags)), how
    lag = remote_module._Session.lag
    monkeypatch.setattr(remote_module._Session, "lag", lambda self: (lag(self)[0], (0,) * len(lag(self)[1])))
    wire, got, lags = lagged(files, monkeypatch, "late")
    assert_same(wire.pump.results, fresh.pump.results)
    mean, deviation = expected(replay, lags)
    assert got < mean - 2.5 * deviation
