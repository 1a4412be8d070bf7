"""The draft engine against targets that know their own text: whatever happens, it only ever costs time."""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models import pair

from paceline.config import DraftOptions, DraftSetup, NgramOptions, SuffixOptions, TargetOptions, TargetSetup
from paceline.draft import build
from paceline.draft import engine as engine_module
from paceline.draft.engine import DraftEngine
from paceline.drafters.suffix import ngram_drafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import ConfigError
from paceline.messages import CloseSession, Commit, Nodes, SessionFailed
from paceline.types import Cause, SamplingParams

from .fakes import VOCAB, Harness, TableDrafter, open_session, plain


@pytest.mark.parametrize(("temperature", "draft_steps"), [*itertools.product([0.0, 1.0], [0, 1, 2, 8])])
def test_text_is_that_of_plain_decoding(temperature: float, draft_steps: int) -> None:
    harness = Harness()
    session = open_session(temperature=temperature)
    harness.open(session)
    for _ in range(20):
        harness.round(draft_steps)
    target = harness.targets["s"]
    assert target.text == plain(session, len(target.text) - 3)
    accepted = len(target.text) - 3 - 20
    if draft_steps == 0:
        assert accepted == 0
    if draft_steps == 8:
        assert accepted > 15, "the draft is good enough for more than this"
        assert target.causes.count(Cause.HIT) > 12
    assert harness.engine.stats.nodes_used + harness.engine.stats.nodes_missed == len(target.text) - 3


def test_what_survives_is_never_computed_again() -> None:
    """`TableDrafter` fails if a node is expanded twice; and a miss costs the rows that were missing."""
    harness = Harness()
    harness.open(open_session())
    for _ in range(30):
        harness.round(4)
    stats = harness.engine.stats
    assert sum(harness.drafter.rows_computed.values()) <= stats.leaves + stats.nodes_missed
    assert max(harness.drafter.anchor_rows) <= 2
    assert stats.tree_steps == stats.forwards


def test_sequential_mode_publishes_one_chain_and_waits() -> None:
    harness = Harness()
    session = open_session(mode="sequential")
    harness.open(session)
    for _ in range(20):
        harness.steps(20)  # until idle
        target = harness.targets["s"]
        assert target.idle
        assert len(target.tree) == len(target.begin()) == target.k
        before = harness.engine.stats.leaves
        harness.round(5)
        assert harness.engine.stats.leaves == before, "nothing is drafted while a proposal is verified"
    assert target.text == plain(session, len(target.text) - 3)
    parents = [node.parent_id for message in harness.sent for node in message.nodes]  # type: ignore[union-attr]
    forced = [m.nodes[0] for m in harness.sent if isinstance(m, Nodes) and m.nodes and not m.nodes[0].sampled]
    assert len(parents) - len(set(parents)) <= len(forced), "siblings come from misses only"


def test_sessions_share_steps_and_forwards() -> None:
    harness = Harness(TableDrafter(max_leaves=6))
    for i in range(5):
        harness.open(open_session(f"s{i}", seed=i, text=[1] * (2 + 3 * i), temperature=i % 2))
    harness.steps(8)
    for _ in range(12):
        harness.round(4)
    stats = harness.engine.stats
    assert stats.leaves / stats.tree_steps > 4
    assert harness.emits <= stats.tree_steps + stats.prefill_chunks + 60, "one emission a step"
    for i in range(5):
        target = harness.targets[f"s{i}"]
        assert target.text == plain(target.open, len(target.text) - len(target.open.token_ids))
        assert len(target.text) > len(target.open.token_ids) + 15
        harness.close(f"s{i}")
    assert harness.engine.num_sessions == 0
    assert not harness.engine.step()
    harness.engine.check_integrity()


