"""One wait for the device in a step: what is decided without asking is what asking decides, and nothing else asks.

A tensor on the ``meta`` device has no values: whatever would make the host wait for them raises. So a step that runs
there, uploads and one download apart, runs on a GPU without waiting.
"""

from __future__ import annotations

import math
import random

import pytest
import torch
from tests.support.models import FAMILIES, random_model

from paceline.core import rows as native
from paceline.core import verification
from paceline.core.deferred import DeferredChecks, check_now, download, upload
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import draft_candidates, process
from paceline.core.tree import Proposal
from paceline.core.verification import Drawn, decide, decide_at_once, verify
from paceline.errors import EngineError
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.kv_cache import KVCache
from paceline.model.loading import prepare
from paceline.model.runner import ModelRunner
from paceline.model.step_plan import SequenceStep
from paceline.types import Acceptance, SamplingParams

VOCAB = 400

OPTIONS: list[dict] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 30, "min_p": 0.02},
    {"temperature": 0, "logit_bias": {11: 3.0}, "bad_words": ((30,), (31, 32))},
    {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": (3,)},
]


def sessions(rng: random.Random, device: str = "cpu", count: int = 4) -> tuple[list[Row], list[Proposal]]:
    """Rows of sessions with various options and proposals of up to five tokens."""
    rows: list[Row] = []
    proposals = []
    for options in rng.sample(OPTIONS, count):
        params = SamplingParams(max_tokens=50, **options)
        context = [rng.randrange(VOCAB) for _ in range(9)]
        state = SamplerState(params, rng.getrandbits(64), context[:5], context[5:], vocab_size=VOCAB, device=device)
        token_ids = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, 5)))
        proposals.append(Proposal(token_ids))
        rows.extend(Row(state, token_ids[:i]) for i in range(len(token_ids) + 1))
    return rows, proposals


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deciding_at_once_is_deciding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log probabilities are identical, ties in bf16 included, where both ways are torch's."""
    monkeypatch.setattr(native, "usable", lambda *_: False)
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        rows, proposals = sessions(rng)
        logits = (torch.randn(len(rows), VOCAB, generator=generator) * rng.choice((0.1, 1, 5))).to(dtype)
        rules = [Acceptance.COUPLED] * len(proposals)
        verdicts = verify(process(logits, rows), proposals, rules)
        at_once = decide_at_once(logits, rows, proposals)
        assert at_once == verdicts
        assert decide(logits, rows, proposals, rules) == verdicts


def test_a_flat_distribution_under_top_p_is_not_decided_at_once() -> None:
    state = SamplerState(SamplingParams(temperature=1.0, top_p=0.9), 5, (1, 2), vocab_size=5000)
    flat = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 0.01
    assert decide_at_once(flat, [Row(state)], [Proposal()]) is None
    assert decide_at_once(flat * 1000, [Row(state)], [Proposal()]) is not None


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_a_distribution_are_not_decided_at_once(bad: float) -> None:
    """Neither what plain decoding would reach, which fails, nor what only a proposal reaches, which ends it."""
    state = SamplerState(SamplingParams(temperature=0), 5, (1, 2), vocab_size=VOCAB)
    rows, proposals = [Row(state), Row(state, (7,))], [Proposal((7,))]
    for row in (0, 1):
        logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0))
        logits[0, 7] = 50.0
        logits[row] = bad
        assert decide_at_once(logits, rows, proposals) is None
        if row == 0:
            with pytest.raises(EngineError):
                decide(logits, rows, proposals, [Acceptance.COUPLED])
        else:
            (verdict,) = decide(logits, rows, proposals, [Acceptance.COUPLED])
            assert (verdict.num_accepted, verdict.token_ids) == (0, (7,))


def test_questions_put_off_are_answered_together() -> None:
    checks, device = DeferredChecks(), torch.device("cpu")
    assert not bool(checks.any_failed(device))
    assert checks(torch.tensor(False)) is False
    assert not bool(checks.any_failed(device))
    assert checks(torch.tensor([True])) is False
    assert bool(checks.any_failed(device))
    assert check_now(torch.tensor(True)) is True


