"""What a session offers with siblings, and what the budget makes of it."""

import random
from dataclasses import replace
from itertools import islice, pairwise

import pytest
from tests.support.rings import slow
from tests.target.simulation import Simulation, cpu_cost, gpu_cost

from paceline.core import native_tree
from paceline.core.native_tree import new_tree
from paceline.core.tree import Producer, Proposal, SpeculationTree, TreeNode
from paceline.messages import Node
from paceline.target.control import allocation as allocation_module
from paceline.target.control.allocation import Allocation, allocate_draft_tokens
from paceline.target.control.compared import Compared, RankCounts, compare
from paceline.target.control.step_cost import StepCost
from paceline.target.control.subtree import MAX_TREE_TOKENS, SubtreeOffer

EVEN = 1.0


def random_tree(rng: random.Random, size: int = 40) -> SpeculationTree:
    tree = SpeculationTree(100, 1)
    while len(tree) < size:
        parent = rng.choice([*tree.nodes()])
        left = 1.0 - sum(child.prob for child in parent.children.values())
        tree.add([Node(len(tree) + 1, parent.node_id, len(parent.children), left * rng.random(), rng.random() < 0.95)])
    return tree


def path_of(node: TreeNode) -> float:
    prob = 1.0
    while node.parent is not None:
        prob *= node.prob
        node = node.parent
    return prob


def depth_of(node: TreeNode) -> int:
    return 0 if node.parent is None else 1 + depth_of(node.parent)


def may_be_proposed(node: TreeNode) -> bool:
    return node.parent is None or (node.sampled and may_be_proposed(node.parent))


@pytest.mark.parametrize("seed", range(20))
def test_free_branches_offer_the_likeliest_nodes(seed: int) -> None:
    tree = random_tree(random.Random(seed))
    offer = SubtreeOffer(tree.anchor, 4, EVEN)
    ranked = [*offer.ranked(0.0)]
    wanted = [path_of(n) for n in tree.nodes() if n.parent and depth_of(n) <= 4 and may_be_proposed(n)]
    assert [path for _, path, _ in ranked] == pytest.approx(sorted(wanted, reverse=True)[:MAX_TREE_TOKENS])
    assert all(worth == path for worth, path, _ in ranked)
    assert len(offer) == len(ranked)


def twins(rng: random.Random, size: int) -> list[SpeculationTree]:
    """A tree of the reference and a native one with the same nodes, some of them equally likely."""
    made = [SpeculationTree(100, 1), new_tree(100, 1)]
    while len(made[0]) < size:
        parent = rng.choice([*made[0].nodes()])
        prob = rng.choice((0.25, 0.5, 0.9, rng.random()))
        node = Node(len(made[0]) + 1, parent.node_id, len(parent.children), prob, rng.random() < 0.95)
        for tree in made:
            tree.add([node])
    return made


