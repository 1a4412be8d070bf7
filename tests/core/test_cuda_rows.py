"""That tokens are drawn on CUDA with the bits of the torch form: on a GPU, or in triton's interpreter.

``TRITON_INTERPRET=1 pytest tests/core/test_cuda_rows.py`` where triton is installed, as of
``tests/model/attention/test_kernels.py``; ``tests/gpu`` has more rows and tokens.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from pathlib import Path

import pytest
import torch

from paceline.core import cuda, noise, verification
from paceline.core.deferred import Download
from paceline.core.noise import Stream, gumbel, gumbel_argmax, gumbel_max, seed_bits
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import picked_on_cuda, process, sample_coupled
from paceline.core.tree import Proposal
from paceline.core.verification import Drawn, decide_at_once
from paceline.types import SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_CAN_RUN = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None and _CAN_RUN
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton and a GPU, or TRITON_INTERPRET=1")
KEYS = torch.tensor(
    [
        [seed_bits(2**64 - 1), 2**33 + 5, 2**32 - 1],
        [seed_bits(12345678901234567890), 2**32 - 1, 7],
        [seed_bits(2**32), 2**55 + 2**32, 0],
        [5, 0, 2**31],
    ]
)
"""Seeds, positions and nonces of four rows; its columns are views, as those of a step are."""


if HAS_TRITON:
    import triton
    import triton.language as tl

    from paceline.core import cuda_rows

    @triton.jit
    def _logs(x, y, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, cuda_rows.exact_log(tl.load(x + at)))


def drawn(log_weights: torch.Tensor, stream: Stream, first: int = 0, *, nonces: bool = False):
    """Scores and tokens of ``KEYS``' rows, on the CPU."""
    seeds, positions, last = KEYS.to(DEVICE).unbind(-1)
    found = cuda_rows.gumbel_max(log_weights.to(DEVICE), seeds, positions, last if nonces else None, stream, first)
    return tuple(part.cpu() for part in found)


def wanted(log_weights: torch.Tensor, stream: Stream, first: int = 0, *, nonces: bool = False):
    """The same by whole rows of exact noise."""
    seeds, positions, last = KEYS.unbind(-1)
    exact = gumbel(seeds, positions, stream, first + log_weights.shape[1], last if nonces else None)[:, first:]
    scores = exact.double() + log_weights.double()
    return scores.amax(-1), first + (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)


def logits(num_tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(len(KEYS), num_tokens, generator=torch.Generator().manual_seed(num_tokens)) * 2).to(dtype)


def same(got, want) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want, strict=True))


@needs_triton
@pytest.mark.parametrize("nonces", [False, True])
@pytest.mark.parametrize(("num_tokens", "first"), [(1, 0), (3, 5), (1024, 0), (1023, 2), (2500, 7), (2048, 4096)])
def test_scores_and_tokens_have_the_bits_of_exact_noise(num_tokens: int, first: int, nonces: bool) -> None:
    """Seeds of 64 bits, positions beyond 32, parts of a vocabulary, sizes that fill no block, of every stream."""
    x = logits(num_tokens)
    for stream in Stream:
        assert same(drawn(x, stream, first, nonces=nonces), wanted(x, stream, first, nonces=nonces))


@needs_triton
def test_the_noise_of_every_token_has_its_bits() -> None:
    """All others being forbidden, the score is a token's own noise; up to the last one, alone in its block."""
    size, first = 1023, 1022
    for token in (*range(20), *range(size - 20, size)):
        x = torch.full((len(KEYS), size), -math.inf)
        x[:, token] = 0.0
        scores, tokens = drawn(x, Stream.RECOVER, first, nonces=True)
        assert same((scores, tokens), wanted(x, Stream.RECOVER, first, nonces=True))
        assert tokens.tolist() == [first + token] * len(KEYS)