def test_on_the_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(3)
    assert download(tensor)[0] is tensor
    assert upload(tensor, "cpu") is tensor
    assert upload([1, 2], "cpu", torch.float32).tolist() == [1.0, 2.0]


# -- nothing waits -----------------------------------------------------------------------------------------


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tensors in each download that was waited for; they come back as zeros. No other way leads to a
    device or back."""
    counts: list[int] = []
    make = torch.tensor

    class FakeDownload:
        def __init__(self, *tensors: torch.Tensor) -> None:
            self.tensors = tensors

        def wait(self) -> tuple[torch.Tensor, ...]:
            counts.append(len(self.tensors))
            return tuple(torch.zeros(t.shape, dtype=t.dtype) for t in self.tensors)

    def host_tensor(*args, **kwargs):
        assert torch.device(kwargs.get("device") or "cpu").type == "cpu", "a copy that waits"
        return make(*args, **kwargs)

    monkeypatch.setattr(verification, "Download", FakeDownload)
    monkeypatch.setattr(torch, "tensor", host_tensor)
    return counts


def test_a_value_on_meta_cannot_be_waited_for() -> None:
    """The negative control: each of these would wait on a GPU."""
    x = torch.zeros(3, device="meta")
    for check in (lambda: bool((x > 0).any()), lambda: x.tolist(), lambda: x[x > 0], lambda: (x > 0).nonzero(), x.cpu):
        with pytest.raises((RuntimeError, NotImplementedError)):
            check()


@pytest.mark.parametrize("seed", range(6))
def test_a_verification_waits_once(seed: int, downloads: list[int]) -> None:
    """Every processor, greedy and sampled rows beside each other."""
    rows, proposals = sessions(random.Random(seed), "meta")
    logits = torch.empty(len(rows), VOCAB, dtype=torch.bfloat16, device="meta")
    verdicts = decide(logits, rows, proposals, [Acceptance.COUPLED] * len(proposals))
    assert len(verdicts) == len(proposals)
    assert downloads == [3]
    for row in rows:
        row.state.append([3])
    assert downloads == [3]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_waits_for_nothing(family: str, downloads: list[int]) -> None:
    """Model, masks, windows, trees, experts."""
    loaded = prepare(random_model(family, dtype=torch.bfloat16), compile=False)
    model = loaded.step.model.to("meta")
    assert model.device.type == "meta"
    cache = KVCache(loaded.layers, 4, loaded.dtype, "meta")
    backend = DeviceBackend(cache, loaded.dtype, loaded.sliding_window, kernel="sdpa", recorder=None, max_shapes=8)
    runner = ModelRunner(
        loaded.step, cache, dtype=loaded.dtype, sliding_window=loaded.sliding_window, vocab_size=300, backend=backend
    )
    pages = cache.allocate(2)
    chain = SequenceStep([1, 2, 3], range(70, 73), range(70, 73), pages, num_logits=3)
    tree = SequenceStep([5], [79], [79], pages, 1, torch.ones(80, dtype=torch.bool), torch.arange(80), [[79]])
    for steps in ([chain], [chain, tree]):
        logits = runner.forward(steps)
        assert logits.shape == (sum(s.num_logits for s in steps), 300)
        state = SamplerState(SamplingParams(temperature=1.0), 1, (1,), vocab_size=300, device="meta")
        draft_candidates(logits, [Row(state)] * len(logits), 8)
    drawn = Drawn(logits, [Row(state)] * len(logits))
    ahead = runner.forward_drawn([SequenceStep([0], range(73, 74), range(73, 74), pages, 1)], drawn.token_ids[:1])
    Drawn(ahead, [Row(state, (0,))])
    assert downloads == []
    assert [len(verdict.token_ids) for verdict in drawn.verdicts([Proposal()] * len(logits))] == [1] * len(logits)
    assert downloads == [3]