def test_nodes_are_sent_together_while_the_target_verifies_and_each_at_once_when_it_may_wait() -> None:
    """Rounds of 20 steps of a millisecond: after a hit about five messages, after a miss one for every step."""
    harness = Harness(TableDrafter(max_leaves=1), tree_budget=4096)
    now = itertools.count()
    harness.engine.clock = lambda: next(now) * 5e-4  # asked at the start of a step and before it sends
    harness.open(open_session())
    target, sent, hit = harness.targets["s"], {True: [], False: []}, False
    for _ in range(60):
        missed, emits = harness.engine.stats.nodes_missed, harness.emits
        harness.round(20)
        if len(target.causes) > 3:  # the first rounds tell how long one is
            sent[hit].append(harness.emits - emits)
        hit = harness.engine.stats.nodes_missed == missed
    assert len(sent[True]) > 5
    assert max(sent[True]) <= 8
    assert len(sent[False]) > 5
    assert max(sent[False]) == 20


def test_an_unexpanded_anchor_comes_first() -> None:
    harness = Harness(TableDrafter(max_leaves=1))
    harness.open(open_session("a"))
    harness.steps(6)
    harness.open(open_session("b", seed=3))
    harness.sent.clear()
    harness.steps(2)  # a prefill chunk, then a tree step; or the other way round, and then the tree step
    harness.steps(1)
    assert any(m.session_id == "b" and isinstance(m, Nodes) and m.nodes for m in harness.sent)


def test_tree_budget_holds_and_idleness_is_said_once_per_commit() -> None:
    harness = Harness(tree_budget=10, fan_out=3)
    harness.open(open_session(max_draft_tokens=8))
    harness.steps(50)
    target = harness.targets["s"]
    assert target.idle
    assert 8 <= len(target.tree) <= 12
    assert [m.idle for m in harness.sent if isinstance(m, Nodes)].count(True) == 1
    harness.engine.receive([Commit("s", 0, len(target.text), (), target.tree.proposal(8).node_ids)])
    harness.steps(5)
    assert [m.idle for m in harness.sent if isinstance(m, Nodes)].count(True) == 2
    assert harness.steps(5) == 0


@pytest.mark.parametrize("options", [{"max_draft_tokens": 0}, {"mode": "plain"}])
def test_nothing_is_drafted_for_a_session_that_wants_nothing(options: dict[str, object]) -> None:
    harness = Harness()
    harness.open(open_session(**options))
    for _ in range(5):
        harness.round(5)
    assert harness.engine.stats.leaves == 0
    assert harness.sent[-1].idle  # type: ignore[union-attr]


def test_a_drafter_without_candidates_is_idle() -> None:
    harness = Harness()
    harness.drafter.silent = True
    harness.open(open_session())
    for _ in range(5):
        harness.round(5)
        assert harness.sent[-1].idle  # type: ignore[union-attr]
    assert harness.engine.stats.nodes_published == 0
    assert harness.engine.stats.leaves == 5, "one look at every anchor"


@pytest.mark.parametrize("anonymous", [False, True])
def test_an_error_in_one_session_ends_that_session_only(anonymous: bool) -> None:
    harness = Harness()
    for name in "abc":
        harness.open(open_session(name, seed=ord(name)))
    harness.round(6)
    harness.drafter.broken, harness.drafter.anonymous_errors = {"b"}, anonymous
    for _ in range(10):
        harness.round(4)
    failures = [m for m in harness.sent if isinstance(m, SessionFailed)]
    assert [(f.session_id, f.epoch) for f in failures] == [("b", 0)]
    assert "boom" in failures[0].message
    assert harness.engine.num_sessions == 2
    for name in "ac":
        target = harness.targets[name]
        assert target.text == plain(target.open, len(target.text) - 3)
        assert target.causes.count(Cause.HIT) >= 6
    assert harness.engine.stats.unknown_messages == 20 - harness.engine.stats.failed_sessions
    # Its target went on plainly; the session is opened again from its text.
    harness.drafter.broken = set()
    harness.open(open_session("b", epoch=1, text=harness.targets["b"].text))
    harness.steps(60)
    assert len(harness.targets["b"].tree.proposal(4)) > 0


