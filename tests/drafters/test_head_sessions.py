"""Heads in the target: fed in any chunks, on pages, many sessions at once, they compute what one forward computes."""

import math
import random
from dataclasses import replace

import pytest
import torch
from tests.drafters.test_head_modules import DEPTHS, KINDS, SIZE, VOCAB, heads
from tests.support.rings import slow
from torch import Tensor

from paceline.core.processors import SamplerState
from paceline.drafters.heads import drafter
from paceline.drafters.heads.block import Confidence
from paceline.drafters.heads.drafter import LEAST_CONFIDENCE, HeadDrafter
from paceline.drafters.heads.module import Unrolled
from paceline.drafters.heads.paged import Part
from paceline.drafters.protocol import OUT, DrafterSessionError, Features, Fed, Leaf
from paceline.model.kv_cache import KVCache
from paceline.types import PAGE_SIZE, SamplingParams

LONG = PAGE_SIZE + 30


class Twin:
    """A head, the text of its sessions, and what its module says of the whole of each text at once."""

    def __init__(self, kind: str, seed: int = 0, fill: float = 7) -> None:
        self.module, self.width = heads()[kind]
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        recurrent = bool(self.module.layers_kv)
        features = Features((OUT,) * (self.width // SIZE), every_position=recurrent)
        self.head = HeadDrafter(
            self.module, kind=kind, features=features, vocab_size=VOCAB, num_candidates=VOCAB, max_leaves=64
        )
        self.cache = KVCache([*self.module.layers_kv, *self.module.layers_kv], 24, torch.float32, "cpu")
        for pool in (*self.cache.keys, *self.cache.values):
            pool.fill_(fill)  # what is masked does not matter
        self.head.bind(self.cache, len(self.module.layers_kv))
        self.texts: dict[str, list[int]] = {}
        self.states: dict[str, Tensor] = {}
        self.pages: dict[str, list[int]] = {}
        self.fed: dict[str, int] = {}
        self.holes: tuple[range, ...] = ()

    def open(self, name: str, length: int, room: int = 40) -> None:
        """A session whose text is ``length`` tokens and goes on for ``room``."""
        self.texts[name] = [self.random.randrange(VOCAB) for _ in range(length + room)]
        self.states[name] = torch.randn(length + room, self.width, generator=self.generator)
        self.pages[name] = self.random.sample([p for p in range(24) if all(p not in q for q in self.pages.values())], 3)
        self.fed[name] = 0
        sampler = SamplerState(SamplingParams(temperature=1.0), 1, self.texts[name][:length], vocab_size=VOCAB)
        self.head.open(name, self.texts[name][:length], sampler)

    def part(self, name: str, count: int) -> Fed:
        """The next ``count`` positions of a session."""
        start = self.fed[name]
        self.fed[name] = stop = start + count
        tokens = tuple(self.texts[name][start + 1 : stop + 1])
        return Fed(name, start, tokens, self.states[name][start:stop], self.pages[name], self.holes)

    def miss(self, name: str, count: int) -> None:
        """The next ``count`` positions of a session are not fed: its rows of the states at ``fed`` and behind."""
        start = self.fed[name]
        self.fed[name] += count
        self.holes = (*self.holes, range(start + 1, start + 1 + count))

    def catch_up(self, lengths: dict[str, int], most: int) -> None:
        """Feeds all sessions up to their anchors, in chunks of 1 to ``most`` positions, many sessions at a time."""
        while behind := {n: length - 1 - self.fed[n] for n, length in lengths.items() if self.fed[n] < length - 1}:
            assert not any(self.head.ready(name) for name in behind)
            some = self.random.sample(sorted(behind), self.random.randint(1, len(behind)))
            self.head.feed([self.part(n, self.random.randint(1, min(most, behind[n]))) for n in some])

    def whole(self, name: str, length: int, path: tuple[int, ...]) -> Tensor:
        """[vocabulary] log probabilities after the anchor at ``length - 1`` and ``path``, by one unrolled forward."""
        tokens = torch.tensor([self.texts[name][:length] + list(path)])
        logits = list(self.module.unroll(self.states[name][None, : length - 1], tokens, len(path) + 1))[-1][:, -1]
        return self.module.to_target_ids(logits, VOCAB)[0].log_softmax(-1)

    def check(self, name: str, length: int, leaf: Leaf, ids: Tensor, log_q: Tensor) -> None:
        got = torch.full((VOCAB,), float("-inf")).scatter(0, ids, log_q)
        torch.testing.assert_close(got, self.whole(name, length, leaf.path), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [7, LONG, *slow([1])])
def test_fed_in_any_chunks_on_any_pages_the_tree_is_that_of_one_forward(kind: str, most: int) -> None:
    twin = Twin(kind, seed=most)
    lengths = {"a": LONG, "b": 2, "c": 20}
    for name, length in lengths.items():
        twin.open(name, length)
    twin.catch_up(lengths, most)
    next_id = 1
    for _ in range(3):
        # A tree of two branches, of which the second shares the first's beginning, then one decision.
        tokens = {name: [twin.random.sample(range(VOCAB), 2) for _ in range(DEPTHS)] for name in lengths}
        trees: dict[str, list[Leaf]] = {}
        for name in lengths:
            leaves = [Leaf(name, 0, (), ())]
            for depth in range(1, DEPTHS):
                trunk = next(leaf for leaf in leaves if len(leaf.path) == depth - 1)
                for token in tokens[name][depth]:
                    leaves.append(Leaf(name, next_id, (*trunk.path_ids, next_id), (*trunk.path, token)))
                    next_id += 1
            trees[name] = leaves
        for depth in range(DEPTHS):
            leaves = [leaf for tree in trees.values() for leaf in tree if len(leaf.path) == depth]
            found = twin.head.expand(leaves)
            for leaf, ids, log_q in zip(leaves, found.token_ids, found.log_q, strict=True):
                twin.check(leaf.session_id, lengths[leaf.session_id], leaf, ids, log_q)
            twin.head.check_integrity()
        for name in lengths:
            count = twin.random.randint(1, 3)
            decided = twin.texts[name][lengths[name] : lengths[name] + count]
            twin.head.advance(name, decided, list(range(next_id, next_id + count)), [])
            next_id += count
            lengths[name] += count
        twin.head.check_integrity()
        twin.catch_up(lengths, most)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "mtp", "mtp2", "dflash", "dspark", "jetspec"])
