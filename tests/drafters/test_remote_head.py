"""A head in the draft pool: fed with fused states it says what it says in the target, and goes on without them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.drafters.test_head_modules import DEPTHS, KINDS, SIZE, VOCAB, heads
from torch import Tensor

from paceline.core.processors import SamplerState
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.module import HeadModule
from paceline.drafters.heads.remote import MOST_LAG, RemoteHead
from paceline.drafters.protocol import OUT, Candidates, DrafterSessionError, Features, Fed, Leaf
from paceline.errors import ResourceExhaustedError
from paceline.model.kv_cache import KVCache
from paceline.types import PAGE_SIZE, SamplingParams

ATTENDING = [kind for kind in KINDS if heads()[kind][0].layers_kv]
ONE_BY_ONE = [kind for kind in ATTENDING if not heads()[kind][0].parallel]
LONG = PAGE_SIZE + 9


def drafter_of(kind: str, *, fused: bool) -> tuple[HeadDrafter, KVCache, HeadModule, int]:
    module, width = heads()[kind]
    features = Features((OUT,) * (width // SIZE), every_position=True)
    head = HeadDrafter(
        module, kind=kind, features=features, vocab_size=VOCAB, num_candidates=VOCAB, max_leaves=64, fused=fused
    )
    cache = KVCache(module.layers_kv, 12, torch.float32, "cpu")
    for pool in (*cache.keys, *cache.values):
        pool.fill_(7)  # what is masked does not matter
    return head, cache, module, width


@dataclass
class Text:
    """A text and the states of the target at its positions."""

    tokens: list[int]
    raw: Tensor
    module: HeadModule

    def whole(self, num_states: int, path: tuple[int, ...]) -> Tensor:
        """[vocabulary] log probabilities after ``path``, behind the token after so many states, by one forward."""
        tokens = torch.tensor([self.tokens[: num_states + 1] + list(path)])
        logits = list(self.module.unroll(self.raw[None, :num_states], tokens, len(path) + 1))[-1][:, -1]
        return self.module.to_target_ids(logits, VOCAB)[0].log_softmax(-1)


def text_of(module: HeadModule, width: int, length: int = LONG + 60) -> Text:
    generator = torch.Generator().manual_seed(3)
    raw = torch.randn(length, width, generator=generator)
    tokens = random.Random(3).choices(range(VOCAB), k=length)
    return Text(tokens, raw, module)


class Session:
    """One session of a remote head, with the sampler that its engine would keep."""

    def __init__(self, kind: str, length: int) -> None:
        head, cache, module, width = drafter_of(kind, fused=True)
        self.remote = RemoteHead(head, cache, width=module.state_size, max_prefill_tokens=20, max_len=600)
        self.text = text_of(module, width)
        self.length = length
        self.sampler = SamplerState(SamplingParams(temperature=1.0), 1, self.text.tokens[:length], vocab_size=VOCAB)
        self.remote.open("s", self.text.tokens[:length], self.sampler)
        self.next_node = 1

    def feed(self, start: int, stop: int) -> int:
        with torch.inference_mode():  # as a target fuses the rows of a step
            return self.remote.feed("s", start, self.text.module.fuse(self.text.raw[start:stop]))

    def prefill(self) -> None:
        while self.remote.prefill():
            self.remote.check_integrity()

    def commit(self, count: int, node_ids: tuple[int, ...] = ()) -> None:
        """The text goes on by ``count`` tokens, the first of them at these nodes."""
        tokens = self.text.tokens[self.length : self.length + count]
        missing = range(self.next_node, self.next_node + count - len(node_ids))
        self.next_node += len(missing)
        self.sampler.append(tuple(tokens))
        self.length += count
        self.remote.advance("s", tokens, [*node_ids, *missing], [])
        self.remote.check_integrity()

    def after(self, *path: int, ids: tuple[int, ...] = ()) -> Candidates:
        return self.remote.expand([Leaf("s", ids[-1] if ids else self.next_node - 1, ids, path)])


def spread(found: Candidates) -> Tensor:
    """[vocabulary] log probabilities of the only leaf."""
    return torch.full((VOCAB,), float("-inf")).scatter(0, found.token_ids[0], found.log_q[0])


@pytest.mark.parametrize("kind", ATTENDING)
def test_fed_with_the_same_states_it_says_what_it_says_in_the_target(kind: str) -> None:
    """To the bit, through commits, hits and misses, in the chunks in which a target has fed its own head."""
    session = Session(kind, LONG)
    head, cache, *_ = drafter_of(kind, fused=False)
    head.bind(cache, 0)
    text, pages = session.text, cache.allocate(3)
    sampler = SamplerState(SamplingParams(temperature=1.0), 1, text.tokens[:LONG], vocab_size=VOCAB)
    head.open("s", text.tokens[:LONG], sampler)
    length, start, next_node = LONG, 0, 1
    for count in (0, 1, 3, 2, 1):
        if count:
            decided = text.tokens[length : length + count]
            sampler.append(tuple(decided))
            head.advance("s", decided, [*range(next_node, next_node + count)], [])
            next_node, length = next_node + count, length + count
            session.commit(count)
        while start < length - 1:
            stop = min(start + 20, length - 1)
            head.feed([Fed("s", start, tuple(text.tokens[start + 1 : stop + 1]), text.raw[start:stop], pages)])
            assert session.feed(start, stop) == 0
            session.prefill()
            start = stop
        assert not session.remote.awaits("s")
        path: tuple[int, ...] = ()
        ids: tuple[int, ...] = ()
        for depth in range(DEPTHS):
            leaf = Leaf("s", ids[-1] if ids else next_node - 1, ids, path)
            here, there = session.remote.expand([leaf]), head.expand([leaf])
            assert torch.equal(here.token_ids, there.token_ids)
            assert torch.equal(here.log_q, there.log_q)
            path, ids = (*path, 5 + depth), (*ids, 1000 * length + depth)


@pytest.mark.parametrize("kind", ATTENDING)
def test_until_states_come_it_goes_on_with_its_own(kind: str) -> None:
    """What it says then is what its module says that many depths deeper; then it is corrected."""
    session = Session(kind, 30)
    session.feed(0, 29)
    session.prefill()
    assert session.remote.ready("s")
    decided = tuple(session.text.tokens[30:33])
    session.commit(1)
    assert session.remote.awaits("s")
    torch.testing.assert_close(spread(session.after()), session.text.whole(29, decided[:1]), atol=1e-4, rtol=1e-4)
    session.commit(2)  # the head has no state of the token between
    most = session.text.module.max_depth or 99
    if most > 3:
        torch.testing.assert_close(spread(session.after()), session.text.whole(29, decided), atol=1e-4, rtol=1e-4)
        below = session.after(4, ids=(900,))
        torch.testing.assert_close(spread(below), session.text.whole(29, (*decided, 4)), atol=1e-4, rtol=1e-4)
    assert session.feed(29, 31) == 0
    assert session.remote.awaits("s")
    torch.testing.assert_close(spread(session.after()), session.text.whole(31, decided[2:]), atol=1e-4, rtol=1e-4)
    assert session.feed(31, 32) == 0
    torch.testing.assert_close(spread(session.after()), session.text.whole(32, ()), atol=1e-4, rtol=1e-4)
    session.remote.check_integrity()


@pytest.mark.parametrize("kind", ONE_BY_ONE)
def test_what_was_expanded_is_kept_when_it_is_committed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that the head has predicted needs no forward of its own while its state is on the way."""
    session = Session(kind, 30)
    session.feed(0, 29)
    session.prefill()
    decided = tuple(session.text.tokens[30:32])
    session.after()
    session.after(decided[0], ids=(901,))
    calls: list[Any] = []
    step = HeadDrafter.expand_nodes
    monkeypatch.setattr(
        HeadDrafter, "expand_nodes", lambda self, leaves: [calls.append(len(leaves)), step(self, leaves)]
    )
    session.next_node = 902
    session.commit(2, node_ids=(901,))
    torch.testing.assert_close(spread(session.after()), session.text.whole(29, decided), atol=1e-4, rtol=1e-4)
    assert calls == [1], "the second token alone was computed"


