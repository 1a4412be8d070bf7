import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core import noise
from paceline.core.noise import Stream, exact_log, gumbel, gumbel_argmax, philox, seed_bits, uniform

MASK = 0xFFFFFFFF
WORD = st.integers(0, MASK)


def slow_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 as printed in the paper."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (
            (product1 >> 32) ^ x1 ^ k0,
            product1 & MASK,
            (product0 >> 32) ^ x3 ^ k1,
            product0 & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return x0, x1, x2, x3


def fast_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    words = philox(tuple(torch.tensor([x]) for x in counter), tuple(torch.tensor([k]) for k in key))
    return tuple(int(word) for word in words)


def slow_gumbel(seed: int, position: int, stream: int, token: int, nonce: int = 0) -> float:
    counter = (token // 4, position & MASK, (position >> 32) | stream << 24, nonce)
    word = slow_philox(counter, (seed & MASK, seed >> 32))[token % 4]
    return -math.log(-math.log((word + 0.5) / 2**32))


def keys(*pairs: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([seed_bits(seed) for seed, _ in pairs]), torch.tensor([n for _, n in pairs])


PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    assert slow_philox(counter, key) == expected
    assert fast_philox(counter, key) == expected


@given(st.tuples(WORD, WORD, WORD, WORD), st.tuples(WORD, WORD))
@settings(max_examples=100, deadline=None)
def test_philox_equals_its_slow_twin(counter, key):
    assert fast_philox(counter, key) == slow_philox(counter, key)


def test_gumbel_equals_the_definition_for_every_key_part():
    cases = [(0, 0), (2**64 - 1, 1), (12345678901234567890, 2**33 + 7), (5, 2**32 - 1)]
    seeds, positions = keys(*cases)
    for stream in Stream:
        nonces = torch.tensor([0, 1, 2, 2**32 - 1])
        dense = gumbel(seeds, positions, stream, 11, nonces)
        expected = [
            [slow_gumbel(seed, n, stream, v, nonce) for v in range(11)]
            for (seed, n), nonce in zip(cases, nonces.tolist(), strict=True)
        ]
        torch.testing.assert_close(dense.double(), torch.tensor(expected, dtype=torch.float64), rtol=6e-8, atol=1e-15)
        ids = torch.tensor([[10, 0, 3]]).expand(4, 3)
        torch.testing.assert_close(
            noise.fast_gumbel_at(seeds, positions, stream, ids, nonces),
            dense.gather(1, ids).double(),
            rtol=0,
            atol=2e-6,
        )


def test_streams_positions_seeds_and_lanes_differ():
    seeds, positions = keys((1, 5), (1, 6), (2, 5))
    values = torch.cat([gumbel(seeds, positions, stream, 64) for stream in Stream])
    assert len(values.flatten().unique()) == values.numel()
    lanes = torch.cat([uniform(seeds, positions, Stream.ACCEPT, lane) for lane in range(4)])
    assert len(lanes.unique()) == lanes.numel()


def test_exact_log_is_within_its_stated_error():
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(20_000, generator=generator, dtype=torch.float64)
    edges = [
        2.0**-33,
        1 - 2.0**-33,
        0.5,
        1.0,
        2.0,
        math.sqrt(0.5),
        math.sqrt(2),
        1 - 2.0**-53,
        33 * math.log(2),
    ]
    x = torch.cat([u, 1 - u * 1e-6, 30 * u + 1e-9, torch.tensor(edges, dtype=torch.float64)])
    expected = torch.tensor([math.log(value) for value in x.tolist()], dtype=torch.float64)
    assert ((exact_log(x) - expected).abs() <= 2e-15 * expected.abs()).all()


def test_exact_log_bits_are_pinned():
    """The same bits everywhere: a device or build that fuses or reorders operations fails here."""
    x = torch.tensor([2.0**-33, 0.1, 0.7071, 0.999, 3.0, 22.5], dtype=torch.float64)
    assert [value.hex() for value in exact_log(x).tolist()] == [
        "-0x1.6dfb516f20bbfp+4",
        "-0x1.26bb1bbb55515p+1",
        "-0x1.62e6b3842a25ep-2",
        "-0x1.064670d979b73p-10",
        "0x1.193ea7aad030bp+0",
        "0x1.8e87ab6e53b28p+1",
    ]


def test_extreme_words_stay_finite_and_inside_the_bounds():
    words = torch.tensor([0, 2**32 - 1])
    low, high = noise.exact_gumbel(words).tolist()
    assert noise.MIN_GUMBEL <= low < -3.1
    assert 22.8 < high <= noise.MAX_GUMBEL


def test_uniform_is_in_the_half_open_interval_and_uniform():
    seeds = torch.arange(20_000)
    u = uniform(seeds, torch.zeros_like(seeds), Stream.ACCEPT)
    assert u.min() >= 0
    assert u.max() < 1
    # Kolmogorov-Smirnov distance; 3.0 / sqrt(n) is exceeded with probability 2 exp(-2 * 9) = 3e-8.
    distance = (u.sort().values - (torch.arange(20_000) + 0.5) / 20_000).abs().max()
    assert distance < 3.0 / math.sqrt(20_000)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_outside_64_bits_are_refused(seed):
    with pytest.raises(ValueError, match="64-bit"):
        seed_bits(seed)


@given(
    seed=st.integers(0, 2**64 - 1),
    rows=st.integers(0, 5),
    vocab_size=st.sampled_from([1, 3, 17, 256, 1001]),
    spread=st.sampled_from([0.0, 0.5, 5.0, 30.0, 200.0]),
    forbidden=st.floats(0, 1),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("native", [True, False])
def test_gumbel_argmax_equals_the_dense_definition(native, seed, rows, vocab_size, spread, forbidden):
    generator = torch.Generator().manual_seed(seed % 2**32)
    log_weights = torch.randn(rows, vocab_size, generator=generator) * spread
    log_weights[torch.rand(rows, vocab_size, generator=generator) < forbidden] = -math.inf
    log_weights[:, 0].clamp_(min=-10)
    seeds, positions = keys(*[(seed, n) for n in range(rows)]) if rows else (torch.empty(0).long(),) * 2
    scores = log_weights.double() + gumbel(seeds, positions, Stream.RECOVER, vocab_size).double()
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(noise.native, "usable", lambda *_: False)
            patch.setattr(noise, "CPU_CACHED_TOKENS", 600)  # rows are taken piecewise
        assert torch.equal(gumbel_argmax(log_weights, seeds, positions, Stream.RECOVER), scores.argmax(-1))


def test_equal_scores_go_to_the_lower_id(monkeypatch):
    monkeypatch.setattr(noise.native, "usable", lambda *_: False)  # test_rows.py has its ties
    monkeypatch.setattr(noise, "exact_gumbel", lambda words: torch.zeros(words.shape))
    seeds, positions = keys((1, 1), (1, 2))
    log_weights = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0]])
    assert gumbel_argmax(log_weights, seeds, positions, Stream.COUPLED).tolist() == [1, 0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu():
    seeds, positions = keys(*[(2**63 + n, 2**33 + n) for n in range(16)])
    on_cpu = gumbel(seeds, positions, Stream.COUPLED, 10_001)
    on_gpu = gumbel(seeds.cuda(), positions.cuda(), Stream.COUPLED, 10_001)
    assert torch.equal(on_cpu, on_gpu.cpu())
    u = uniform(seeds.cuda(), positions.cuda(), Stream.ACCEPT).cpu()
    assert torch.equal(uniform(seeds, positions, Stream.ACCEPT), u)
