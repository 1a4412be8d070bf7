"""A frontier finds the places of nodes together; each alone, by its own path to the anchor, comes to the same.

Mutants that must fail here: `push_below` without the token ahead; a number that is taken over from a sibling although
the node is in flight; one that is kept over a commit.
"""

import random
from collections.abc import Callable

import pytest

from paceline.core.native_tree import new_tree
from paceline.core.tree import Refusal, SpeculationTree, TreeNode
from paceline.draft.growth import Frontier, Growth, check_integrity
from paceline.draft.session import new_frontier
from paceline.messages import Node

VOCAB, K = 6, 4


def ahead_of(tree: SpeculationTree, node: TreeNode, in_flight: set[int]) -> int:
    """How far ahead a node is by the definition in ``Growth``."""
    ahead = 0
    while node.node_id not in in_flight and node is not tree.anchor:
        assert node.parent is not None
        node, ahead = node.parent, ahead + 1
    return ahead


def expected(tree: SpeculationTree, frontier: Frontier, growth: Growth, in_flight: set[int]) -> list[int]:
    """The unexpanded nodes that are worth expanding, in order."""
    anchor = tree.anchor
    flying = {i for i in in_flight if (node := tree.get(i)) is not None and node is not anchor}
    longest = max([node.position - anchor.position for node in tree.nodes() if node.node_id in flying], default=0)
    keys = []
    for node in tree.nodes():
        ahead = ahead_of(tree, node, flying)
        near = frontier.reach is None or ahead <= frontier.reach.tokens
        if not node.expanded and near and (key := growth.key(node, anchor, ahead, longest)) is not None:
            keys.append((key, node.node_id))
    return [node_id for _, node_id in sorted(keys)]


def reference(tree: SpeculationTree, growth: Growth) -> Frontier:
    return Frontier(tree, growth)


@pytest.mark.parametrize("make", [reference, pytest.param(new_frontier, marks=pytest.mark.compiler)])
@pytest.mark.parametrize(
    "growth", [Growth(K, 3, 1e-3), Growth(K, 3, 1e-3, in_turn=True), Growth.sequential(K)], ids=str
)
def test_a_frontier_offers_what_the_definition_says(growth: Growth, make: Callable[..., Frontier]) -> None:
    rng = random.Random(7)
    num_offered = num_flying = 0
    for _ in range(12):
        tree, next_id = (SpeculationTree if make is reference else new_tree)(VOCAB, 1), 1
        frontier = make(tree, growth)
        assert isinstance(frontier, Frontier) == (make is reference)
        in_flight: set[int] = set()
        for _ in range(40):
            order = expected(tree, frontier, growth, in_flight)
            assert [node.node_id for node in frontier.split()[0]] == order
            num_offered += len(order)
            if frontier.peek() is not None and rng.random() < 0.8:
                node = frontier.pop()
                assert node.node_id == order[0]
                node.expanded = True
                new = []
                for token_id in range(rng.randint(0, 3)):
                    child = tree.attach(Node(next_id, node.node_id, token_id, rng.random()))
                    assert not isinstance(child, Refusal)
                    new.append(child)
                    next_id += 1
                frontier.push_below(node, new)
                assert all(frontier.wants(child) == (child in frontier.split()[0]) for child in new)
            elif rng.random() < 0.5:  # nodes of any path may be in flight, and some that the tree does not have
                node = rng.choice(list(tree.nodes()))
                in_flight = {1 << 20}
                while node is not tree.anchor:
                    in_flight.add(node.node_id)
                    assert node.parent is not None
                    node = node.parent
                num_flying += len(in_flight) - 1
                frontier.commit(in_flight)
            elif tree.anchor.children:
                tree.walk([rng.choice(list(tree.anchor.children))])
                frontier.commit(in_flight)
                if frontier.reach is not None:
                    frontier.reach.observe(rng.randrange(K))
            elif not tree.anchor.expanded:  # a token that the tree does not have
                tree.walk([0])
                tree.attach(Node(next_id, tree.anchor.node_id, 0, 1.0))
                next_id += 1
                frontier.commit(())
                frontier.push_anchor()
            check_integrity(frontier, tree)
    assert num_offered > 50
    assert num_flying > 20