@pytest.mark.parametrize("kind", ATTENDING)
def test_states_that_are_lost_leave_a_hole(kind: str) -> None:
    """The positions between are not looked at: what the head says is what it says in a target with that hole."""
    session = Session(kind, 30)
    session.feed(0, 29)
    session.prefill()
    session.commit(6)
    assert session.feed(32, 35) == 3
    head, cache, *_ = drafter_of(kind, fused=False)
    head.bind(cache, 0)
    text, pages = session.text, cache.allocate(1)
    head.open("s", text.tokens[:36], session.sampler)
    for at, chunk, holes in ((0, 20, ()), (20, 9, ()), (32, 3, (range(30, 33),))):
        tokens = tuple(text.tokens[at + 1 : at + chunk + 1])
        head.feed([Fed("s", at, tokens, text.raw[at : at + chunk], pages, holes)])
    there = head.expand([Leaf("s", 0, (), ())])
    assert torch.equal(session.after().log_q, there.log_q)
    assert not torch.allclose(spread(there), text.whole(35, ()), atol=1e-4)
    session.remote.check_integrity()


def test_a_prompt_without_its_beginning_is_drafted_for() -> None:
    session = Session("eagle3", 30)
    assert session.feed(10, 29) == 10
    session.prefill()
    assert session.remote.ready("s")
    assert session.after().log_q.isfinite().any()