def test_errors_at_opening_and_in_commits_are_reported() -> None:
    harness = Harness()
    harness.engine.receive([open_session("bad", text=(VOCAB,))])
    harness.engine.receive([open_session("s"), Commit("s", 0, 3, (VOCAB,))])
    assert harness.engine.step()
    failures = [m for m in harness.sent if isinstance(m, SessionFailed)]
    assert [f.session_id for f in failures] == ["bad", "s"]
    assert all(str(VOCAB) in f.message for f in failures)
    assert harness.engine.num_sessions == 0
    harness.engine.check_integrity()


def test_messages_of_another_epoch_or_session_are_counted_and_dropped() -> None:
    harness = Harness()
    harness.open(open_session(epoch=3))
    harness.round(5)
    harness.engine.receive([Commit("s", 2, 3, (0,)), CloseSession("s", 2), open_session(epoch=2)])
    harness.engine.receive([open_session(epoch=3)])
    harness.engine.receive([Commit("s", 4, 3, (0,)), Commit("nobody", 0, 3, (0,)), CloseSession("nobody", 0)])
    assert harness.engine.stats.stale_messages == 4
    assert harness.engine.stats.unknown_messages == 3
    for _ in range(5):
        harness.round(5)
    target = harness.targets["s"]
    assert target.text == plain(target.open, len(target.text) - 3)
    harness.open(open_session(epoch=4, text=target.text))
    for _ in range(5):
        harness.round(5)
    assert harness.engine.num_sessions == 1
    assert harness.targets["s"].tree.context_len == len(harness.targets["s"].text)


def failures(harness: Harness) -> list[tuple[str, int, str]]:
    """What the engine has said so far of sessions that it gave up."""
    while harness.engine.step():
        harness.engine.check_integrity()
    return [(m.session_id, m.epoch, m.message) for m in harness.sent if isinstance(m, SessionFailed)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": ()}, "num_prompt_tokens is 3"),
        ({"num_prompt_tokens": 4}, "num_prompt_tokens is 4"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens is 0"),
        ({"num_prompt_tokens": -1}, "num_prompt_tokens is -1"),
        ({"token_ids": (1, VOCAB, 2)}, f"token id {VOCAB}"),
        ({"token_ids": (1, -1, 2)}, "token id -1"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -1}, "seed"),
        ({"sampling": SamplingParams(logit_bias={VOCAB: 1.0})}, "logit_bias"),
    ],
)
def test_a_session_that_makes_no_sense_is_refused_alone(changes: dict[str, Any], message: str) -> None:
    harness = Harness()
    harness.open(open_session("good"))
    harness.round(4)
    harness.engine.receive([dataclasses.replace(open_session("bad"), **changes)])
    ((name, epoch, reason),) = failures(harness)
    assert (name, epoch) == ("bad", 0)
    assert message in reason
    assert harness.engine.num_sessions == 1
    for _ in range(5):
        harness.round(4)
    good = harness.targets["good"]
    assert good.text == plain(good.open, len(good.text) - 3)
    assert harness.engine.stats.failed_sessions == 1
    # It may be tried again, under a newer epoch only.
    harness.engine.receive([open_session("bad")])
    assert harness.engine.num_sessions == 1
    harness.engine.receive([open_session("bad", epoch=1)])
    assert harness.engine.num_sessions == 2


def test_sessions_beyond_the_limit_are_refused() -> None:
    harness = Harness(max_sessions=2)
    for name in "abc":
        harness.engine.receive([open_session(name)])
    assert [name for name, _, _ in failures(harness)] == ["c"]
    assert harness.engine.stats.refused_sessions == 1
    harness.engine.receive([open_session("a", epoch=1), CloseSession("b", 0), open_session("c", epoch=1)])
    assert harness.engine.num_sessions == 2
    assert len(failures(harness)) == 1


