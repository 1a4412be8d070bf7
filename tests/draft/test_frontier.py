"""A frontier finds the places of nodes together; each alone, by its own path to the anchor, comes to the same.

Mutants that must fail here: `push_below` without the token ahead; a number that is taken over from a sibling although
the node is in flight; one that is kept over a commit.
"""

from __future__ import annotations

import random

import pytest

from paceline.core.tree import SpeculationTree, TreeNode
from paceline.draft.growth import BestFirst, Frontier, Growth, InTurn, Sequential
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


def heap_of(frontier: Frontier) -> list[tuple[tuple[float, float], int, TreeNode]]:
    frontier.peek()  # sorts it
    return frontier._heap


@pytest.mark.parametrize(
    "growth", [BestFirst(K, 3, 1e-3), InTurn(K, 3, 1e-3), Sequential(K)], ids=lambda g: type(g).__name__
)
def test_a_frontier_offers_what_the_definition_says(growth: Growth) -> None:
    rng = random.Random(7)
    num_offered = num_flying = 0
    for _ in range(12):
        tree, next_id = SpeculationTree(VOCAB, 1), 1
        frontier = Frontier(tree, growth)
        in_flight: set[int] = set()
        for _ in range(40):
            order = expected(tree, frontier, growth, in_flight)
            assert [node.node_id for _, _, node in sorted(heap_of(frontier))] == order
            num_offered += len(order)
            if frontier.peek() is not None and rng.random() < 0.8:
                node = frontier.pop()
                assert node.node_id == order[0]
                node.expanded = True
                new = []
                for token_id in range(rng.randint(0, 3)):
                    child = tree.attach(Node(next_id, node.node_id, token_id, rng.random()))
                    assert isinstance(child, TreeNode)
                    new.append(child)
                    next_id += 1
                frontier.push_below(node, new)
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
            frontier.check_integrity()
    assert num_offered > 50
    assert num_flying > 20