def test_pages_of_a_prefix_serve_another_session(kind: str) -> None:
    """A second session that begins behind a cached page computes what the first one would."""
    twin = Twin(kind)
    twin.open("first", LONG)
    twin.catch_up({"first": LONG}, 50)
    twin.open("second", LONG)
    twin.texts["second"], twin.states["second"] = twin.texts["first"], twin.states["first"]
    twin.pages["second"] = [twin.pages["first"][0], *twin.pages["second"][1:]]
    twin.fed["second"] = PAGE_SIZE - 1  # the state of the last cached position comes first
    twin.catch_up({"second": LONG}, 9)
    leaf = Leaf("second", 0, (), ())
    found = twin.head.expand([leaf])
    twin.check("second", LONG, leaf, found.token_ids[0], found.log_q[0])


GAPS = ((9, 5), (20, PAGE_SIZE), (4, 1), (2, 0))
"""Positions that are fed, and that are missed behind them."""


def with_gaps(kind: str, fill: float) -> tuple[Twin, int, list[Leaf]]:
    """A head that has missed parts of a session's context, the context's length, and three leaves in a chain."""
    twin = Twin(kind, fill=fill)
    length = 1 + sum(fed + missed for fed, missed in GAPS)
    twin.open("a", length)
    for fed, missed in GAPS:
        twin.head.feed([twin.part("a", fed)])
        if missed:
            twin.miss("a", missed)
    assert twin.head.ready("a")
    return twin, length, [Leaf("a", 0, (), ()), Leaf("a", 1, (1,), (5,)), Leaf("a", 2, (1, 2), (5, 6))]


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "mtp"])
def test_with_rows_missing_a_head_computes_what_one_forward_of_the_others_does(kind: str) -> None:
    twin, length, leaves = with_gaps(kind, 7)
    missed = {row for hole in twin.holes for row in hole}
    at = torch.tensor([row for row in range(1, length) if row not in missed])
    assert len(at) == sum(fed for fed, _ in GAPS)
    attend, state = Unrolled(), twin.module.fuse(twin.states["a"][None, at - 1])
    tokens = torch.tensor([*twin.texts["a"][:length], *leaves[-1].path])
    for depth, leaf in enumerate(leaves):
        state = twin.module.step(tokens[at + depth][None], state, (at + depth)[None], attend, depth)
        logits = twin.module.to_target_ids(twin.module.logits(state, depth)[0, -1:], VOCAB)[0]
        found = twin.head.expand([leaf])
        got = torch.full((VOCAB,), float("-inf")).scatter(0, found.token_ids[0], found.log_q[0])
        torch.testing.assert_close(got, logits.log_softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "mtp2", "dflash"])