def test_commits_that_come_twice_change_nothing() -> None:
    """Each is delivered twice, and once more when the context has moved on."""
    harness, twin = Harness(), Harness()
    commits: list[Commit] = []
    receive = harness.engine.receive

    def repeat(messages: Iterable[Any]) -> None:
        for message in messages:
            receive([message, message] if isinstance(message, Commit) else [message])
            if isinstance(message, Commit) and message.token_ids:
                receive(commits[-4:])
                commits.append(message)

    harness.engine.receive = repeat  # type: ignore[method-assign]
    for one in (harness, twin):
        one.open(open_session())
        for _ in range(20):
            one.round(3)
    assert harness.targets["s"].text == twin.targets["s"].text
    assert harness.targets["s"].causes == twin.targets["s"].causes
    assert harness.engine.stats.nodes_used == twin.engine.stats.nodes_used
    assert harness.engine.stats.stale_messages >= 20
    assert harness.engine.stats.failed_sessions == 0


def test_a_gap_in_the_commits_ends_the_session_and_it_is_opened_again() -> None:
    harness = Harness()
    harness.open(open_session("other", seed=1))
    harness.open(open_session())
    for _ in range(3):
        harness.round(5)
    target = harness.targets["s"]
    target.end(target.begin())  # the engine is not told
    at = len(target.text)
    harness.engine.receive([Commit("s", 0, at, target.end(target.begin()))])
    ((name, epoch, reason),) = failures(harness)
    assert (name, epoch) == ("s", 0)
    assert f"this one is at {at}" in reason
    assert harness.engine.stats.lost_commits == 1
    harness.engine.receive([Commit("s", 0, at, (1,)), Commit("s", 0, at + 1, (1,))])
    assert len(failures(harness)) == 1, "once is enough"
    assert harness.engine.stats.unknown_messages == 2
    harness.open(open_session(epoch=1, text=target.text))
    for _ in range(5):
        harness.round(5)
    assert harness.targets["s"].causes.count(Cause.HIT) > 0
    assert harness.targets["other"].causes.count(Cause.HIT) > 0


def test_a_context_longer_than_the_draft_holds_ends_its_session_at_once() -> None:
    harness = Harness(max_context_len=50)
    harness.open(open_session("other", seed=1))
    harness.open(open_session(text=[1] * 50))
    assert harness.engine.num_sessions == 2, "as long as that is allowed"
    harness.engine.receive([Commit("s", 0, 50, (1,) * 200_000)])
    harness.engine.receive([open_session("t", text=[1] * 51)])
    assert harness.engine.num_sessions == 1
    assert harness.engine.stats.nodes_missed == 0, "none of the tokens was looked at"
    told = {name: reason for name, _, reason in failures(harness)}
    assert "has 200050 tokens" in told["s"]
    assert "has 51 tokens: the draft holds at most 50" in told["t"]
    assert harness.engine.stats.refused_sessions == 2
    harness.engine.check_integrity()
    for _ in range(5):
        harness.round(5)
    assert harness.targets["other"].causes.count(Cause.HIT) > 0


@pytest.mark.parametrize(
    ("draft", "options", "longest"),
    [
        (NgramOptions(tree_step_tokens=8), {"max_model_len": 300}, 300),
        (NgramOptions(tree_step_tokens=8), {"max_model_len": 1 << 18}, 1024),
        (SuffixOptions(tree_step_tokens=8), {"max_model_len": 300}, 300),
        (DraftOptions(tree_step_tokens=8), {"max_model_len": 300}, 300),
        (DraftOptions(tree_step_tokens=8), {"max_model_len": 1 << 18}, 2048),
        (DraftOptions(tree_step_tokens=8, tree_budget=1), {"max_sessions": 1}, 18 * 64),
    ],
    ids=["n-gram", "n-gram: the target", "suffix", "model", "model: its positions", "model: its cache"],
)
def test_what_is_built_holds_the_longest_context_that_it_can(draft, options, longest, monkeypatch) -> None:
    monkeypatch.setattr(build, "load_model", lambda *given, **how: pair("llama")[1])
    target = TargetSetup(str(TARGET_DIR), TargetOptions(**options))
    setup = DraftSetup.for_target(target, str(DRAFT_DIR) if isinstance(draft, DraftOptions) else None, draft)
    sent: list[Nodes | SessionFailed] = []
    engine = build.build_draft_engine(setup, sent.extend)
    engine.receive([open_session("fits", text=[1] * longest), open_session("longer", text=[1] * (longest + 1))])
    engine.step()
    assert engine.num_sessions == 1
    (failed,) = [message for message in sent if isinstance(message, SessionFailed)]
    assert failed.session_id == "longer"
    assert f"the context has {longest + 1} tokens: the draft holds at most {longest}" in failed.message


