"""The target engine under random load and under faults: what one session meets never changes another's text."""

import random
from dataclasses import replace

import pytest
import torch
from tests.support.models import VOCAB, pair, prompt, random_model
from tests.support.pump import Clock, Pump, Request, assert_same, in_mode, plain_reference
from tests.support.rings import slow

from paceline.messages import (
    CloseSession,
    DraftState,
    InFlight,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    SessionFailed,
    SpeculationWanted,
    TreeLost,
)
from paceline.model.loading import prepare
from paceline.target.engine import TargetEngine
from paceline.types import Cause, FinishReason, Mode, SamplingParams, SpeculationParams


def greedy(n: int, max_tokens: int = 16, **options) -> Request:
    return Request(prompt(n, n), SamplingParams(max_tokens=max_tokens, **options))


class Direct:
    """The engine alone, its messages in a list."""

    def __init__(
        self,
        *,
        pages: int = 16,
        max_sessions: int = 8,
        budget: int = 64,
        max_len: int = 512,
        holds_outcomes: bool = False,
        adaptive: bool = True,
    ) -> None:
        self.sent: list = []
        self.clock = Clock()
        self.engine = TargetEngine(
            pair("llama")[0].runner(pages),
            self.sent.extend,
            max_sessions=max_sessions,
            max_step_tokens=budget,
            max_model_len=max_len,
            holds_outcomes=holds_outcomes,
            adaptive=adaptive,
            clock=self.clock,
        )

    def open(self, name: str, request: Request, epoch: int = 1) -> None:
        self.engine.receive([message(name, request, epoch)])

    def drain(self) -> dict[str, list[Outcome]]:
        """Steps until nothing is left to do without waiting."""
        while self.engine.step():
            self.engine.check_integrity()
            self.clock.now += 1e-3
        return self.outcomes()

    def outcomes(self) -> dict[str, list[Outcome]]:
        out: dict[str, list[Outcome]] = {}
        for m in self.sent:
            if isinstance(m, Outcome):
                out.setdefault(m.session_id, []).append(m)
        return out

    def failures(self) -> dict[str, str]:
        return {m.session_id: m.message for m in self.sent if isinstance(m, SessionFailed)}


def message(name: str, request: Request, epoch: int = 1) -> OpenSession:
    return OpenSession(
        name,
        epoch,
        tuple(request.prompt),
        len(request.prompt),
        request.sampling.seed or 0,
        request.sampling,
        request.speculation,
        request.eos_token_ids,
    )


def plain(request: Request) -> Request:
    return in_mode({"s": request}, Mode.PLAIN)["s"]


def tokens_of(outcomes: list[Outcome]) -> list[int]:
    return [t for o in outcomes for t in o.token_ids]


def proposal_of(tokens: list[int], first_id: int = 1, parent: int = 0) -> tuple[Node, ...]:
    ids = range(first_id, first_id + len(tokens))
    return tuple(Node(i, parent if i == first_id else i - 1, t, 0.9) for i, t in zip(ids, tokens, strict=True))