@pytest.mark.parametrize("seed", range(20))
def test_native_trees_rank_as_the_reference_does(seed: int) -> None:
    """The same numbers, bit for bit, and the same proposals, however far it was asked, with siblings alike."""
    rng = random.Random(seed)
    trees = twins(rng, 60)
    depth, factor, branch_tokens = rng.randint(1, 9), rng.choice((0.7, 1.0, 1.6)), rng.choice((0.0, 0.02, 0.3))
    offers = [SubtreeOffer(tree.anchor, depth, factor) for tree in trees]
    for num in (rng.randint(1, 20), 64, 99):
        wanted, found = [[*islice(offer.ranked(branch_tokens), num)] for offer in offers]
        assert found == wanted
        for count in {0, 1, len(wanted) // 2, len(wanted), len(wanted) + 3}:
            assert offers[1].proposal(count) == offers[0].proposal(count)


@pytest.mark.parametrize("seed", range(20))
def test_the_native_choice_is_that_of_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees and chains side by side, some of them alike, at lumpy costs, beyond the measured sizes as well."""
    rng = random.Random(seed)
    cost = StepCost()
    lumps = sorted(rng.uniform(1, 3) for _ in range(40))
    for _ in range(100):
        size = rng.randint(1, rng.choice((8, 150)))
        cost.observe(size, lumps[size // 4] * rng.uniform(0.9, 1.1))
    num = rng.choice((1, 3, 20))
    trees = [twins(rng, rng.randint(0, 30)) for _ in range(num)]
    chains = [rng.choice(((), (0.5, 0.5), [rng.random() for _ in range(8)])) for _ in range(num)]
    trees[-1], chains[-1] = trees[0], chains[0]
    for limit in (-1, 0, 5, 999):
        at = {"num_sessions": 2 * num, "num_context": 2 * num + rng.choice((0, 40, 800)), "limit": limit}
        at |= {"overhead_s": rng.random(), "branch_s": rng.choice((0.0, 0.01, 0.2)), "tokens_per_s": rng.uniform(1, 9)}
        at |= {"least_gain": rng.choice((1.0, 1.04)), "hidden_s": rng.choice((0.0, 0.1))}
        found = []
        for native in (False, True):
            offers = [SubtreeOffer(each[native].anchor, 8, 1.1) for each in trees]
            with monkeypatch.context() as patch:
                if not native:
                    patch.setattr(native_tree, "native_module", lambda: None)
                else:  # it must not be asked
                    patch.setattr(allocation_module, "choose", None)
                counts = allocate_draft_tokens([*offers, *chains], cost, **at)
            found.append((counts, [offer.proposal(count) for offer, count in zip(offers, counts, strict=False)]))
        assert found[0] == found[1]
        alone = allocate_draft_tokens([SubtreeOffer(each[0].anchor, 8, 1.1) for each in trees] + chains, cost, **at)
        assert alone == found[0][0], "trees of the reference are no native ones"


@pytest.mark.parametrize("seed", range(20))
def test_the_first_nodes_are_a_proposal_branch_by_branch(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng)
    offer = SubtreeOffer(tree.anchor, 9, EVEN)
    for branch_tokens in (0.0, 0.02, 1.0):
        ranked = [*offer.ranked(branch_tokens)]
        assert all(first[0] >= second[0] for first, second in pairwise(ranked))
        num = rng.randint(0, len(ranked))
        proposal = offer.proposal(num)
        assert len(proposal) == num
        assert sum(begins for _, _, begins in ranked[:num]) == max(
            0, sum(proposal.parent(i) != i - 1 for i in range(num))
        )
        for i, node_id in enumerate(proposal.node_ids):
            node = tree.get(node_id)
            assert node is not None
            parent = proposal.parent(i)
            assert parent < i
            assert node.parent is (tree.anchor if parent < 0 else tree.get(proposal.node_ids[parent]))
            assert all(parent in proposal.path(i - 1) for _ in "x" if 0 <= parent < i - 1)
        reached = sorted(path for _, path, _ in ranked[:num])
        assert sorted(path_of(tree.get(i) or tree.anchor) for i in proposal.node_ids) == pytest.approx(reached)


def test_where_a_branch_costs_more_than_a_sibling_is_worth_there_is_a_chain() -> None:
    for seed in range(10):
        tree = random_tree(random.Random(seed))
        offer = SubtreeOffer(tree.anchor, 9, EVEN)
        num = sum(1 for _ in offer.ranked(0.5 + 1e-9))
        assert offer.proposal(num).is_chain


@pytest.mark.parametrize("producer", [Producer.DRAFT, Producer.HEAD])
def test_a_producer_that_promises_too_much_is_believed_less(producer: Producer) -> None:
    """What is proposed says who made it, and what was promised: by that the next ones are believed."""
    tree, first = SpeculationTree(100, 1, producer=producer), producer.first_id
    tree.add([Node(first, 0, 1, 0.6), Node(first + 1, 0, 2, 0.3)])
    for factor in (1.5, 1.0, 0.5, 2.0):
        offer = SubtreeOffer(tree.anchor, 4, factor)
        assert next(offer.ranked(0.0))[1] == pytest.approx(min(1.0, 0.6 * factor))
        proposal = offer.proposal(2)
        assert (proposal.producer, proposal.probs) == (producer, (0.6, 0.3))
        assert proposal.draft_ids == (proposal.node_ids if producer is Producer.DRAFT else ())


class Line:
    """Seconds of a step: a and b for each token."""

    known = True

    def __init__(self, a: float, b: float) -> None:
        self.a, self.b = a, b

    def seconds(self, num_tokens: int) -> float:
        return self.a + self.b * num_tokens

    floor = seconds


@pytest.mark.parametrize("seed", range(10))
def test_the_budget_is_never_worse_than_with_chains(seed: int) -> None:
    """By its own measure, expected tokens per second, at any price of rows and branches."""
    rng = random.Random(seed)
    trees = [random_tree(rng) for _ in range(rng.randint(1, 4))]
    n = len(trees)
    for _ in range(8):
        cost, branch_s = Line(rng.uniform(1, 10), rng.uniform(0.001, 1)), rng.choice((0.0, 0.05, 0.5, 5.0))
        chains = [[*tree.proposal(8).probs] for tree in trees]
        counts = allocate_draft_tokens(chains, cost, num_sessions=n, num_context=n, limit=99)
        expected = n + sum(sum(_products(probs[:count])) for probs, count in zip(chains, counts, strict=True))
        rate = expected / cost.seconds(n + sum(counts))
        offers = [SubtreeOffer(tree.anchor, 8, EVEN) for tree in trees]
        counts = allocate_draft_tokens(
            offers, cost, num_sessions=n, num_context=n, limit=99, branch_s=branch_s, tokens_per_s=rate
        )
        chosen = [offer.proposal(count) for offer, count in zip(offers, counts, strict=True)]
        expected = n + sum(
            path_of(trees[i].get(node_id) or trees[i].anchor) for i, p in enumerate(chosen) for node_id in p.node_ids
        )
        branches = sum(p.parent(i) != i - 1 for p in chosen for i in range(len(p)))
        assert expected / (cost.seconds(n + sum(counts)) + branches * branch_s) >= rate * (1 - 1e-9)


def _products(probs: list[float]) -> list[float]:
    found, path = [], 1.0
    for prob in probs:
        path *= prob
        found.append(path)
    return found


def test_the_price_of_a_branch_is_measured_and_fades() -> None:
    allocation = Allocation()
    assert not allocation.offers_trees(), "nothing is known of the cost of steps"
    for _ in range(50):
        allocation.observe_step(8, 0.010)
        allocation.observe_step(16, 0.012)
    allocation.tokens_per_s.add(100.0)
    offered = [allocation.offers_trees() for _ in range(320)]
    assert offered.count(False) == 10, "now and then a step has chains only, to measure branches by"
    for _ in range(50):
        allocation.observe_branches(2, 16, 0.032)
    assert allocation.branch_s == pytest.approx(0.01, rel=0.2)
    assert not allocation.offers_trees()
    tries = next(i for i in range(20_000) if allocation.offers_trees())
    assert tries > 100, "it is tried again, seldom"
    allocation.trees = False
    assert not allocation.offers_trees()


def test_what_was_promised_is_compared_along_the_accepted_path() -> None:
    proposal = Proposal((5, 6, 7, 8), (None,) * 4, (0.6, 0.5, 0.3, 0.2), (1, 2, 3, 4), (-1, 0, 0, -1))
    assert compare(proposal, [0, 2]) == Compared(places=2, predicted=pytest.approx(1.6), first=1, any=2)
    assert compare(proposal, [3]) == Compared(places=1, predicted=pytest.approx(0.8), first=0, any=1)
    assert compare(proposal, []) == Compared(places=1, predicted=pytest.approx(0.8), first=0, any=0)
    assert compare(replace(proposal, node_ids=()), [0]) == Compared(), "these tokens have no nodes"


def test_tokens_are_counted_by_their_rank_among_those_that_were_verified() -> None:
    """The first is the one with the largest probability, wherever it stands; those after a right one are not asked."""
    probs = (0.2, 0.5, 0.1, 0.9, 0.6)
    proposal = Proposal(
        token_ids=(4, 5, 6, 7, 8), qs=(None,) * 5, probs=probs, node_ids=(1, 2, 3, 4, 5), parents=(-1, -1, -1, 1, 1)
    )
    counts = RankCounts()
    counts.add(proposal, [1, 3])
    assert (counts.verified, counts.accepted) == ([2, 0, 0], [2, 0, 0])
    counts.add(proposal, [0])
    assert (counts.verified, counts.accepted) == ([3, 1, 0], [2, 1, 0])
    counts.add(proposal, [])
    counts.add(proposal, [1, 4])
    assert (counts.verified, counts.accepted) == ([6, 3, 1], [3, 2, 0])
    chain = Proposal(token_ids=(4, 5), qs=(None,) * 2, probs=probs[:2], node_ids=(1, 2))
    for maker in (Producer.DRAFT, Producer.HEAD):
        counts.add(replace(chain, producer=maker), [0])
    assert (counts.verified, counts.accepted) == ([8, 3, 1], [4, 2, 0])


@pytest.mark.parametrize("size", range(4))
def test_a_chain_is_compared_as_a_tree_without_branches(size: int) -> None:
    probs = (0.9, 0.5, 0.25)[:size]
    chain = Proposal((4, 5, 6)[:size], (None,) * size, probs, (1, 2, 3)[:size])
    tree = replace(chain, parents=tuple(range(-1, size - 1)))
    for num_accepted in range(size + 1):
        assert compare(chain, range(num_accepted)) == compare(tree, range(num_accepted))


@pytest.mark.parametrize(
    ("cost", "branch_s", "gain", "seconds"),
    [(gpu_cost, 0.0002, 1.05, 8.0), *slow([(gpu_cost, 0.004, 0.97, 24.0), (cpu_cost, 0.0002, 0.97, 24.0)])],
)
def test_siblings_never_cost_throughput(cost, branch_s: float, gain: float, seconds: float) -> None:
    """On the virtual time line: where rows are free they bring some, where branches are dear nothing is lost; runs of
    other tokens differ by 3 %."""
    rates = []
    for trees in (False, True):
        simulation = Simulation(acceptance=0.5, cost=cost, trees=trees, branch_s=branch_s, calibrate=True).run(seconds)
        rates.append(simulation.target.stats.tokens_emitted)
    assert rates[1] >= gain * rates[0]


def test_an_offer_is_walked_only_as_far_as_it_is_asked() -> None:
    tree = random_tree(random.Random(1))
    offer = SubtreeOffer(tree.anchor, 9, EVEN)
    assert len([*islice(offer.ranked(0.0), 3)]) == 3
    assert len(offer._ranking) == 3