@pytest.mark.parametrize("in_flight", [(999,), (-1, 0, 2**70), tuple(range(10_000))])
def test_unknown_nodes_in_flight_are_none(in_flight: tuple[int, ...]) -> None:
    harness = Harness()
    harness.open(open_session())
    for _ in range(10):
        harness.round(3)
        harness.engine.receive([Commit("s", 0, len(harness.targets["s"].text), (), in_flight)])
        session = harness.engine.sessions["s"]
        assert len(session.in_flight) <= len(session.tree) + 1
    target = harness.targets["s"]
    assert target.text == plain(target.open, len(target.text) - 3)
    assert target.causes.count(Cause.HIT) > 2
    assert not failures(harness)


def test_a_sender_that_believes_a_session_to_be_open_is_told_once() -> None:
    """Its open was lost: it would commit indefinitely. A close or an open that was overtaken opens no session."""
    harness = Harness()
    harness.engine.receive([Commit("s", 2, 3, (1,)), Commit("s", 2, 4, (1,)), Commit("s", 2, 5, (), (1,))])
    assert [(name, epoch) for name, epoch, _ in failures(harness)] == [("s", 2)]
    harness.engine.receive([open_session(epoch=3), Commit("s", 4, 3, (1,))])
    assert [(name, epoch) for name, epoch, _ in failures(harness)] == [("s", 2), ("s", 4)]
    assert harness.engine.num_sessions == 1, "the one that is open lives until it is closed or replaced"
    harness.engine.receive([CloseSession("s", 5), open_session(epoch=5), open_session(epoch=3)])
    assert harness.engine.num_sessions == 0
    harness.engine.receive([CloseSession("late", 0), open_session("late")])
    assert harness.engine.num_sessions == 0
    assert len(failures(harness)) == 2
    # Of what is older than the end nothing is told, and the end is not forgotten for it.
    harness.engine.receive([Commit("s", 1, 3, (1,)), open_session(epoch=4)])
    assert harness.engine.num_sessions == 0
    assert len(failures(harness)) == 2


def test_what_is_kept_of_ended_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "NUM_REMEMBERED", 8)
    harness = Harness()
    for i in range(40):
        harness.engine.receive([open_session(f"a{i}"), CloseSession(f"a{i}", 0), Commit(f"b{i}", 0, 1, (1,))])
        harness.engine.receive([CloseSession(f"c{i}", 0), open_session(f"d{i}", text=(VOCAB,))])
        failures(harness)
    assert len(harness.engine._ended) == len(harness.engine._denied) == 8
    assert not harness.engine.sessions
    assert not harness.engine._failures


def test_an_error_while_prefilling_ends_those_that_wait_only() -> None:
    harness = Harness()
    harness.open(open_session("ready"))
    harness.round(6)
    prefill = harness.drafter.prefill
    harness.drafter.prefill = lambda: 1 / 0  # type: ignore[method-assign,assign,return-value]
    harness.open(open_session("b", text=[1] * 9))
    harness.open(open_session("c", text=[2] * 9))
    harness.steps(2)
    harness.drafter.prefill = prefill  # type: ignore[method-assign]
    assert {name for name, _, _ in failures(harness)} == {"b", "c"}
    for _ in range(5):
        harness.round(6)
    assert harness.targets["ready"].causes.count(Cause.HIT) > 2


