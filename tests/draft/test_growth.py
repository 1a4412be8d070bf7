"""Each policy expands exactly what its definition says, in its order."""

import math
import random

import pytest

from paceline.core.tree import SpeculationTree, TreeNode
from paceline.draft.growth import Frontier, Growth, Reach, check_integrity
from paceline.messages import Node
from paceline.types import SpeculationParams, warn_of_growth

VOCAB = 8


class Grower:
    """Expands everything a frontier offers, with `fan_out` children of random falling probabilities."""

    def __init__(self, growth: Growth, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.growth = growth
        self.tree = SpeculationTree(VOCAB, 1)
        self.frontier = Frontier(self.tree, growth)
        self.next_id = 1

    def expand_one(self) -> TreeNode | None:
        node = self.frontier.peek()
        if node is None:
            return None
        assert self.frontier.pop() is node
        node.expanded = True
        probs = sorted((self.rng.random() for _ in range(self.growth.fan_out)), reverse=True)
        for token, prob in enumerate(probs):
            child = Node(self.next_id, node.node_id, token, prob / sum(probs))
            assert self.tree.add([child]).added == 1
            added = self.tree.get(self.next_id)
            assert added is not None
            self.frontier.push_below(node, (added,))
            self.next_id += 1
        check_integrity(self.frontier, self.tree)
        return node

    def expand_all(self, limit: int = 10_000) -> list[TreeNode]:
        done: list[TreeNode] = []
        while len(done) < limit and (node := self.expand_one()) is not None:
            done.append(node)
        return done

    def path(self, node: TreeNode) -> tuple[int, ...]:
        tokens: list[int] = []
        while node.parent is not None:
            tokens.append(node.token_id)
            node = node.parent
        return tuple(reversed(tokens))

    def fly(self, k: int) -> None:
        self.frontier.commit(self.tree.proposal(k).node_ids)


def test_best_first_takes_the_likeliest_leaf_each_time() -> None:
    grower = Grower(Growth(k=3, fan_out=3, min_path_prob=1e-6))
    for _ in range(60):
        leaves = [n for n in grower.tree.nodes() if not n.expanded and n.position - grower.tree.anchor.position <= 3]
        node = grower.expand_one()
        if node is None:
            assert not leaves
            break
        assert node.log_path == max(leaf.log_path for leaf in leaves)


def test_best_first_stops_where_no_proposal_can_reach_and_goes_on_after_a_commit() -> None:
    grower = Grower(Growth(k=2, fan_out=2, min_path_prob=1e-9))
    assert len(grower.expand_all()) == 1 + 2 + 4  # the anchor, next tokens, and one more: proposals of 2
    grower.fly(2)
    # Each place to be cut (anchor, 1st, 2nd in flight) now has outcomes with binary trees of depth 2 below.
    expected = {path for path in _all_paths(4) if _ahead(path, (0, 0)) <= 2}
    grower.expand_all()
    assert {grower.path(n) for n in grower.tree.nodes() if n.expanded} == expected
    kept = [n for n in grower.tree.nodes() if n.expanded and grower.path(n)[:2] == (0, 1)]
    grower.tree.walk((0, 1))
    grower.frontier.commit(())
    check_integrity(grower.frontier, grower.tree)
    assert all(n.alive for n in kept)
    assert all(not n.expanded or n in kept for n in grower.tree.nodes())
    assert len(grower.expand_all()) == 4, "nodes at depth 0 and 1 had been expanded, those at depth 2 follow"


def _all_paths(depth: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        paths += [(*p, t) for p in paths for t in (0, 1) if (*p, t) not in paths]
    return paths


def _ahead(path: tuple[int, ...], in_flight: tuple[int, ...]) -> int:
    same = 0
    while same < min(len(path), len(in_flight)) and path[same] == in_flight[same]:
        same += 1
    return len(path) - same


def test_best_first_leaves_out_what_hardly_happens() -> None:
    grower = Grower(Growth(k=8, fan_out=3, min_path_prob=0.05))
    expanded = grower.expand_all()
    assert all(math.exp(n.log_path) >= 0.05 for n in expanded)
    assert grower.frontier.peek() is None


def test_sequential_grows_one_chain_and_waits() -> None:
    grower = Grower(Growth.sequential(4))
    assert [grower.path(n) for n in grower.expand_all()] == [(0,) * d for d in range(4)]
    assert len(grower.tree.proposal(9)) == 4
    grower.tree.walk((0,))
    grower.frontier.commit(grower.tree.proposal(9).node_ids)
    assert grower.frontier.peek() is None, "a proposal is in flight"
    grower.frontier.commit(())
    assert len(grower.expand_all()) == 1
    assert Grower(Growth.sequential(0)).expand_all() == []


def test_a_tree_reaches_two_tokens_beyond_what_is_verified() -> None:
    """From K on it shrinks while proposals are short, and grows again by two a round."""
    reach = Reach(8)
    assert reach.tokens == 8
    for _ in range(40):
        reach.observe(1)
    assert reach.tokens == 3
    grown = []
    for _ in range(4):
        reach.observe(reach.tokens)
        grown.append(reach.tokens)
    assert grown == [5, 7, 8, 8]


def test_nodes_beyond_the_reach_are_not_expanded() -> None:
    """Nor before the next commit has brought them nearer; a chain goes to K."""
    tree = SpeculationTree(VOCAB, 1)
    frontier = Frontier(tree, Growth(8))
    assert frontier.reach is not None
    frontier.reach.longest.value = 0.0
    frontier.commit(())
    for i in range(1, 7):
        node = frontier.pop() if frontier.peek() else None
        if node is None:
            break
        tree.add([Node(i, node.node_id, i, 1.0)])
        child = tree.get(i)
        assert child is not None
        frontier.push_below(node, (child,))
    assert len(tree) == 3, "the anchor, and two ahead, were expanded"
    assert Frontier(SpeculationTree(VOCAB, 1), Growth.sequential(4)).reach is None


def test_a_request_that_names_the_growth_of_earlier_versions_is_served(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_growth.cache_clear()
    for growth in ("uniform", "geometric", "best_first"):
        assert SpeculationParams.model_validate({"growth": growth, "max_draft_tokens": 3}) == SpeculationParams(
            max_draft_tokens=3
        )
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["speculation.growth has no effect"]
    with pytest.raises(ValueError, match="growth"):
        SpeculationParams.model_validate({"growth": "sideways"})
