"""What needs a CUDA device: `make gpu`. Imports no Ray and no gRPC.

The logic of the GPU path is tested on the CPU (``tests/model/compiled/test_backend.py`` and
``tests/core/test_deferred.py``); here are the recorder, the kernels and the copies.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from tests.model.families import checkpoint
from tests.support.hybrids import hybrid_config, poison
from tests.support.models import chunk, noisy_copy, prompt, random_model, save_pair
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference

from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.core import deferred as transfers
from paceline.core import verification
from paceline.core.noise import Stream, exact_log, gumbel, gumbel_argmax, gumbel_max, seed_bits, uniform
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import draft_candidates
from paceline.core.tree import Proposal
from paceline.core.verification import decide
from paceline.local import LocalPipeline
from paceline.model.attention.kernels import Attention
from paceline.model.compiled.backend import DeviceBackend
from paceline.model.compiled.buckets import Limits
from paceline.model.compiled.graphs import CudaRecorder, record_steps
from paceline.model.loading import LoadedModel, prepare
from paceline.model.runner import ModelRunner
from paceline.model.selftest import check_invariance, check_replay
from paceline.target.scheduler import Scheduler
from paceline.types import Mode, SamplingParams, SpeculationParams, pages_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"
WAYS = [("sdpa", False), ("triton", False), ("triton", True)]
"""Attention, and whether the parts between products are compiled."""
LIMITS = Limits(max_rows=4, max_tokens=64, max_pages=8)
HALVES = (slice(0, 64_130), slice(64_130, 128_256))
TREES = Limits(max_rows=4, max_tokens=64, max_pages=8, is_tree=True)


def loaded(
    family: str, dtype: torch.dtype = torch.bfloat16, attention: Attention = "auto", *, compile: bool = True
) -> LoadedModel:
    return prepare(random_model(family, dtype=dtype).to(DEVICE), compile=compile, attention=attention)


def eager_twin(model: LoadedModel, pages: int) -> ModelRunner:
    """The same shapes, nothing recorded."""
    runner = model.runner(pages)
    runner.backend = DeviceBackend(
        *(runner.cache, model.dtype, model.sliding_window),
        kernel=model.kernel,
        recorder=None,
        max_shapes=model.max_cuda_graphs,
    )
    return runner


# -- noise and sampling ------------------------------------------------------------------------------------


def test_noise_has_the_same_bits_as_on_the_cpu() -> None:
    seeds = torch.tensor([seed_bits(2**63 + n) for n in range(16)])
    positions = torch.arange(16) + 2**33
    on_cpu = gumbel(seeds, positions, Stream.COUPLED, 128_256)
    assert torch.equal(on_cpu, gumbel(seeds.to(DEVICE), positions.to(DEVICE), Stream.COUPLED, 128_256).cpu())
    u = uniform(seeds.to(DEVICE), positions.to(DEVICE), Stream.ACCEPT).cpu()
    assert torch.equal(uniform(seeds, positions, Stream.ACCEPT), u)
    x = torch.rand(1 << 20, dtype=torch.float64).add_(1e-12)
    assert torch.equal(exact_log(x), exact_log(x.to(DEVICE)).cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_draws_have_the_bits_of_exact_noise(dtype: torch.dtype) -> None:
    """Every entry: whole rows with and without nonces, and the parts of a vocabulary. Nothing is waited for."""
    generator = torch.Generator().manual_seed(0)
    seeds, positions, nonces = torch.randint(-(2**63), 2**63 - 1, (64, 3), generator=generator).unbind(-1)
    weights = (torch.randn(64, 128_256, generator=generator) * 3).to(dtype)
    noise = gumbel(seeds, positions, Stream.COUPLED, 128_256).double()
    keyed = gumbel(seeds, positions, Stream.RECOVER, 128_256, nonces).double()
    on_device = [part.to(DEVICE) for part in (weights, seeds, positions, nonces)]
    gumbel_argmax(on_device[0][:, :8], *on_device[1:3], Stream.COUPLED)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawn = gumbel_argmax(*on_device[:3], Stream.COUPLED)
        recovered = gumbel_argmax(*on_device[:3], Stream.RECOVER, on_device[3])
        parts = [gumbel_max(on_device[0][:, at], *on_device[1:3], Stream.COUPLED, at.start) for at in HALVES]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(drawn.cpu(), (weights.double() + noise).argmax(-1))
    assert torch.equal(recovered.cpu(), (weights.double() + keyed).argmax(-1))
    for at, (best, token_ids) in zip(HALVES, parts, strict=True):
        scores = (weights.double() + noise)[:, at]
        assert torch.equal(best.cpu(), scores.amax(-1))
        assert torch.equal(token_ids.cpu(), at.start + scores.argmax(-1))


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"repetition_penalty": 1.2}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_the_same_logits_are_those_of_the_cpu(temperature: float, options: dict) -> None:
    logits = torch.randn(64, 32_000, generator=torch.Generator().manual_seed(0)) * 3
    verdicts = []
    for device in ("cpu", DEVICE):
        params = SamplingParams(temperature=temperature, **options)
        states = [SamplerState(params, i, (1, 2), vocab_size=32_000, device=device) for i in range(64)]
        rows, proposals = [Row(state) for state in states], [Proposal()] * 64
        verdicts.append(decide(logits.to(device), rows, proposals, [SpeculationParams().acceptance] * 64))
    assert [v.token_ids for v in verdicts[0]] == [v.token_ids for v in verdicts[1]]


def test_a_step_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver itself complains of every other wait: replayed, eager, greedy, sampled, drafting."""
    waits = []

    class Download(transfers.Download):
        def wait(self) -> tuple[torch.Tensor, ...]:
            waits.append(len(self._host))
            torch.cuda.set_sync_debug_mode("default")
            try:
                return super().wait()
            finally:
                torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(verification, "Download", Download)
    model = loaded("gemma3")
    for runner in (model.runner(9), eager_twin(model, 9)):
        runner.record(LIMITS)
        for options in ({"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01}):
            state = SamplerState(SamplingParams(**options), 3, (1, 2), vocab_size=300, device=DEVICE)
            rows, proposals = [Row(state, tuple([5] * i)) for i in range(4)], [Proposal((5, 5, 5))]
            torch.cuda.synchronize()
            waits.clear()
            torch.cuda.set_sync_debug_mode("error")
            try:
                pages = runner.cache.allocate(1)
                logits = runner.forward([chunk(prompt(1, 4), 0, 4, pages)])
                decide(logits, rows, proposals, [SpeculationParams().acceptance])
                draft_candidates(logits, rows, 8)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                runner.cache.release(pages)
            assert waits == [1 if state.only_scales else 3]


# -- forwards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attention", "compile"), WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2"])
def test_greedy_tokens_equal_generate(family: str, attention: Attention, compile: bool) -> None:
    model = random_model(family).to(DEVICE)
    model.set_attn_implementation("eager")  # the other implementations of transformers leave a softcap out
    text = prompt(3, 70)
    ids = torch.tensor([text], device=DEVICE)
    want = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, pad_token_id=0)
    for record in (False, True):
        runner = prepare(model, compile=compile, attention=attention).runner(4)
        if record:
            runner.record(LIMITS)
        pages = runner.cache.allocate(2)
        tokens = list(text)
        logits = runner.forward([chunk(tokens, 0, len(tokens), pages)])
        for _ in range(32):
            tokens.append(int(logits[-1].argmax()))
            logits = runner.forward([chunk(tokens, len(tokens) - 1, len(tokens), pages)])
        assert tokens == want[0].tolist()


@pytest.mark.parametrize(("attention", "compile"), WAYS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2", "gpt2"])
def test_every_graph_has_the_bits_of_its_eager_twin(family: str, attention: Attention, compile: bool) -> None:
    for limits, dtype in itertools.product((LIMITS, TREES), (torch.float32, torch.bfloat16)):
        runner = loaded(family, dtype, attention, compile=compile).runner(9)
        record_steps(runner, limits, 1024, True)
        assert isinstance(runner.backend, DeviceBackend)
        assert isinstance(runner.backend._recorder, CudaRecorder)
        assert len(runner.backend.recorded) == len(runner.backend.shapes) > 8
        assert check_replay(runner, 1024) == []


def test_steps_through_graphs_have_the_bits_of_steps_without() -> None:
    """Ragged batches in and out of the recorded shapes, contexts that grow, one after the other."""
    model = loaded("gemma3")
    graphs, eager = model.runner(40), eager_twin(model, 40)
    for runner in (graphs, eager):
        runner.record(LIMITS)
    rng = random.Random(0)
    texts = [prompt(i, 400) for i in range(4)]
    pages = [graphs.cache.allocate(pages_for(400)) for _ in texts]
    done = [0] * 4
    for _ in range(60):
        part = rng.sample(range(4), rng.randint(1, 4))
        stops = {i: min(400, done[i] + rng.choice((1, 1, 3, 9, 30))) for i in part}
        steps = [chunk(texts[i], done[i], stops[i], pages[i]) for i in part if stops[i] > done[i]]
        if steps:
            assert torch.equal(graphs.forward(steps), eager.forward(steps))
        done = [stops.get(i, d) for i, d in enumerate(done)]
    assert sum(done) > 600


@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "minimax", "nemotron_h", "lfm2", "jamba"])
def test_linear_layers_of_each_kind_are_recorded_and_have_the_bits_of_decoding(family: str) -> None:
    """Prompts in chunks, and branches of a tree, replayed; slots that are free hold NaN."""
    model = prepare(checkpoint(hybrid_config(family)).to(DEVICE, torch.bfloat16), compile=True)
    runner = poison(model.runner(40, max_sessions=16))
    record_steps(runner, LIMITS, 1024, True)
    assert check_replay(runner, 1024) == []
    report = check_invariance(runner, 300, 64)
    assert report.holds
    assert report.has_branches


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3"])
def test_verification_has_the_bits_of_decoding(family: str, compile: bool) -> None:
    """What losslessness rests on here; where it fails, the service says so at start-up and tokens may flip at ties."""
    runner = loaded(family, compile=compile).runner(9)
    runner.record(LIMITS)
    report = check_invariance(runner)
    assert report.holds, str(report)