def test_a_drafter_is_asked_for_prompts_only_while_there_are_any() -> None:
    harness = Harness()
    prefill, calls = harness.drafter.prefill, list[int]()
    harness.drafter.prefill = lambda: calls.append(1) or prefill()  # type: ignore[method-assign,func-returns-value]
    harness.open(open_session("a", text=[1] * 9))
    for _ in range(6):
        harness.round(6)
    assert sum(calls) == harness.engine.stats.prefill_chunks > 0
    harness.open(open_session("b", text=[2] * 9))
    harness.round(6)
    assert sum(calls) == harness.engine.stats.prefill_chunks


def test_a_device_that_is_gone_ends_the_engine() -> None:
    """No session is at fault, and every other would fail too: the engine has to be started again."""
    for method in ("prefill", "expand"):
        harness = Harness()
        harness.open(open_session(text=[1] * (9 if method == "prefill" else 1)))

        def gone(*_: object) -> None:
            raise torch.AcceleratorError("gone")

        setattr(harness.drafter, method, gone)
        with pytest.raises(torch.AcceleratorError):
            harness.steps(9)


def nonsense() -> st.SearchStrategy[Any]:
    """Any message, most of them for a session that is open."""
    numbers = st.sampled_from([-(2**70), -1, 0, 1, 2, 3, 4, 5, 6, 7, VOCAB - 1, VOCAB, 2**31, 2**70])
    ids = st.lists(numbers, max_size=5).map(tuple)
    names, epochs = st.sampled_from(["good", "bad", "bad", "new"]), st.integers(-1, 6)
    commits = st.builds(Commit, names, epochs, numbers, ids, ids)
    opens = st.builds(
        lambda name, epoch, text, num_prompt, seed: dataclasses.replace(
            open_session(name, epoch=epoch), token_ids=text, num_prompt_tokens=num_prompt, seed=seed
        ),
        names.filter(lambda name: name != "good"),
        epochs,
        ids,
        numbers,
        numbers,
    )
    closes = st.builds(CloseSession, names.filter(lambda name: name != "good"), epochs)
    return st.one_of(commits.filter(lambda c: c.session_id != "good" or c.epoch != 6), opens, closes)


