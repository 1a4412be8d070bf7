"""A head in an engine: what it is asked and answers, and what every head must keep to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tests.support.mutants import Mutant, mutant
from tests.support.pump import Pump, Request, assert_same
from torch import Tensor

from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.heads.paged import Part
from paceline.drafters.protocol import Candidates, Fed, Leaf
from paceline.messages import Outcome
from paceline.model.loading import LoadedModel
from paceline.target.heads.mounted import MountedHead
from paceline.types import Result

NUM_COMPARED = 60


class Answer(NamedTuple):
    """What a head has said of one leaf."""

    tokens: list[int]
    """The context without the drafted tokens."""
    path: tuple[int, ...]
    token_ids: Tensor
    log_q: Tensor


Run = tuple[Pump, MountedHead, list[Answer]]
"""An engine, its head, and what that has answered."""
Said = Callable[[Answer], Tensor]
"""The logits that an oracle has in the place of an answer."""


def run_head(target: LoadedModel, head: Any, num_tokens: int, **options: Any) -> Run:
    """An engine with a head that is watched. The target's pages must be as they were."""
    mounted = MountedHead(head.kind, head, num_tokens=num_tokens)
    pump = Pump(target, None, heads=[mounted], **{"late": 0.0, "adaptive": False} | options)
    cache, asked, expand = pump.target.runner.cache, [], head.expand
    pools = (*cache.keys, *cache.values)
    head.bind(cache, cache.add_layers(head.layers))

    def watched(leaves: Sequence[Leaf]) -> Candidates:
        before = [pool.clone() for pool in pools]
        answer = expand(leaves)
        for old, new in zip(before, pools, strict=True):
            assert torch.equal(old, new), "the target's pages are read only"
        for i, leaf in enumerate(leaves):
            tokens = [*pump.target.sessions[leaf.session_id].tokens]
            asked.append(Answer(tokens, leaf.path, answer.token_ids[i], answer.log_q[i]))
        return answer

    head.expand = watched
    return pump, mounted, asked


def lengths_of(pump: Pump) -> list[int]:
    """The tokens of each outcome of an engine, from now on."""
    lengths: list[int] = []
    deliver = pump.on_target

    def watched(messages: list[Any]) -> None:
        lengths.extend(len(message.token_ids) for message in messages if isinstance(message, Outcome))
        deliver(messages)

    pump.on_target = watched  # type: ignore[method-assign]
    return lengths


def difference(asked: Sequence[Answer], said: Said, num: int = NUM_COMPARED) -> float:
    """The largest difference of log probabilities from the oracle's, over answers of every depth."""
    worst = 0.0
    for answer in asked[:: len(asked) // num | 1]:  # an odd stride meets all depths
        some = answer.log_q.isfinite()
        off = said(answer).log_softmax(-1)[answer.token_ids[some]] - answer.log_q[some]
        worst = max(worst, float(off.abs().nan_to_num(nan=1e9, posinf=1e9).max()))
    return worst


def check_head(
    run: Run,
    requests: Mapping[str, Request],
    reference: Mapping[str, Result],
    said: Said,
    depths: int,
    *,
    pressed: bool = True,
    within: float = 1e-4,
    num: int = NUM_COMPARED,
    arrivals: float = 0.5,
) -> None:
    """Raises AssertionError unless no text changes, answers of all depths are the oracle's and nothing is left.

    ``pressed``: sessions must have been preempted and prefixes found. ``num``: of answers that are compared.
    """
    pump, mounted, asked = run
    assert_same(pump.run(requests, arrivals=arrivals), reference)
    assert not mounted.failure
    if pressed:
        assert pump.target.stats.preemptions > 0
        assert pump.target.stats.cached_tokens > 0
    assert {len(answer.path) for answer in asked} == {*range(depths)}
    assert mounted.stats.rows > 100
    assert 0 < pump.target.stats.head_rows_used < mounted.stats.rows
    assert difference(asked, said, num) < within
    assert pump.target.runner.cache.num_used == 0
    assert not mounted.head.sessions


# -- mutants -----------------------------------------------------------------------------------------------------------


def stale(field: str) -> Mutant:
    """Sessions of a head keep a field of the round before."""

    @mutant(HeadDrafter, "feed")
    def kept(feed: Any, self: HeadDrafter, fed: Sequence[Fed]) -> None:
        before = {each.session_id: getattr(self.sessions[each.session_id], field) for each in fed}
        feed(self, fed)
        for name, value in before.items():
            if value is not None and len(value):
                setattr(self.sessions[name], field, value)

    return kept


def paged(module: Any, change: Callable[[Part], None]) -> Mutant:
    """Changes what a head that reads the target's pages sees there."""

    @mutant(module, "Paged")
    def changed(make: Any, cache: Any, first_layer: int, parts: Sequence[Part]) -> Any:
        for part in parts:
            if not part.write:
                change(part)
        return make(cache, first_layer, parts)

    return changed