# -- the service -------------------------------------------------------------------------------------------


def requests(count: int, max_tokens: int = 24) -> dict[str, Request]:
    return {
        f"r{i}": Request(prompt(i, 10 + 23 * i), SamplingParams(max_tokens=max_tokens, temperature=i % 2, seed=i))
        for i in range(count)
    }


def recording_pump(target: LoadedModel, draft: LoadedModel, **options) -> Pump:
    pump = Pump(target, draft, **options)
    pump.target.runner.record(LIMITS)
    pump.drafter.runner.record(TREES)
    return pump


def test_all_modes_say_the_same_and_preemption_changes_nothing() -> None:
    """Plain alone against both modes together, with room for all and with pages for two of eight."""
    target = loaded("llama")
    draft = prepare(noisy_copy(random_model("llama", dtype=torch.bfloat16), 0.05).to(DEVICE), compile=True)
    asked = requests(8)
    want = plain_reference(target, asked)
    for mode in Mode:
        for pages in (64, 8):
            pump = recording_pump(target, draft, pages=pages, max_sessions=4)
            assert_same(pump.run(in_mode(asked, mode)), want)
            if pages == 8:
                assert pump.target.stats.preemptions > 0


def test_steps_that_are_launched_ahead_say_what_serial_ones_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded and eager steps, with every way to draw a token that the device can decide."""
    target = loaded("llama")
    options: list[dict] = [
        {},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05},
        {"stop_token_ids": tuple(range(0, 300, 9))},
    ]
    asked = {
        f"r{i}": Request(
            prompt(i, 10 + 17 * i), SamplingParams(max_tokens=40, temperature=i % 2, seed=i, **options[i % 5])
        )
        for i in range(10)
    }
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "schedule_ahead", lambda *_: [])
        want = plain_reference(target, asked)
    for record in (True, False):
        pump = Pump(target, None, max_sessions=4, late=0.0)
        if record:
            pump.target.runner.record(LIMITS)
        assert_same(pump.run(in_mode(asked, Mode.PLAIN)), want)
        assert pump.target.stats.steps_ahead > pump.target.stats.steps / 2


def test_the_local_pipeline_in_threads(tmp_path) -> None:
    """Two engines in one process and two threads, recording side by side, as a user would run them."""
    folder = save_pair(tmp_path)
    options = {"device": DEVICE, "cuda_graphs": True, "max_cuda_graphs": 16}
    config = LocalConfig(
        target=TargetModel(path=str(folder / "target"), max_sessions=4, adaptive=False, **options),
        draft=DraftModel(path=str(folder / "draft"), **options),
        worker="thread",
        pin_cores=False,
    )
    with LocalPipeline(config) as pipeline:
        for temperature in (0.0, 0.9):
            sampling = SamplingParams(max_tokens=48, seed=5, ignore_eos=True, temperature=temperature)
            texts = [
                pipeline.submit(prompt(1, 30), sampling, SpeculationParams(mode=mode)).result.token_ids for mode in Mode
            ]
            assert texts[0] == texts[1] == texts[2]
            assert len(texts[0]) == 48


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_over_nccl_have_one_text_in_all_modes(tmp_path) -> None:
    """A target over two devices: every mode says what plain decoding says, and greedily what one device says."""
    folder = save_pair(tmp_path)
    options = {"dtype": "float32", "compile": False, "device": DEVICE}

    def texts(num_ranks: int, temperature: float) -> list[tuple[int, ...]]:
        target = TargetModel(
            path=str(folder / "target"), max_sessions=4, adaptive=False, tensor_parallel_size=num_ranks, **options
        )
        draft = DraftModel(path=str(folder / "draft"), **options)
        sampling = SamplingParams(max_tokens=48, seed=5, ignore_eos=True, temperature=temperature)
        with LocalPipeline(LocalConfig(target=target, draft=draft, worker="thread", pin_cores=False)) as pipeline:
            asked = [pipeline.submit(prompt(1, 30), sampling, SpeculationParams(mode=mode)) for mode in Mode]
            return [generation.result.token_ids for generation in asked]

    greedy, drawn = texts(2, 0.0), texts(2, 0.9)
    assert greedy == [greedy[0]] * len(Mode) == texts(1, 0.0)
    assert drawn == [drawn[0]] * len(Mode)
    assert len(greedy[0]) == len(drawn[0]) == 48


def test_memory_does_not_grow() -> None:
    """Neither what is in use nor what is reserved, after the first requests have been served."""
    model = loaded("llama")
    draft = prepare(noisy_copy(random_model("llama", dtype=torch.bfloat16), 0.05).to(DEVICE), compile=True)
    pump = recording_pump(model, draft, max_sessions=4)
    before = 0, 0
    for turn in range(6):
        if turn == 3:  # inputs of every shape that occurs have their memory
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        for i, request in enumerate(requests(6).values()):
            pump.submit(f"again{turn}-{i}", request)
        while len(pump.results) < len(pump.sessions):
            pump.tick()
        pump.settle()
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert after[0] <= before[0] + (1 << 20)  # a shape that occurs for the first time keeps memory for its inputs
    assert after[1] <= before[1] + (2 << 20)
