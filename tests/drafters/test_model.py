"""The model drafter: what a tree node sees is exactly its path, and nothing that survives is computed again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.support.models import VOCAB, prompt, random_model

from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import draft_candidates
from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Candidates, DrafterSessionError, Leaf
from paceline.drafters.ranking import Ranking, RankingRow, Rule, rank
from paceline.errors import ResourceExhaustedError
from paceline.model.loading import prepare
from paceline.types import PAGE_SIZE, SamplingParams

TOP_M = 12


class Twin:
    """A drafter and, beside it, each session's text, so that every candidate is checked against a plain forward."""

    def __init__(self, family: str = "llama", *, pages: int = 12, max_prefill: int = 48, **sampling) -> None:
        self.model = random_model(family)
        self.runner = prepare(random_model(family), compile=False).runner(pages)
        self.drafter = ModelDrafter(self.runner, max_leaves=16, max_prefill_tokens=max_prefill, top_m=TOP_M)
        self.sampling = SamplingParams(temperature=0.8, **sampling)
        self.texts: dict[str, list[int]] = {}
        self.samplers: dict[str, SamplerState] = {}
        self.anchors: dict[str, int] = {}
        self.paths: dict[str, dict[int, tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self.expanded: dict[str, set[int]] = {}
        self.next_id = 1
        self.forwarded = 0
        self.rows_without_room = self.rows_checked = 0
        forward = self.runner.forward

        def counted(steps):
            self.forwarded += sum(len(s.token_ids) for s in steps)
            return forward(steps)

        self.runner.forward = counted

    def open(self, name: str, tokens: list[int], salt: str = "") -> None:
        sampler = SamplerState(self.sampling, 3, tokens, vocab_size=VOCAB)
        self.texts[name], self.samplers[name] = list(tokens), sampler
        self.anchors[name], self.paths[name], self.expanded[name] = 0, {}, set()
        self.drafter.open(name, tokens, sampler, salt)
        self.drafter.check_integrity()

    def prefill(self) -> None:
        while self.drafter.prefill():
            self.drafter.check_integrity()

    def child(self, name: str, parent: int, token: int) -> int:
        """A new node, not expanded."""
        node_id, self.next_id = self.next_id, self.next_id + 1
        ids, tokens = self.paths[name].get(parent, ((), ()))
        self.paths[name][node_id] = ((*ids, node_id), (*tokens, token))
        return node_id

    def expand(self, *leaves: tuple[str, int], room: bool = True) -> Candidates:
        """Expands nodes and compares each row with transformers on the whole path."""
        calls = []
        for name, node in leaves:
            ids, tokens = self.paths[name].get(node, ((), ()))
            calls.append(Leaf(name, node, ids, tokens))
        candidates = self.drafter.expand(calls)
        self.drafter.check_integrity()
        for i, leaf in enumerate(calls):
            if not candidates.log_q[i].isfinite().any():
                assert not room, "no room where there should be some"
                self.rows_without_room += 1
                continue
            self.expanded[leaf.session_id].add(leaf.node_id)
            text = [*self.texts[leaf.session_id], *leaf.path]
            with torch.no_grad():
                logits = self.model(torch.tensor([text]), use_cache=False).logits[0, -1:]
            rows = [Row(self.samplers[leaf.session_id], leaf.path)]
            ids, log_q = draft_candidates(logits, rows, TOP_M)
            assert torch.equal(candidates.token_ids[i], ids[0])
            assert torch.allclose(candidates.log_q[i], log_q[0], atol=2e-5)
            self.rows_checked += 1
        return candidates

    def commit(self, name: str, *nodes: int) -> None:
        """Moves the anchor along nodes, each the child of the one before."""
        tokens = [self.paths[name][n][1][-1] for n in nodes]
        self.samplers[name].append(tokens)
        self.texts[name] += tokens
        below = {n: p for n, p in self.paths[name].items() if nodes[-1] in p[0] and n != nodes[-1]}
        cut = {n: p[0].index(nodes[-1]) + 1 for n, p in below.items()}
        self.paths[name] = {n: (p[0][cut[n] :], p[1][cut[n] :]) for n, p in below.items()}
        self.expanded[name] &= {*below, nodes[-1]}
        kept = [n for n in below if n in self.expanded[name]]
        self.anchors[name] = nodes[-1]
        self.drafter.advance(name, tokens, nodes, kept)
        self.drafter.check_integrity()


def test_nodes_see_exactly_their_path() -> None:
    """Siblings, cousins and other sessions in one forward; mask and positions of each are its own."""
    twin = Twin("gemma3", repetition_penalty=1.3)
    twin.open("a", prompt(1, 70))
    twin.open("b", prompt(2, 5))
    twin.prefill()
    twin.expand(("a", 0), ("b", 0))
    a = [twin.child("a", 0, t) for t in (11, 12, 13)]
    b = twin.child("b", 0, 11)
    twin.expand(*(("a", n) for n in a), ("b", b))
    deeper = [twin.child("a", a[1], t) for t in (20, 21)] + [twin.child("a", a[0], 20)]
    twin.expand(*(("a", n) for n in deeper))
    deepest = twin.child("a", deeper[2], 30)
    twin.expand(("a", deepest), ("b", twin.child("b", b, 50)))


def rankings(temperature: float, *, best: bool, rejection: bool = False) -> tuple[list[Ranking], list[bool]]:
    """Of three calls, and of each call if one pass ranks: of leaves in turn, without room for one, and with a session
    whose processors need more than a pass."""
    runner = prepare(random_model("llama"), compile=False).runner(8)
    drafter = ModelDrafter(runner, max_leaves=16, max_prefill_tokens=48, top_m=TOP_M)
    rows: dict[str, RankingRow] = {}
    for name, length, fan_out, given in (("a", 20, 5, {}), ("b", PAGE_SIZE, 3, {}), ("c", 9, 4, {"top_p": 0.9})):
        sampling = SamplingParams(temperature=temperature, **(given if temperature else {"repetition_penalty": 1.1}))
        sampling = sampling if name == "c" else SamplingParams(temperature=temperature)
        most = {"num_guessed" if rejection else "num_ranked": fan_out}
        sampler = SamplerState(sampling, 3, prompt(1, length), vocab_size=VOCAB, **most)
        rule = Rule.REJECTION if rejection else Rule.COUPLED if temperature else Rule.GREEDY
        rows[name] = RankingRow(Row(sampler), rule, fan_out, nonce=7)
        drafter.open(name, prompt(1, length), sampler)
    while drafter.prefill():
        pass
    found: list[Ranking] = []
    ranked = []
    calls = (
        [("a", ()), ("b", ())],
        [("a", (11,)), ("b", (11,)), ("a", (12,))],
        [("c", ()), ("a", (13,))],
    )
    for at, call in enumerate(calls):
        held = runner.cache.allocate(runner.cache.num_available) if at == 1 else []
        leaves = [Leaf(name, path[0] if path else 0, path, path) for name, path in call]
        candidates = (drafter.expand_best if best else drafter.expand)(leaves)
        runner.cache.release(held)
        drafter.check_integrity()
        ranked.append((candidates.unread if rejection else candidates.ranked) is not None)
        found += rank(candidates, [replace(rows[leaf.session_id], row=row_of(rows, leaf)) for leaf in leaves])
    return found, ranked


def row_of(rows: dict[str, RankingRow], leaf: Leaf) -> Row:
    return Row(rows[leaf.session_id].row.state, leaf.path)


@pytest.mark.compiler
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_best_candidates_of_one_pass_are_those_that_ranking_finds(temperature: float) -> None:
    expected, none = rankings(temperature, best=False)
    found, ranked = rankings(temperature, best=True)
    assert (none, ranked) == ([False] * 3, [True, True, False])
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.gaps == pytest.approx(other.gaps, abs=1e-4)
    assert [len(one.token_ids) for one in found] == [5, 3, 5, 0, 5, 4, 5], "one leaf had no room"


@pytest.mark.compiler
def test_what_one_pass_draws_by_the_rejection_rule_is_what_ranking_draws() -> None:
    expected, none = rankings(0.8, best=False, rejection=True)
    found, unread = rankings(0.8, best=True, rejection=True)
    assert (none, unread) == ([False] * 3, [True] * 3)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids[:1] == other.token_ids[:1]
        assert one.gaps[:1] == pytest.approx(other.gaps[:1], abs=1e-4)
    assert found[-2] == expected[-2], "its processors need more than a pass"
    assert [len(one.token_ids) for one in found] == [5, 3, 5, 0, 5, 4, 5], "one leaf had no room"


def test_a_hit_costs_nothing_and_a_miss_only_what_was_missed() -> None:
    """Tokens forwarded: one per node; surviving rows stay; a missed token costs one."""
    twin = Twin()
    twin.open("a", prompt(1, 30))
    twin.prefill()
    assert twin.forwarded == 29
    twin.expand(("a", 0))
    assert twin.forwarded == 30
    x = twin.child("a", 0, 11)
    y = twin.child("a", x, 12)
    z = twin.child("a", y, 13)
    other = twin.child("a", 0, 14)
    for node in (x, y, z, other):
        twin.expand(("a", node))
    assert twin.forwarded == 34
    twin.commit("a", x, y)  # a hit: y is expanded, z below it stays
    assert twin.forwarded == 34
    w = twin.child("a", z, 15)
    twin.expand(("a", w))  # below z, whose row was not computed again
    assert twin.forwarded == 35
    missed = twin.child("a", y, 99)
    twin.commit("a", missed)  # a miss: pending
    twin.expand(("a", missed))
    assert twin.forwarded == 36
    a, b = twin.child("a", missed, 40), None
    twin.expand(("a", a))
    b = twin.child("a", a, 41)
    twin.commit("a", a, b)  # the outcome b was not expanded: it is pending
    twin.expand(("a", b))
    assert twin.forwarded == 38


def test_several_pending_tokens_are_computed_at_once() -> None:
    """Commits that come before the anchor was expanded."""
    twin = Twin("mistral")
    twin.open("a", prompt(1, 40))
    first = twin.child("a", 0, 11)
    second = twin.child("a", first, 12)
    twin.commit("a", first, second)  # before the prefill is done
    third = twin.child("a", second, 13)
    twin.prefill()
    twin.commit("a", third)
    twin.expand(("a", third))
    assert twin.forwarded == 43


@pytest.mark.slow
def test_dropped_rows_are_used_again() -> None:
    """A session that drafts and misses for long stays within the rows of its text and one tree."""
    twin = Twin(pages=3)
    twin.open("a", prompt(1, 20))
    twin.prefill()
    twin.expand(("a", 0))
    for i in range(40):
        nodes = [twin.child("a", twin.anchors["a"], 10 + j) for j in range(4)]
        for node in nodes:
            twin.expand(("a", node))
        missed = twin.child("a", twin.anchors["a"], 50 + i)
        twin.commit("a", missed)
        twin.expand(("a", missed))
    assert twin.runner.cache.num_used == 1
    assert twin.drafter.sessions["a"].num_rows <= 20 + 40 + 5


def test_prefixes_are_shared() -> None:
    """A second session of the same prompt prefills what lies past the whole pages."""
    twin = Twin()
    text = prompt(1, 2 * PAGE_SIZE + 10)
    twin.open("a", text)
    twin.prefill()
    assert twin.forwarded == len(text) - 1
    twin.open("b", [*text[:-3], 5, 6])
    twin.prefill()
    assert twin.forwarded == len(text) - 1 + 2 * PAGE_SIZE + 9 - 2 * PAGE_SIZE - 1
    twin.expand(("a", 0), ("b", 0))
    twin.expand(("b", twin.child("b", 0, 11)), ("a", twin.child("a", 0, 11)))
    twin.drafter.close("a")
    twin.expand(("b", twin.child("b", 0, 12)))


def test_sessions_of_different_salts_share_no_prefix() -> None:
    twin, text, forwarded = Twin(), prompt(1, PAGE_SIZE + 10), []
    for name, salt in [("a", "x"), ("b", "y"), ("c", ""), ("d", "x")]:
        before = twin.forwarded
        twin.open(name, text, salt)
        twin.prefill()
        forwarded.append(twin.forwarded - before)
    assert forwarded == [len(text) - 1] * 3 + [9]


def test_without_room_there_are_no_candidates_and_later_there_are() -> None:
    """Leaves get -inf, the prompt of a newcomer waits; when a neighbour closes both go on, exactly."""
    twin = Twin(pages=2)
    twin.open("a", prompt(1, 60))
    twin.open("b", prompt(2, 60))
    twin.prefill()
    twin.open("c", prompt(3, 10))
    twin.prefill()
    assert not twin.drafter.ready("c")
    for name in ("a", "b"):
        twin.expand((name, 0))
        for i in range(4):
            twin.expand((name, twin.child(name, 0, 11 + i)))
    unlucky = twin.child("a", 0, 20)
    lucky_free = twin.runner.cache.num_available
    assert lucky_free == 0
    twin.expand(("a", unlucky), room=False)
    assert twin.rows_without_room == 1
    twin.commit("a", unlucky)  # it drops the siblings: the pending token fits into their rows
    twin.expand(("a", unlucky))
    twin.drafter.close("b")
    twin.prefill()
    assert twin.drafter.ready("c")
    twin.expand(("c", 0), ("a", twin.child("a", unlucky, 33)))


def test_an_error_leaves_the_sessions_as_they_were() -> None:
    """A forward that raises gives the rows back."""
    twin = Twin()
    twin.open("a", prompt(1, 10))
    twin.prefill()
    twin.expand(("a", 0))
    node = twin.child("a", 0, 11)
    forward, twin.runner.forward = twin.runner.forward, _raise
    with pytest.raises(RuntimeError, match="broken"):
        twin.expand(("a", node))
    twin.drafter.check_integrity()
    twin.runner.forward = forward
    twin.expand(("a", node))


def test_an_error_while_prefilling_names_the_session_and_leaves_the_others() -> None:
    """One chunk of the batch cannot be computed: it is found, and what it was computed with goes on, exactly."""
    twin = Twin()
    twin.open("a", prompt(1, 20))
    twin.open("b", prompt(2, 9))
    forward = twin.runner.forward

    def broken_for_b(steps):
        if any(len(step.token_ids) == 8 for step in steps):
            raise RuntimeError("broken")
        return forward(steps)

    twin.runner.forward = broken_for_b
    with pytest.raises(DrafterSessionError, match="session b: RuntimeError: broken"):
        twin.drafter.prefill()
    twin.drafter.check_integrity()
    twin.drafter.close("b")
    twin.prefill()
    twin.expand(("a", 0))


def test_prompts_that_cannot_be_computed_together_are_computed_one_by_one() -> None:
    twin = Twin()
    twin.open("a", prompt(1, 20))
    twin.open("b", prompt(2, 9))
    forward = twin.runner.forward
    twin.runner.forward = lambda steps: _raise(steps) if len(steps) > 1 else forward(steps)
    assert twin.drafter.prefill()
    twin.runner.forward = forward
    assert not twin.drafter.prefill(), "all is computed"
    twin.drafter.check_integrity()
    twin.expand(("a", 0), ("b", 0))


def test_a_context_that_can_never_fit_is_refused() -> None:
    twin = Twin(pages=2)
    twin.open("a", prompt(1, 2 * PAGE_SIZE))
    with pytest.raises(ResourceExhaustedError, match=f"has {2 * PAGE_SIZE + 1} tokens.*holds {2 * PAGE_SIZE}"):
        twin.open("b", prompt(2, 2 * PAGE_SIZE + 1))
    twin.drafter.check_integrity()


def _raise(steps):
    raise RuntimeError("broken")