def test_states_that_are_late_or_early_are_dropped() -> None:
    session = Session("eagle3", 30)
    assert session.feed(0, 10) == 0
    assert session.feed(0, 10) == session.feed(4, 9) == -1, "repeated, or late"
    assert session.feed(20, 30) == -1, "no commit has told of the token behind the last one"
    assert session.feed(5, 29) == 0, "what is known of it already is left out"
    session.prefill()
    torch.testing.assert_close(spread(session.after()), session.text.whole(29, ()), atol=1e-4, rtol=1e-4)
    with pytest.raises(DrafterSessionError, match=r"states are \[2, 5\]: \[positions, \d+\] is read"):
        session.remote.feed("s", 29, torch.zeros(2, 5))
    with pytest.raises(DrafterSessionError, match="not open"):
        session.remote.feed("t", 0, torch.zeros(2, 5))


def test_too_far_behind_it_says_nothing() -> None:
    session = Session("eagle3", 30)
    session.feed(0, 29)
    session.prefill()
    session.commit(MOST_LAG)
    assert session.after().log_q.isfinite().any()
    session.commit(1)
    assert not session.after().log_q.isfinite().any()
    session.feed(29, 40)
    assert session.after().log_q.isfinite().any()


def test_a_prompt_waits_for_pages_and_a_session_without_any_ends() -> None:
    session = Session("eagle3", 30)
    taken = session.remote.cache.allocate(12)
    session.feed(0, 29)
    assert not session.remote.prefill()
    session.remote.cache.release(taken)
    session.prefill()
    session.commit(50)
    taken = session.remote.cache.allocate(11)
    session.feed(29, 79)
    with pytest.raises(DrafterSessionError, match="no KV page is free"):
        session.after()
    session.remote.cache.release(taken)
    assert session.after().log_q.isfinite().any()
    session.remote.close("s")
    session.remote.check_integrity()
    with pytest.raises(ResourceExhaustedError, match=r"the context has 601 tokens: the draft's cache holds 600"):
        session.remote.open("t", [1] * 601, session.sampler)


def _states_of_the_next_position(session: Session) -> None:
    session.text.raw = session.text.raw.roll(-1, 0)


def _tokens_of_the_same_position(session: Session) -> None:
    known = session.remote.sessions["s"]
    known.tokens[:-1] = known.tokens[1:]


@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        *((_states_of_the_next_position, kind) for kind in ATTENDING),
        *((_tokens_of_the_same_position, kind) for kind in ONE_BY_ONE),
    ],
)
def test_a_shift_by_one_is_noticed(mutant: Callable[[Session], None], kind: str) -> None:
    session = Session(kind, 30)
    expected = session.text.whole(29, ())
    mutant(session)
    session.feed(0, 29)
    session.prefill()
    assert not torch.allclose(spread(session.after()), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ATTENDING)
def test_a_head_that_forgets_to_correct_its_own_states_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: states come, and the rows that were made of guesses stay."""
    session = Session(kind, 30)
    session.feed(0, 29)
    session.prefill()
    session.commit(2)
    session.after()

    def forgets(self: RemoteHead, sessions: dict[str, Any], budget: int = 0) -> bool:
        for each in sessions.values():
            each.coming.clear()
        return False

    monkeypatch.setattr(RemoteHead, "compute_states", forgets)
    session.feed(29, 31)
    assert not torch.allclose(spread(session.after()), session.text.whole(31, ()), atol=1e-3)