# -- scheduling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, *slow([0, 2])])
def test_random_load_keeps_every_invariant(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Budget never exceeded, integrity after each step, everything finishes with plain's tokens, no page kept."""
    rng = random.Random(seed)
    target, draft = pair("llama")
    budget, pages = rng.choice(((32, 7), (48, 9), (200, 12)))
    requests = {
        f"s{i}": Request(
            [*prompt(999, rng.choice((0, 64, 80))), *prompt(i, rng.randint(1, 90))],
            SamplingParams(temperature=rng.choice((0, 1)), max_tokens=rng.randint(1, 25), seed=i),
            SpeculationParams(mode=rng.choice(list(Mode)), max_draft_tokens=rng.randint(0, 32)),
        )
        for i in range(14)
    }
    reference = plain_reference(target, requests)
    pump = Pump(target, draft, seed=seed, pages=pages, max_step_tokens=budget, max_sessions=rng.randint(3, 10))
    forward = pump.target.runner.forward
    sizes = []

    def counted(steps):
        sizes.append(sum(len(s.token_ids) for s in steps))
        assert len(steps) <= pump.target.scheduler._max_sessions
        return forward(steps)

    monkeypatch.setattr(pump.target.runner, "forward", counted)
    assert_same(pump.run(requests), reference)
    assert max(sizes) <= budget
    stats = pump.target.stats
    assert stats.tokens_computed == sum(sizes)
    assert stats.steps == len(sizes)
    assert stats.tokens_emitted == sum(len(r.token_ids) for r in reference.values())
    assert stats.nodes_invalid == 0


def test_prefix_sharing_gives_the_same_tokens_for_less_work() -> None:
    """The second session with a prompt of 150 tokens computes only what lies past the shared pages."""
    target, _ = pair("gemma3")
    requests = {f"s{i}": Request([*prompt(0, 140), *prompt(i, 10)], SamplingParams(max_tokens=12)) for i in range(3)}
    reference = plain_reference(target, requests)
    pump = Pump(target, None)
    for name, request in in_mode(requests, Mode.PLAIN).items():
        pump.run({name: request})
    assert_same(pump.results, reference)
    assert [r.usage.cached_tokens for r in pump.results.values()] == [0, 128, 128]
    assert pump.target.stats.cached_tokens == 256
    assert pump.target.stats.tokens_computed == 150 + 2 * 22 + 3 * 11


def test_sessions_of_different_salts_share_no_prefix() -> None:
    target, _ = pair("llama")
    pump, cached = Pump(target, None), []
    for i, salt in enumerate(["", "a", "b", "a", ""]):
        request = Request(prompt(0, 140), SamplingParams(max_tokens=5), cache_salt=salt)
        pump.run(in_mode({f"s{i}": request}, Mode.PLAIN))
        cached.append(pump.results[f"s{i}"].usage.cached_tokens)
    assert cached == [0, 0, 0, 128, 128]


def test_a_session_of_one_step_leaves_its_prefix_to_others() -> None:
    """It ends with the step that computes its prompt."""
    target, _ = pair("llama")
    pump = Pump(target, None)
    for name, max_tokens in (("first", 1), ("second", 12)):
        pump.run(in_mode({name: Request(prompt(0, 140), SamplingParams(max_tokens=max_tokens))}, Mode.PLAIN))
    assert [pump.results[name].usage.cached_tokens for name in ("first", "second")] == [0, 128]


def test_sessions_beyond_the_limit_wait_their_turn() -> None:
    """max_sessions bounds what runs, not what is accepted."""
    direct = Direct(max_sessions=2)
    for i in range(5):
        direct.open(f"s{i}", plain(greedy(5 + i, 4)))
    direct.engine.step()
    assert len(direct.engine.scheduler.running) == 2
    outcomes = direct.drain()
    assert {k: len(tokens_of(v)) for k, v in outcomes.items()} == {f"s{i}": 4 for i in range(5)}


def test_one_session_that_targets_were_lost_under_is_served_at_a_time() -> None:
    """Until its next token or its time. Sessions without losses are served beside it."""
    direct = Direct()
    names = iter(f"s{i}" for i in range(9))

    def offer(suspected_s: float) -> SessionFailed | None:
        direct.sent.clear()
        direct.engine.receive([replace(message(next(names), plain(greedy(8))), suspected_s=suspected_s)])
        return next((m for m in direct.sent if isinstance(m, SessionFailed)), None)

    assert offer(10.0) is None
    failed = offer(10.0)
    assert failed is not None
    assert (failed.turned_away, failed.request_at_fault, failed.session_id) == (True, False, "s1")
    assert offer(0.0) is None
    direct.clock.now += 10.0
    assert offer(5.0) is None, "its time is over"
    assert offer(5.0) is not None
    direct.engine.step()
    assert offer(5.0) is None, "it has decided a token"
    assert offer(5.0) is not None
    direct.engine.receive([CloseSession("s5", 1)])
    assert offer(5.0) is None, "it has ended"


@pytest.mark.parametrize("holds", [True, False])
def test_outcomes_may_leave_as_the_next_forward_begins(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order; the last ones when there is nothing to do, or at the end."""
    direct = Direct(holds_outcomes=holds)
    forward, at_forward = direct.engine.runner.forward, []

    def watched(steps):
        at_forward.append(len(direct.sent))
        return forward(steps)

    monkeypatch.setattr(direct.engine.runner, "forward", watched)

    def stepped(num: int) -> list[int]:
        """Messages that had been sent after each of so many steps."""
        return [len(direct.sent) for _ in range(num) if direct.engine.step()]

    direct.open("a", plain(greedy(1, max_tokens=3)))
    assert stepped(3) == ([0, 1, 2] if holds else [1, 2, 3])
    assert at_forward == [0, 1, 2]
    assert not direct.engine.step()
    assert [m.context_len for m in direct.sent] == [1, 2, 3]
    direct.open("b", plain(greedy(2, max_tokens=8)))
    stepped(1)
    sent = len(direct.sent)
    direct.open("c", greedy(600))
    assert [type(m) for m in direct.sent[sent:]] == [Outcome, SessionFailed][not holds :]
    sent = len(direct.sent)
    stepped(1)
    direct.engine.close()
    assert len(direct.sent) == sent + 1
    assert tokens_of(direct.outcomes()["a"]) == reference_tokens(1, 3)


@pytest.mark.parametrize("mode", [Mode.OVERLAPPED, Mode.SEQUENTIAL])
@pytest.mark.parametrize("holds", [True, False])
def test_outcomes_may_leave_with_what_is_in_flight_next(holds: bool, mode: Mode) -> None:
    """One message instead of two; at once if the session waits for its draft."""
    direct = Direct(holds_outcomes=holds)
    sent: list[list[type]] = []
    direct.engine.emit = lambda messages: sent.append([type(m) for m in messages])
    direct.open("a", in_mode({"a": greedy(2, max_tokens=9)}, mode)["a"])
    tokens = reference_tokens(2, 9)
    direct.engine.receive([Nodes("a", 1, 2, proposal_of(tokens[:4]))])
    assert direct.engine.step()
    waits = not direct.engine.step()
    assert waits is (mode is Mode.SEQUENTIAL)
    if waits:
        assert sent == [[InFlight], [Outcome]]
    else:
        assert sent == ([[InFlight], [Outcome, InFlight]] if holds else [[InFlight], [Outcome], [InFlight], [Outcome]])


def test_a_rest_without_sessions_is_part_of_no_step() -> None:
    """Nor where nobody asks for a step meanwhile, as in a loop that steps while there are sessions."""
    direct = Direct()
    for name in "ab":
        direct.open(name, plain(greedy(1, max_tokens=3)))
        while direct.engine.num_sessions:
            direct.engine.step()
            direct.clock.now += 1e-3
        direct.clock.now += 20.0
    assert 0.0 < direct.engine.stats.bubble_s < 1.0


def test_sessions_that_come_together_begin_with_what_suits_all_of_them() -> None:
    """Drafts pay for up to four of them: the first ones of sixteen ask for none, whether they were opened with a draft
    or, as after the pauses of earlier ones, without. Routers learn how many may have one: five to eight are unknown."""
    direct = Direct(max_sessions=16, pages=64)
    for size in (1, 4, 8, 16, 32, 64) * 3:
        direct.engine.allocation.observe_step(size, 1e-3 * max(16, size))

    def wishes(names: range, *, drafted: bool) -> set[tuple[bool, int | None]]:
        sent = len(direct.sent)
        opened = [message(f"s{i}", greedy(3 + i)) for i in names]
        states = [] if drafted else [DraftState(f"s{i}", 1, available=False) for i in names]
        direct.engine.receive([*opened, *states])
        wanted = {(m.wanted, m.most_sessions) for m in direct.sent[sent:] if isinstance(m, SpeculationWanted)}
        direct.engine.receive([CloseSession(f"s{i}", 1) for i in names])
        return wanted

    assert wishes(range(4), drafted=True) == set()
    assert wishes(range(16), drafted=True) == {(False, 8)}
    assert wishes(range(16), drafted=False) == {(False, 8)}
    assert wishes(range(4), drafted=False) == {(True, 8)}
    direct.engine.check_integrity()


# -- how a session ends ---------------------------------------------------------------------------------------------


def reference_tokens(n: int, count: int) -> list[int]:
    request = greedy(n, count)
    return list(plain_reference(pair("llama")[0], {"s": request})["s"].token_ids)


def run_with_proposal(request: Request, draft_tokens: list[int]) -> tuple[Direct, list[Outcome]]:
    """The first round proposes ``draft_tokens`` after the first token; there is no draft later."""
    direct = Direct()
    direct.open("s", request)
    direct.engine.receive([Nodes("s", 1, len(request.prompt), proposal_of(draft_tokens), idle=True)])
    direct.engine.step()
    direct.engine.receive([DraftState("s", 1, available=False)])
    return direct, direct.drain()["s"]


def test_an_accepted_run_is_emitted_at_once() -> None:
    """The right tokens as proposal: all accepted with the bonus token on top."""
    want = reference_tokens(9, 12)
    _, outcomes = run_with_proposal(greedy(9, 12), want[:6])
    assert outcomes[0].token_ids == tuple(want[:7])
    assert outcomes[0].round.num_accepted == 6
    assert outcomes[0].round.cause is Cause.START
    assert tokens_of(outcomes) == want


@pytest.mark.parametrize("kind", ["eos", "stop_id", "ignored"])
def test_eos_and_stop_ids_inside_an_accepted_run_cut_it_exactly(kind: str) -> None:
    """Nothing after the stop is emitted or counted; an ignored end-of-sequence token does not stop."""
    want = reference_tokens(9, 12)
    stop = next(t for i, t in enumerate(want[:6]) if t not in want[:i] and i >= 2)
    at = want.index(stop)
    options = {"eos": {}, "stop_id": {"stop_token_ids": (stop,)}, "ignored": {"ignore_eos": True}}[kind]
    request = replace(greedy(9, 12, **options), eos_token_ids=() if kind == "stop_id" else (stop,))
    direct, outcomes = run_with_proposal(request, want[:6])
    if kind == "ignored":
        assert tokens_of(outcomes) == want
        assert outcomes[-1].finish_reason is FinishReason.LENGTH
        return
    assert len(outcomes) == 1
    assert outcomes[0].token_ids == tuple(want[: at + 1])
    assert len(outcomes[0].logprobs) == at + 1
    assert outcomes[0].round.num_accepted == at + 1
    assert outcomes[0].finish_reason is FinishReason.STOP
    assert direct.engine.stats.tokens_emitted == at + 1
    assert direct.engine.runner.cache.num_used == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 4, 7])
def test_max_tokens_inside_an_accepted_run(max_tokens: int) -> None:
    """Never more, and no draft token is verified that could not be emitted."""
    want = reference_tokens(9, 12)
    _, outcomes = run_with_proposal(greedy(9, max_tokens), want[:6])
    assert tokens_of(outcomes) == want[:max_tokens]
    assert outcomes[-1].finish_reason is FinishReason.LENGTH
    assert outcomes[0].round.num_drafted <= max(0, max_tokens - 1)


def test_max_model_len_ends_a_session_and_refuses_a_prompt() -> None:
    """A context of max_model_len tokens is the end; a prompt of that length is refused with both numbers."""
    direct = Direct(max_len=40)
    direct.open("short", plain(greedy(33, 100)))
    direct.open("long", plain(greedy(40, 1)))
    direct.open("empty", Request([], SamplingParams()))
    outcomes = direct.drain()
    assert len(tokens_of(outcomes["short"])) == 7
    assert outcomes["short"][-1].finish_reason is FinishReason.LENGTH
    assert "40 tokens: fewer than 40" in direct.failures()["long"]
    assert "empty" in direct.failures()["empty"]
    assert direct.engine.num_sessions == 0


def test_a_request_that_can_never_fit_is_refused_when_it_is_opened() -> None:
    """With what it needs and what there is."""
    direct = Direct(pages=2)
    direct.open("s", plain(greedy(100, 100)))
    assert "need 201 tokens of KV, the cache holds 128" in direct.failures()["s"]
    direct.open("t", plain(greedy(100, 20)))
    assert len(tokens_of(direct.drain()["t"])) == 20


# -- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_options_that_forbid_every_token_fail_only_their_session() -> None:
    """By bad words from the start, or by a bias that bad words complete later."""
    target, draft = pair("llama")
    everything = tuple((t,) for t in range(VOCAB))
    # After any first token that is not 50, every token is forbidden.
    later = tuple((a, b) for a in range(VOCAB) for b in (50, 51))
    requests = {f"s{i}": greedy(5 + i) for i in range(4)}
    bad = {
        "now": greedy(20, bad_words=everything),
        "later": greedy(
            21,
            bad_words=later,
            logit_bias={t: -float("inf") for t in range(VOCAB) if t not in (50, 51)},
        ),
    }
    for mode in Mode:
        pump = Pump(target, draft, seed=1)
        results = pump.run(in_mode(requests | bad, mode))
        assert_same(results, plain_reference(target, requests))
        assert pump.failures.keys() == bad.keys()
        assert "forbid every token" in pump.failures["now"]


def test_logits_that_are_not_finite_fail_only_their_session() -> None:
    """A token whose embedding is NaN: its session fails with a reason; those beside and after it are unharmed."""
    model = random_model("llama")
    poisoned = random_model("llama")
    with torch.no_grad():
        poisoned.get_input_embeddings().weight[299] = float("nan")
    target, sick = prepare(model, compile=False), prepare(poisoned, compile=False)
    requests = {
        f"s{i}": Request(
            [t for t in prompt(i, 20 + 30 * i) if t != 299], SamplingParams(max_tokens=30, bad_words=((299,),))
        )
        for i in range(4)
    }
    pump = Pump(sick, None, pages=8, max_step_tokens=32)
    bad = {f"bad{i}": Request([*prompt(50 + i, 40 * i), 299], SamplingParams(max_tokens=5)) for i in range(3)}
    first = dict(list(requests.items())[:2])
    results = pump.run(in_mode(first | bad, Mode.PLAIN))
    results |= pump.run(in_mode(dict(list(requests.items())[2:]), Mode.PLAIN))  # in pages that held NaN
    assert_same(results, plain_reference(target, requests))
    assert pump.failures.keys() == bad.keys()
    assert all("not finite" in reason for reason in pump.failures.values())


def test_stale_unknown_and_duplicate_messages_are_counted_and_dropped() -> None:
    """Other epochs, sessions that are not open, a second open of the same epoch."""
    direct = Direct()
    request = plain(greedy(9, 6))
    engine = direct.engine
    direct.open("s", request, epoch=3)
    direct.open("s", request, epoch=3)
    direct.open("s", request, epoch=2)
    engine.receive([Nodes("s", 2, 9, ()), CloseSession("s", 4), DraftState("s", 2, False), CloseSession("t", 1)])
    assert engine.stats.messages_stale == 6
    assert engine.num_sessions == 1
    assert tokens_of(direct.drain()["s"]) == reference_tokens(9, 6)


def test_outcomes_and_proposals_say_which_context_they_continue() -> None:
    """Each outcome begins where the one before ended, so that one that is missing or comes twice shows."""
    direct, outcomes = run_with_proposal(greedy(9, 12), reference_tokens(9, 12)[:3])
    at = 9
    for outcome in outcomes:
        assert outcome.context_len == at
        at += len(outcome.token_ids)
    assert [(m.context_len, len(m.node_ids)) for m in direct.sent if isinstance(m, InFlight)] == [(9, 3)]


@pytest.mark.parametrize("early", [True, False])
def test_a_tree_that_misses_nodes_is_reported_once_and_followed_again(early: bool) -> None:
    """The draft has seen the whole context, yet the tree is lost: its session asks to be opened on a draft again."""
    want = reference_tokens(9, 12)
    direct = Direct()
    direct.open("s", greedy(9, 12))
    direct.engine.step()
    if not early:
        direct.engine.step()
    at = 9 + len(tokens_of(direct.outcomes()["s"]))
    for i in range(2):  # the nodes of the committed tokens never came; early: before the outcome is walked along
        direct.engine.receive([Nodes("s", 1, at, (Node(50 + i, 40, 5, 0.5),))])
    direct.engine.step()
    assert [m for m in direct.sent if isinstance(m, TreeLost)] == [TreeLost("s", 1)]
    assert direct.engine.stats.trees_lost == 1
    at = 9 + len(tokens_of(direct.outcomes()["s"]))
    direct.engine.receive([DraftState("s", 1, True, 2, at), Nodes("s", 2, at, proposal_of(want[at - 9 :][:4]))])
    outcomes = direct.drain()["s"]
    assert tokens_of(outcomes) == want
    assert max(o.round.num_accepted for o in outcomes) == 4


def test_a_newer_open_replaces_the_session() -> None:
    """Re-opened from the token history: the text goes on where it was, under the new epoch."""
    want = reference_tokens(9, 12)
    direct = Direct()
    request = plain(greedy(9, 12))
    direct.open("s", request)
    for _ in range(4):
        direct.engine.step()
    history = (*request.prompt, *tokens_of(direct.outcomes()["s"]))
    direct.engine.receive([replace(message("s", request, 2), token_ids=history)])
    assert direct.engine.num_sessions == 1
    direct.engine.check_integrity()
    outcomes = direct.drain()["s"]
    assert tokens_of(outcomes) == want
    assert {o.epoch for o in outcomes} == {1, 2}


def test_closing_frees_everything_at_any_time() -> None:
    """While it waits, while it is prefilled, while it decodes."""
    direct = Direct(max_sessions=2, budget=32)
    for i in range(4):
        direct.open(f"s{i}", plain(greedy(50 + i, 50)))
    for i, steps in ((3, 1), (0, 6), (1, 1), (2, 0)):
        for _ in range(steps):
            direct.engine.step()
        direct.engine.receive([CloseSession(f"s{i}", 1)])
        direct.engine.check_integrity()
    assert direct.engine.num_sessions == 0
    assert direct.engine.runner.cache.num_used == 0
    assert direct.engine.step() is False
    assert direct.engine.wait_s() is None


# -- waiting for a draft --------------------------------------------------------------------------------------------


def test_sequential_mode_recovers_from_a_silent_draft() -> None:
    """It waits a second of the (virtual) clock, once; the tokens are the same, and then it steps without waiting."""
    want = reference_tokens(9, 12)
    direct = Direct()
    request = replace(greedy(9, 12), speculation=SpeculationParams(mode=Mode.SEQUENTIAL))
    direct.open("s", request)
    direct.drain()
    waited = direct.engine.wait_s()
    assert waited is not None
    assert 0.9 < waited <= 1.0
    direct.clock.now += waited / 2
    assert direct.engine.step() is False
    direct.clock.now += waited / 2 + 1e-6
    before = direct.clock.now
    assert tokens_of(direct.drain()["s"]) == want
    assert direct.clock.now - before < 0.1


def test_a_draft_token_into_a_dead_end_never_fails_its_session() -> None:
    """After token 60 every token is forbidden, and the draft proposes it: the text is plain's."""
    options = {"bad_words": tuple((60, b) for b in range(VOCAB)), "logit_bias": {60: -100.0}}
    request = greedy(9, 12, **options)
    want = list(plain_reference(pair("llama")[0], {"s": request})["s"].token_ids)
    assert 60 not in want
    for at in (0, 2):
        direct, outcomes = run_with_proposal(request, [*want[:at], 60, 61, 62])
        assert not direct.failures()
        assert tokens_of(outcomes) == want
        assert outcomes[0].round.num_accepted == at