@pytest.mark.slow
@given(st.lists(nonsense(), max_size=40), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_nothing_that_is_received_harms_the_engine_or_another_session(messages: list[Any], steps: int) -> None:
    """Arbitrary messages between the rounds of a good session: it never raises, and that one is served as if alone."""
    harness, alone = Harness(), Harness()
    for one in (harness, alone):
        one.open(open_session("good", epoch=6))
    for _ in range(3):
        harness.round(20)
        alone.round(20)
    for message in messages:
        harness.engine.receive([message])
        for _ in range(steps):
            harness.engine.step()
        harness.engine.check_integrity()
    for _ in range(5):
        harness.round(30)
        alone.round(30)
    target = harness.targets["good"]
    assert target.text == alone.targets["good"].text
    assert target.causes.count(Cause.HIT) >= 4
    assert harness.engine.num_sessions <= 3
    assert all(name != "good" or epoch != 6 for name, epoch, _ in failures(harness))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_of_late_messages_keeps_text_and_invariants(data: st.DataObject) -> None:
    """Both directions are delayed at will, in order; every now and then a session is opened again."""
    harness = Harness(TableDrafter(max_leaves=4), tree_budget=16)
    session = open_session(temperature=data.draw(st.sampled_from([0.0, 1.0])))
    harness.open(session)
    target = harness.targets["s"]
    held: list[Commit] = []
    delivered = 0
    late: list[Nodes] = []
    epoch = 0
    harness.targets.clear()  # nodes are held back below
    actions = st.sampled_from(["step", "step", "target", "nodes", "commit", "reopen"])
    for action in data.draw(st.lists(actions, max_size=60)):
        if action == "step":
            harness.engine.step()
            late += [m for m in harness.sent[delivered:] if isinstance(m, Nodes)]
            delivered = len(harness.sent)
        elif action == "target":
            chain = target.begin()
            context_len = len(target.text)
            held.append(Commit("s", epoch, context_len, (), chain.node_ids))
            held.append(Commit("s", epoch, context_len, target.end(chain)))
        elif action == "nodes" and late:
            message = late.pop(0)
            if message.epoch == epoch:
                target.receive(message)
        elif action == "commit" and held:
            harness.engine.receive([held.pop(0)])
        elif action == "reopen" and target.tree.lost:
            epoch += 1
            again = open_session(
                epoch=epoch, text=target.text, temperature=session.sampling.temperature, seed=session.seed
            )
            target = type(target)(again)
            harness.engine.receive([again])
        harness.engine.check_integrity()
    assert target.text == plain(session, len(target.text) - 3)
    harness.engine.receive(held)
    while harness.engine.step():
        pass
    for message in [*late, *(m for m in harness.sent[delivered:] if isinstance(m, Nodes))]:
        if message.epoch == epoch:
            target.receive(message)
    assert not target.tree.lost
    assert len(target.tree.proposal(4)) > 0


def test_an_ngram_drafter_serves_repetitive_text() -> None:
    sent: list[Nodes | SessionFailed] = []
    engine = DraftEngine(ngram_drafter(min_match=2, max_match=4), sent.extend, vocab_size=VOCAB)
    engine.receive([open_session(text=[1, 2, 3, 4, 5] * 3, temperature=0.0)])
    while engine.step():
        engine.check_integrity()
    tree_tokens = [node.token_id for m in sent if isinstance(m, Nodes) for node in m.nodes]
    assert tree_tokens[:5] == [1, 2, 3, 4, 5]
    engine.receive([Commit("s", 0, 15, (7, 8))])
    sent.clear()
    while engine.step():
        engine.check_integrity()
    last = sent[-1]
    assert isinstance(last, Nodes)
    assert last.idle
    assert [(n.token_id, n.sampled) for n in last.nodes] == [(7, False), (8, False)]


def test_a_draft_of_suffixes_shares_within_a_salt_and_knows_its_corpus(tmp_path: Path) -> None:
    """Built from options as a service builds it: what one session wrote is proposed to the next of its salt."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('[40, 41, 42, 43]\n"def f(x):"\n')
    options = SuffixOptions(shared_tokens=1000, corpus=[str(texts)])
    sent: list[Nodes | SessionFailed] = []
    setup = DraftSetup.for_target(TargetSetup(str(TARGET_DIR)), None, options)
    engine = build.build_draft_engine(setup, sent.extend)

    def proposed(name: str, text: Sequence[int], salt: str) -> list[int]:
        sent.clear()
        engine.receive([replace(open_session(name, text=text), num_prompt_tokens=len(text), cache_salt=salt)])
        while engine.step():
            engine.check_integrity()
        told = [message for message in sent if isinstance(message, Nodes) and message.session_id == name]
        return [node.token_id for message in told for node in message.nodes]

    assert proposed("a", [1, 2, 3], "x") == []
    engine.receive([Commit("a", 0, 3, (4, 5, 6, 7))])
    assert proposed("b", [9, 4, 5], "x")[:2] == [6, 7]
    assert proposed("c", [9, 4, 5], "y") == []
    assert proposed("d", [9, 40, 41], "y")[:2] == [42, 43]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.txt", None, "it cannot be read"),
        ("a.jsonl", "[1, 2]\n{}\n", "line 2 is neither"),
        ("a.jsonl", "[5000000]", "line 1 is neither"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused(name: str, text: str | None, told: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    setup = DraftSetup.for_target(TargetSetup(str(TARGET_DIR)), None, SuffixOptions(corpus=[str(tmp_path / name)]))
    with pytest.raises(ConfigError, match=told):
        build.build_draft_engine(setup, print)