def test_what_lies_on_rows_that_are_missing_does_not_matter(kind, mutant, monkeypatch) -> None:
    """Rows of other sessions may lie there. The mutant does not know which rows are missing."""
    if mutant:
        monkeypatch.setattr(drafter, "Part", lambda *args, **kwargs: replace(Part(*args, **kwargs), holes=()))
    answers = []
    for fill in (7, -3):
        twin, _, leaves = with_gaps(kind, fill)
        found = [twin.head.expand([leaf]) for leaf in leaves]
        answers.append(torch.stack([torch.zeros(VOCAB).scatter(0, f.token_ids[0], f.log_q[0]) for f in found]))
    assert torch.equal(*answers) is not mutant


def test_kept_nodes_stay_and_what_is_decided_is_computed_from_the_targets_states() -> None:
    twin = Twin("eagle3")
    twin.open("a", 10)
    twin.catch_up({"a": 10}, 9)
    token = twin.texts["a"][10]
    twin.head.expand([Leaf("a", 0, (), ())])
    twin.head.expand([Leaf("a", 1, (1,), (token,))])
    twin.head.expand([Leaf("a", 2, (1, 2), (token, 5))])
    twin.head.advance("a", [token], [1], [2])
    assert not twin.head.ready("a")
    assert twin.head.expand([Leaf("a", 1, (), ())]).log_q.isneginf().all()
    twin.catch_up({"a": 11}, 9)
    leaf = Leaf("a", 1, (), ())
    found = twin.head.expand([leaf])
    twin.check("a", 11, leaf, found.token_ids[0], found.log_q[0])
    assert not twin.head.expand([Leaf("a", 3, (2, 3), (5, 6))]).log_q.isneginf().all()
    twin.head.check_integrity()


def test_states_with_a_gap_end_their_session_alone() -> None:
    twin = Twin("mtp")
    twin.open("a", 20)
    twin.head.feed([twin.part("a", 3)])
    twin.fed["a"] += 1
    with pytest.raises(DrafterSessionError, match=r"a: fed states from position 4; the states from 3 are missing"):
        twin.head.feed([twin.part("a", 2)])
    twin.fed["a"] = 3
    twin.head.feed([twin.part("a", 16)])
    assert twin.head.ready("a")
    twin.head.close("a")
    with pytest.raises(DrafterSessionError, match="not open"):
        twin.head.ready("a")


def test_a_block_head_reads_its_block_again_when_more_is_decided() -> None:
    """The rows of a pass belong to one anchor: what was read for the last one is not answered for the next."""
    twin = Twin("dflash")
    twin.open("a", 10)
    twin.catch_up({"a": 10}, 9)
    before = twin.head.expand([Leaf("a", 0, (), ())])
    assert twin.module.ahead_rows == 1 + DEPTHS
    twin.head.advance("a", twin.texts["a"][10:11], [1], [])
    assert twin.head.expand([Leaf("a", 1, (), ())]).log_q.isneginf().all()
    twin.catch_up({"a": 11}, 9)
    after = twin.head.expand([Leaf("a", 1, (), ())])
    twin.check("a", 11, Leaf("a", 1, (), ()), after.token_ids[0], after.log_q[0])
    assert not torch.equal(before.token_ids, after.token_ids)


def test_a_proposal_ends_where_the_head_itself_expects_no_acceptance() -> None:
    twin = Twin("dspark")
    twin.module.form = replace(twin.module.form, confidence=True)
    twin.module.confidence_head = head = Confidence(SIZE + 7, bias=True).requires_grad_(False)
    head.proj.weight.zero_()
    twin.open("a", 10)
    twin.catch_up({"a": 10}, 9)
    leaves = [Leaf("a", 0, (), ()), Leaf("a", 1, (1,), (5,)), Leaf("a", 2, (1, 2), (5, 6))]
    share = LEAST_CONFIDENCE**0.5  # of each token: two are expected to be accepted just often enough, three are not
    head.proj.bias.fill_(math.log(share / (1 - share)) + 1e-3)
    found = twin.head.expand(leaves).log_q.isfinite().any(-1)
    assert found.tolist() == [True, True, False]
    head.proj.bias.fill_(20)
    assert twin.head.expand(leaves).log_q.isfinite().any(-1).all()
