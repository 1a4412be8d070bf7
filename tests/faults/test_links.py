"""The promise under a hostile wire: whatever is dropped, repeated, reordered, delayed, corrupted or replayed, a session
ends with the tokens of plain decoding, each exactly once.
"""

import pytest
from tests.faults.pump import RATES, FaultyPump
from tests.faults.runs import LOSSES, NOTICED, STALLS, one_fault, requests, run
from tests.support.models import VOCAB, pair
from tests.support.rings import nightly, slow

from paceline.types import Acceptance, FinishReason, Result


@pytest.mark.parametrize(
    ("link", "kind", "least"), [*((*fault, 1) for fault in NOTICED), *nightly((*fault, 10) for fault in NOTICED)]
)
def test_one_kind_of_fault_on_one_link(reference: dict[str, Result], link: str, kind: str, least: int) -> None:
    """Same tokens, the fault was noticed, drafting goes on. What only comes twice, or late from an old epoch, costs
    nothing: no engine is re-opened. What happens to drafts never costs the target."""
    one_fault(reference, link, kind, least=least)


def test_nothing_at_all(reference: dict[str, Result]) -> None:
    """The harness itself harms nothing: without faults every counter of a loss is zero."""
    for seed in range(2):
        pump = run(reference, seed, {})
        for name in (*LOSSES, *STALLS, "repeated", "early", "malformed", "nodes_invalid", "draft_reopens"):
            assert pump.counts[name] == 0, name


@pytest.mark.parametrize("link", ["to_draft", *slow(["to_target", "from_draft"])])
def test_the_rejection_rule_ends_too(link: str) -> None:
    """Its tokens depend on the proposals, so there is no reference: but it ends, within the vocabulary."""
    target, draft = pair("llama")
    for seed in range(2):
        wanted = requests(acceptance=Acceptance.REJECTION)
        pump = FaultyPump(target, draft, seed=seed, faults={(link, kind): rate / 2 for kind, rate in RATES.items()})
        for name, result in pump.run(wanted).items():
            assert tuple(pump.chunks[name]) == result.token_ids
            assert all(0 <= token_id < VOCAB for token_id in result.token_ids)
            stopped = result.finish_reason is FinishReason.STOP
            assert stopped or len(result.token_ids) == wanted[name].sampling.max_tokens
        assert not pump.failures