@needs_triton
def test_logarithms_have_the_bits_of_the_torch_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to float32 they would hide nearly every wrong order; and the draws are launched as these are."""
    u = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).add_(2.0**-33)
    x = torch.cat([u, noise.exact_log(u.clamp(max=1 - 2.0**-33)).neg_()]).to(DEVICE)
    y = torch.empty_like(x)
    _logs[(len(x) // 1024,)](x, y, BLOCK=1024, **cuda_rows.UNFUSED)
    assert torch.equal(y.cpu(), noise.exact_log(x.cpu()))
    launched = []

    class Watched:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append(options)

    monkeypatch.setattr(cuda_rows, "best_of_parts", Watched())
    drawn(logits(8), Stream.COUPLED)
    assert cuda_rows.UNFUSED.items() <= launched[0].items()
    assert cuda_rows.UNFUSED == {"enable_fp_fusion": False}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes_and_strides(dtype: torch.dtype) -> None:
    whole = logits(1300, dtype)
    assert same(drawn(whole, Stream.DRAFT), wanted(whole, Stream.DRAFT))
    for x in (whole[:, 100:1200], whole[:1].expand(4, -1), whole[:, ::2]):
        assert same(drawn(x, Stream.DRAFT), wanted(x, Stream.DRAFT))


@needs_triton
def test_equal_scores_go_to_the_lower_token() -> None:
    """Within a part and between parts: weights that swallow the noise are equal in sum."""
    for low, high in ((3, 900), (1023, 1024), (500, 2400)):
        x = torch.full((len(KEYS), 2500), -math.inf, dtype=torch.float64)
        x[:, [low, high]] = 2.0**60
        assert drawn(x, Stream.COUPLED)[1].tolist() == [low] * len(KEYS)


@needs_triton
def test_rows_without_a_winner_have_a_token_of_their_own() -> None:
    """Parts of a vocabulary may hold -inf only; rows with NaN are drawn before it is known that they are void."""
    nothing = torch.full((len(KEYS), 1100), -math.inf)
    scores, tokens = drawn(nothing, Stream.COUPLED, 6)
    assert scores.tolist() == [-math.inf] * len(KEYS)
    assert tokens.tolist() == [6] * len(KEYS)
    for value in (math.nan, math.inf):
        x = logits(1100)
        x[0], x[1, 5], x[2, :1050] = value, value, value
        tokens = drawn(x, Stream.COUPLED, 6)[1]
        assert ((tokens >= 6) & (tokens < 1106)).all()
        assert tokens[3] == wanted(x, Stream.COUPLED, 6)[1][3]
    no_rows = torch.empty(0, 5, device=DEVICE)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert [part.shape for part in cuda_rows.gumbel_max(no_rows, none, none, none, 0, 0)] == [(0,), (0,)]


@needs_triton
def test_draws_on_cuda_go_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both entries, nonces and the first token handed on; no check is made, and nothing waited for."""
    monkeypatch.setattr(noise.native, "usable", lambda *args: False)
    monkeypatch.setattr(noise.cuda, "usable", lambda x: True)
    x = logits(1500).to(DEVICE)
    seeds, positions, nonces = KEYS.to(DEVICE).unbind(-1)
    drawn, keyed = (wanted(x.cpu(), Stream.COUPLED)[1], wanted(x.cpu(), Stream.RECOVER, nonces=True)[1])
    part = wanted(x[:, :700].cpu(), Stream.COUPLED, 33)
    monkeypatch.setattr(noise, "exact_gumbel", lambda *args: pytest.fail("the torch form ran"))
    assert torch.equal(gumbel_argmax(x, seeds, positions, Stream.COUPLED).cpu(), drawn)
    assert torch.equal(gumbel_argmax(x, seeds, positions, Stream.RECOVER, nonces).cpu(), keyed)
    found = gumbel_max(x[:, :700], seeds, positions, Stream.COUPLED, 33)
    assert same([each.cpu() for each in found], part)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 400, 1024, 2500])
