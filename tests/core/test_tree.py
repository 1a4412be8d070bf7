"""The tree equals an obvious twin under any traffic, and using it never biases the output."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.tree import Added, Producer, Proposal, SpeculationTree
from paceline.messages import Node, SparseDistribution
from paceline.types import Cause

VOCAB = 3


@dataclass
class SlowTree:
    """Keeps a flat list of nodes and filters it by ancestry after every operation."""

    max_nodes: int
    live: list[Node] = field(default_factory=list)
    anchor: int = 0
    suffix: list[int] = field(default_factory=list)

    def below(self, node: Node, by_id: dict[int, Node]) -> bool:
        while node.parent_id != self.anchor:
            if node.parent_id not in by_id:
                return False
            node = by_id[node.parent_id]
        return True

    def settle(self) -> None:
        while self.suffix:
            step = [n for n in self.live if n.parent_id == self.anchor and n.token_id == self.suffix[0]]
            if not step:
                break
            self.anchor = step[0].node_id
            self.suffix.pop(0)
        by_id = {n.node_id: n for n in self.live}
        self.live = [n for n in self.live if self.below(n, by_id)]
        if self.suffix:
            self.live = []

    def walk(self, tokens: list[int]) -> None:
        self.suffix += tokens
        self.settle()

    def add(self, node: Node) -> str:
        here = [n.node_id for n in self.live] + [self.anchor]
        siblings = [n.token_id for n in self.live if n.parent_id == node.parent_id]
        if node.parent_id not in here or (self.suffix and node.token_id != self.suffix[0]):
            return "stale"
        if node.node_id in here or node.node_id <= node.parent_id or node.token_id in siblings:
            return "invalid"
        if not 0 <= node.token_id < VOCAB or math.isnan(node.prob) or not 0 <= node.prob <= 1:
            return "invalid"
        if len(here) > self.max_nodes:
            return "dropped"
        self.live.append(node)
        self.settle()
        return "added"

    def proposal(self, k: int) -> list[int]:
        ids, at = [], self.anchor
        while len(ids) < k:
            children = [n for n in self.live if n.parent_id == at and n.sampled]
            if not children:
                break
            at = max(children, key=lambda n: n.prob).node_id
            ids.append(at)
        return ids


nodes_ = st.builds(
    Node,
    node_id=st.integers(-1, 12),
    parent_id=st.integers(-1, 8),
    token_id=st.integers(-1, VOCAB),
    prob=st.sampled_from([0.0, 0.1, 0.5, 0.5, 1.0, -0.1, 1.5, math.nan]),
    sampled=st.booleans(),
)
operations = st.one_of(st.lists(nodes_, max_size=6), st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple))


@given(st.lists(operations, max_size=40), st.integers(1, 6))
@settings(max_examples=400, deadline=None)
def test_equals_the_slow_tree_under_any_traffic(messages: list[object], max_nodes: int) -> None:
    tree, slow = SpeculationTree(VOCAB, 5, max_nodes=max_nodes), SlowTree(max_nodes)
    length = 5
    for message in messages:
        if isinstance(message, list):
            fates = [slow.add(node) for node in message]
            wanted = Added(*(fates.count(name) for name in ("added", "stale", "invalid", "dropped")))
            assert tree.add(message) == wanted
        else:
            assert isinstance(message, tuple)
            slow.walk(list(message))
            tree.walk(message)
            length += len(message)
        tree.check_integrity()
        assert tree.context_len == length
        assert (tree.anchor.node_id, list(tree.suffix)) == (slow.anchor, slow.suffix)
        assert {n.node_id for n in tree.nodes()} == {n.node_id for n in slow.live} | {slow.anchor}
        for k in (0, 1, 3):
            assert list(tree.proposal(k).node_ids) == slow.proposal(k)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_both_sides_agree_once_everything_has_arrived(data: st.DataObject) -> None:
    """Commits and nodes travel in order but arbitrarily late; the draft answers a miss with one more node."""
    draft, target = SpeculationTree(VOCAB, 1), SpeculationTree(VOCAB, 1)
    to_target: deque[Node] = deque()
    to_draft: deque[int] = deque()
    next_id = 1

    def publish(node: Node) -> None:
        nonlocal next_id
        next_id += 1
        assert draft.add([node]).added == 1
        to_target.append(node)

    def commit_at_draft() -> None:
        for token in draft.walk([to_draft.popleft()]).unresolved:
            publish(Node(next_id, draft.anchor.node_id, token, 1.0, sampled=False))

    for action in data.draw(st.lists(st.sampled_from(["grow", "grow", "deliver", "commit", "learn"]), max_size=60)):
        if action == "grow":
            parent = data.draw(st.sampled_from(list(draft.nodes())))
            token = data.draw(st.integers(0, VOCAB - 1))
            if token not in parent.children:
                publish(Node(next_id, parent.node_id, token, 0.5))
        elif action == "deliver" and to_target:
            counts = target.add([to_target.popleft()])
            assert counts.invalid == counts.dropped == 0
        elif action == "commit":
            token = data.draw(st.integers(0, VOCAB - 1))
            target.walk([token])
            to_draft.append(token)
        elif action == "learn" and to_draft:
            commit_at_draft()
        draft.check_integrity()
        target.check_integrity()
        assert not draft.lost
    while to_draft:
        commit_at_draft()
    target.add(to_target)
    assert not target.lost
    assert [n.node_id for n in target.nodes()] == [n.node_id for n in draft.nodes()]
    assert target.context_len == draft.context_len


def grown() -> SpeculationTree:
    """0 ─▶ 1(token 0, 0.6) ─▶ 3(token 1, 0.5) ─▶ 4(token 2, 0.4); 0 ─▶ 2(token 1, 0.3)"""
    tree = SpeculationTree(VOCAB, 1)
    nodes = [Node(1, 0, 0, 0.6), Node(2, 0, 1, 0.3), Node(3, 1, 1, 0.5), Node(4, 3, 2, 0.4)]
    assert tree.add(nodes) == Added(added=4)
    return tree


@pytest.mark.parametrize(
    ("tokens", "cause", "num_found"),
    [
        ((0,), Cause.HIT, 1),
        ((0, 1), Cause.HIT, 2),
        ((2,), Cause.TOKEN, 0),
        ((0, 0), Cause.TOKEN, 1),
        ((1, 0), Cause.K, 1),
        ((0, 1, 2, 0), Cause.K, 3),
        ((1,), Cause.LATE, 1),
        ((), Cause.HIT, 0),
    ],
)
def test_a_walk_says_where_the_next_proposal_comes_from(tokens: tuple[int, ...], cause: Cause, num_found: int) -> None:
    tree = grown()
    walk = tree.walk(tokens)
    assert walk.cause is cause
    assert len(walk.node_ids) == num_found
    assert walk.unresolved == tokens[num_found:]
    if walk.unresolved:
        assert tree.walk((0,)).cause is Cause.LATE


def test_nodes_that_come_late_still_serve() -> None:
    tree = grown()
    tree.walk((2, 1))
    assert tree.lost
    assert tree.proposal(4) == Proposal()
    late = [Node(5, 0, 2, 1.0, sampled=False), Node(6, 5, 0, 0.9), Node(7, 5, 1, 0.1), Node(8, 7, 1, 0.5)]
    assert tree.add(late) == Added(added=3, stale=1)
    assert tree.anchor.node_id == 7
    assert tree.proposal(4).token_ids == (1,)


def test_a_proposal_is_the_best_path_and_can_be_cut() -> None:
    proposal = grown().proposal(2)
    assert proposal == Proposal((0, 1), (None, None), (0.6, 0.5), (1, 3))
    assert proposal.first(1) == Proposal((0,), (None,), (0.6,), (1,))
    assert proposal.first(5) is proposal
    assert proposal.first(-1) == proposal.first(0) == Proposal()


@pytest.mark.parametrize(
    "node",
    [
        Node(7, 0, 2, 0.5),
        Node(Producer.LOOKUP.first_id, 0, 2, 0.5),
        Node(Producer.HEAD.first_id, Producer.HEAD.first_id, 2, 0.5),
        Node((9 << 28) + 1, 0, 2, 0.5),
        Node(Producer.HEAD.first_id + 5, 0, 0, 0.5),
    ],
)
def test_a_producer_has_ids_of_its_own_and_predicts_a_token_once(node: Node) -> None:
    tree = SpeculationTree(VOCAB, 1, producer=Producer.HEAD)
    assert tree.add([Node(Producer.HEAD.first_id, 0, 0, 0.5)]) == Added(added=1)
    assert tree.add([node]) == Added(invalid=1)
    assert tree.proposal(2).producer is Producer.HEAD
    tree.check_integrity()


SUBTREE = Proposal((5, 6, 7, 6, 8, 5), parents=(-1, 0, 1, -1, 3, 3))
"""5 6 7, and 6 with 8 or 5 behind it."""


def test_a_subtree_is_followed_branch_by_branch() -> None:
    assert SUBTREE.suffixes() == [(), (5,), (5, 6), (5, 6, 7), (6,), (6, 8), (6, 5)]
    assert [SUBTREE.path(i) for i in (-1, 2, 4, 5)] == [(), (0, 1, 2), (3, 4), (3, 5)]
    assert SUBTREE.follow([6, 0, 0, 0, 5, 0, 0]) == SUBTREE.along((6, 5)) == SUBTREE.along((6, 5, 1)) == [3, 5]
    assert SUBTREE.follow([5, 6, 6, 0, 5, 0, 0]) == SUBTREE.along((5, 6, 6)) == [0, 1]
    assert SUBTREE.follow([7, 6, 6, 0, 5, 0, 0]) == SUBTREE.along(()) == []
    assert SUBTREE.first(3).is_chain
    assert SUBTREE.first(3).suffixes() == Proposal((5, 6, 7)).suffixes()
    assert SUBTREE.first(4).parents == (-1, 0, 1, -1)


GOOD_Q = SparseDistribution.of((0, 2), (0.25, 0.75))


@pytest.mark.parametrize(
    ("token_id", "q", "fits"),
    [
        (0, GOOD_Q, True),
        (2, GOOD_Q, True),
        (1, GOOD_Q, False),
        (0, None, False),
        (0, SparseDistribution.of((), ()), False),
        (0, SparseDistribution.of((0, 2), (0.5, 0.6)), False),
        (0, SparseDistribution.of((0, 2), (math.nan, 0.75)), False),
        (0, SparseDistribution.of((2, 0), (math.nan, 0.75)), False),
        (0, SparseDistribution.of((0, 2), (1.25, -0.25)), False),
        (0, SparseDistribution.of((0, 0), (0.5, 0.5)), False),
        (0, SparseDistribution.of((0, VOCAB), (0.5, 0.5)), False),
        (0, SparseDistribution.of((0, -1), (0.5, 0.5)), False),
        (0, SparseDistribution.of((0,), (0.5, 0.5)), False),
        (0, SparseDistribution.of((0, 2), (0.0, 1.0)), False),
        (0, SparseDistribution.of((0, 2), (math.inf, 1.0)), False),
        (0, SparseDistribution.of((0, 2), (1e308, 1e308)), False),
        (0, SparseDistribution.of((0, 2), (math.nan, 1e308)), False),
    ],
)
def test_rejection_rule_takes_only_nodes_that_can_have_been_drawn(token_id, q, fits) -> None:
    tree = SpeculationTree(VOCAB, 1, rejection=True)
    assert tree.add([Node(1, 0, token_id, 0.5, q=q)]) == Added(added=int(fits), invalid=int(not fits))
    tree.check_integrity()


def test_rejection_rule_proposes_the_sampled_child_however_unlikely() -> None:
    tree = SpeculationTree(VOCAB, 1, rejection=True)
    nodes = [
        Node(1, 0, 0, 0.01, q=GOOD_Q),
        Node(2, 0, 1, 0.9, sampled=False),
        Node(3, 0, 2, 0.1, q=GOOD_Q),
        Node(4, 1, 1, 0.9, sampled=False),
        Node(5, 2, 2, 0.5, q=GOOD_Q),
    ]
    assert tree.add(nodes) == Added(added=4, invalid=1)
    assert tree.proposal(3).token_ids == (0,)
    assert tree.proposal(3).qs == (GOOD_Q,)
    tree.walk((1,))
    assert tree.proposal(3).token_ids == (2,)


# The selection-bias trap, by exact enumeration

Law = dict[tuple[int, ...], Fraction]


def F(*numbers: int) -> list[Fraction]:
    return [Fraction(n, sum(numbers)) for n in numbers]


P = {(): F(1, 5, 4), (0,): F(3, 1, 1), (1,): F(1, 1, 6), (2,): F(2, 2, 1)}
Q = {(): F(4, 3, 3), (0,): F(1, 3, 2), (1,): F(2, 5, 1), (2,): F(1, 1, 1)}


def verify(p: Callable[[tuple[int, ...]], list[Fraction]], proposal: Proposal) -> Law:
    """Leviathan et al. 2211.17192, exactly: the law of the accepted tokens and the next token."""
    law: Law = {}
    done, mass = (), Fraction(1)
    for token, dist in zip(proposal.token_ids, proposal.qs, strict=True):
        assert dist is not None
        q = [Fraction(0)] * VOCAB
        for v, prob in zip(dist.token_ids, dist.probs, strict=True):
            q[v] = Fraction(prob).limit_denominator(1000)
        target = p(done)
        accept = min(Fraction(1), target[token] / q[token])
        rest = [max(a - b, Fraction(0)) for a, b in zip(target, q, strict=True)]
        for v in range(VOCAB):
            if accept < 1:
                key = (*done, v)
                law[key] = law.get(key, Fraction(0)) + mass * (1 - accept) * rest[v] / sum(rest)
        done, mass = (*done, token), mass * accept
    for v, prob in enumerate(p(done)):
        law[(*done, v)] = law.get((*done, v), Fraction(0)) + mass * prob
    return law


def sparse(q: list[Fraction]) -> SparseDistribution:
    return SparseDistribution.of(tuple(range(VOCAB)), tuple(float(x) for x in q))


def trees(extend: Callable[[int, int], bool]) -> Iterator[tuple[Fraction, SpeculationTree]]:
    """Every tree that a draft may draw, with its probability: a sampled first token, all others as predicted
    outcomes, and a sampled token below those first tokens that the draft chose to extend."""
    for first, *seconds in itertools.product(range(VOCAB), repeat=1 + VOCAB):
        tree = SpeculationTree(VOCAB, 1, rejection=True)
        weight = Q[()][first]
        tree.add([Node(1 + first, 0, first, 0.5, q=sparse(Q[()]))])
        tree.add([Node(1 + v, 0, v, 0.2, sampled=False) for v in range(VOCAB) if v != first])
        for v, second in enumerate(seconds):
            weight *= Q[(v,)][second]
            if extend(v, first):
                added = tree.add([Node(4 + v, 1 + v, second, 0.5, q=sparse(Q[(v,)]))])
                assert added.added == 1
        yield weight, tree


def law_of_two_tokens(extend: Callable[[int, int], bool], propose: Callable[[SpeculationTree, int], Proposal]) -> Law:
    """Two tokens of output through one or two rounds, each with the proposal that the tree offers."""
    total: Law = {}
    for weight, tree in trees(extend):
        for tokens, prob in verify(lambda done: P[done[:1]] if len(done) < 2 else F(1, 1, 1), propose(tree, 2)).items():
            if len(tokens) >= 2:
                total[tokens[:2]] = total.get(tokens[:2], Fraction(0)) + weight * prob
                continue
            # A tree is walked once: rebuild what is below the outcome.
            below = SpeculationTree(VOCAB, 1, rejection=True)
            below.add(_nodes_of(tree))
            below.walk(tokens)
            proposal = propose(below, 1)
            for second, then in verify(lambda done, at=tokens: P[at] if not done else F(1, 1, 1), proposal).items():
                key = (tokens[0], second[0])
                total[key] = total.get(key, Fraction(0)) + weight * prob * then
    return total


def _nodes_of(tree: SpeculationTree) -> list[Node]:
    return [Node(n.node_id, n.parent.node_id, n.token_id, n.prob, n.sampled, n.q) for n in tree.nodes() if n.parent]


EXACT = {(a, b): P[()][a] * P[(a,)][b] for a in range(VOCAB) for b in range(VOCAB)}


@pytest.mark.parametrize(
    "extend",
    [
        lambda v, first: False,
        lambda v, first: True,
        lambda v, first: v == first,
        lambda v, first: Q[()][v] > Fraction(3, 10),  # by the token itself: a deeper position may depend on it
        lambda v, first: v == (first + 1) % VOCAB,
    ],
)
def test_rejection_rule_keeps_the_law_however_the_tree_was_grown(extend: Callable[[int, int], bool]) -> None:
    assert law_of_two_tokens(extend, SpeculationTree.proposal) == EXACT


def cut_by_own_probability(tree: SpeculationTree, k: int) -> Proposal:
    """Mutant: leaves out a drawn token, and all after it, if it was unlikely to be drawn."""
    proposal = tree.proposal(k)
    end = 0
    for token, q in zip(proposal.token_ids, proposal.qs, strict=True):
        if q is None or q.probs[q.token_ids.index(token)] < 0.35:
            break
        end += 1
    return proposal.first(end)


def drop_by_a_later_token(tree: SpeculationTree, k: int) -> Proposal:
    """Mutant: uses the whole proposal or nothing, judged by the tokens in it."""
    proposal = tree.proposal(k)
    return Proposal() if sum(proposal.token_ids) > 1 else proposal


def most_probable_child(tree: SpeculationTree, k: int) -> Proposal:
    """Mutant: proposes a predicted outcome with the q of the sampled token."""
    children = list(tree.anchor.children.values())
    q = next((c.q for c in children if c.q), None)
    if q is None or k == 0:
        return Proposal()
    best = max(children, key=lambda c: q.probs[c.token_id])
    return Proposal((best.token_id,), (q,), (best.prob,), (best.node_id,))


@pytest.mark.parametrize("mutant", [cut_by_own_probability, drop_by_a_later_token, most_probable_child])
def test_the_trap_catches_biased_selection(mutant: Callable[[SpeculationTree, int], Proposal]) -> None:
    law = law_of_two_tokens(lambda v, first: True, mutant)
    assert sum(law.values()) == 1
    assert law != EXACT