def test_picks_are_those_of_the_processors(
    num_tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows and others, ties of bfloat16 and forbidden tokens; log-probabilities up to rounding."""
    rows = sampled_rows(num_tokens)
    generator = torch.Generator().manual_seed(num_tokens)
    for spread in (0.01, 1.0, 30.0):
        x = (torch.randn(len(rows), 2 * num_tokens, generator=generator) * spread).to(dtype)[:, 1 : 1 + num_tokens]
        x[:, 1::3] = -math.inf
        monkeypatch.setattr(noise.cuda, "usable", lambda x: False)
        processed = process(x, rows)
        want = sample_coupled(processed)
        logprobs = processed.log_probs.gather(-1, want[:, None]).squeeze(-1)
        monkeypatch.setattr(noise.cuda, "usable", lambda x: True)
        for given in (x, torch.cat([x, x], 1)[:, ::2] if num_tokens == 1 else x.T.contiguous().T):
            found = picked_on_cuda(given.to(DEVICE), rows)
            token_ids, values = found.cpu().unbind(-1)
            assert token_ids.tolist() == want.tolist()
            torch.testing.assert_close(values.float(), logprobs, rtol=2e-6, atol=2e-6)
            assert torch.equal(values, values.float().double())


@needs_triton
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_without_a_distribution_are_told_from_others(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise.cuda, "usable", lambda x: True)
    rows = sampled_rows(2500)
    x = torch.randn(len(rows), 2500, generator=torch.Generator().manual_seed(0))
    whole, part = 1, 4
    x[whole] = bad
    x[part, 1900] = bad
    token_ids = picked_on_cuda(x.to(DEVICE), rows).cpu()[:, 0].tolist()
    void = {whole} if bad == -math.inf else {whole, part}
    assert {row for row, token in enumerate(token_ids) if token == -1} == void
    assert all(0 <= token < 2500 for row, token in enumerate(token_ids) if row not in void)
    drawn = Drawn(x.to(DEVICE), rows)
    assert drawn.verdicts([Proposal()] * len(rows)) is None
    assert drawn.token_ids.tolist() == [max(0, token) for token in token_ids], "a step ahead computes some token"


@needs_triton
def test_a_step_on_cuda_is_decided_by_one_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sessions with the temperature alone; a cut of one of them takes all the other way, to the same tokens."""
    counts = []
    monkeypatch.setattr(noise.cuda, "usable", lambda x: True)
    monkeypatch.setattr(verification, "Download", lambda *found: (counts.append(len(found)), Download(*found))[1])
    rows = sampled_rows(700)
    x = torch.randn(len(rows), 700, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    proposals = [Proposal((5, 6)), *[Proposal()] * (len(rows) - 3)]
    at_once = decide_at_once(x, rows, proposals)
    assert counts == [1]
    assert Drawn(x, rows).token_ids.tolist()[3:] == [verdict.token_ids[0] for verdict in at_once[1:]]
    counts.pop()
    own = [verdict.token_ids[0] for verdict in at_once]
    state = SamplerState(SamplingParams(temperature=1.0, top_k=700), 9, (1,), vocab_size=700, device=DEVICE)
    assert state.only_scales
    for options in ({"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {3: 1.0}}):
        params = SamplingParams(temperature=1.0, **options)
        mixed = [*rows[:-1], Row(SamplerState(params, 9, (1,), vocab_size=700, device=DEVICE))]
        assert picked_on_cuda(x, mixed) is None
        assert [v.token_ids[0] for v in decide_at_once(x, mixed, proposals)][:-1] == own[:-1]
    assert counts == [1, 3, 3, 3, 3]


def sampled_rows(vocab_size: int) -> list[Row]:
    """Rows of sessions without any processor but the temperature, with suffixes."""
    temperatures = (0.0, 1.0, 0.7, 1.3, 1e-3)
    states = [
        SamplerState(SamplingParams(temperature=t), 2**63 + i, (0,) * (i + 1), vocab_size=vocab_size, device=DEVICE)
        for i, t in enumerate(temperatures)
    ]
    return [Row(state, (0,) * i) for i, state in enumerate(states)]


@needs_triton
def test_no_size_and_no_address_compiles_it_again() -> None:
    for function in (
        getattr(cuda_rows, name)
        for name in ("best_of_parts", "best_of_row", "tops_of_parts", "picked_parts", "picked_of_row")
    ):
        parameters = getattr(function, "params", None)
        if parameters is None:
            pytest.skip("triton's interpreter compiles nothing")
        given = {p.name for p in parameters if not (p.do_not_specialize or p.is_constexpr)}
        free = {p.name for p in parameters if not p.do_not_specialize_on_alignment}
        assert given & free <= {"scores", "tokens", "tops", "best", "token", "picked"}  # allocated for the call


@needs_triton
def test_everything_is_compiled_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for name in ("pick", "gumbel_max"):
        run = getattr(cuda_rows, name)
        monkeypatch.setattr(
            cuda_rows, name, lambda x, *rest, run=run: (made.append((x.dtype, len(rest))), run(x, *rest))
        )
    cuda.prepare(300, torch.bfloat16, torch.device("cpu"))
    assert made == []
    monkeypatch.setattr(cuda, "usable", lambda x: True)
    cuda.prepare(300, torch.bfloat16, torch.device(DEVICE))
    assert made == [(torch.bfloat16, 2), (torch.float32, 5), (torch.float64, 5)]


def test_it_takes_matrices_on_cuda_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert not cuda.usable(logits(8))
    monkeypatch.setattr(cuda, "triton_unavailable", lambda: "needs a C compiler")
    cuda.compiles.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not cuda.compiles(torch.device("cuda"))
            assert not cuda.compiles(torch.device("cuda"))
        assert [record.message for record in caplog.records] == [
            "tokens are drawn on cuda by torch's operators, which takes longer: our kernel needs a C compiler"
        ]
        monkeypatch.setattr(cuda, "triton_unavailable", lambda: None)
        for capability, expected in (((7, 5), False), ((8, 0), True)):
            cuda.compiles.cache_clear()
            monkeypatch.setattr(cuda.torch.cuda, "get_device_capability", lambda device, c=capability: c)
            assert cuda.compiles(torch.device("cuda")) is expected
    finally:
        cuda.compiles.cache_clear()


def test_a_machine_that_cannot_compile_a_kernel_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    headers = tmp_path / "Python.h"
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    assert cuda.triton_unavailable() == "needs the package triton, which is not installed"
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cuda.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(cuda.shutil, "which", lambda name: None)
    assert cuda.triton_unavailable() == "needs a C compiler, and there is none (cc, gcc, clang)"
    monkeypatch.setattr(cuda.shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert cuda.triton_unavailable() == f"needs Python's headers, and {tmp_path} has no Python.h (Debian: python3-dev)"
    headers.touch()
    assert cuda.triton_unavailable() is None
    monkeypatch.setenv("CC", "icx")
    assert cuda.triton_unavailable() == "needs a C compiler, and there is none (icx)"
