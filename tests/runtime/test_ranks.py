"""Engines of several ranks, each rank a real process: the tokens of plain decoding, and no rank outlives another.

The oracle is plain decoding by one process of degree 1. The weights are fp32, where a sum in another order moves
logits by about 1e-6: that two of the random model's scores lie closer than this in one of the ~700 compared positions
has a chance below 1e-2, and the seeds are fixed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.support.models import letters_tokenizer, save_pair
from tests.support.rings import nightly, slow
from torch._C._distributed_c10d import TCPStore
from transformers import AutoModelForCausalLM, LlamaConfig

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config import HeadOptions, LocalConfig, TargetOptions
from paceline.core.processors import Row, SamplerState
from paceline.embedded import TARGET_DIR
from paceline.errors import ConfigError, EngineError
from paceline.local import LocalPipeline
from paceline.messages import OpenSession, Outcome
from paceline.model.compiled.graphs import require_graphs
from paceline.model.parallel import runner as ranks_module
from paceline.model.parallel.runner import Picks
from paceline.runtime import ranks
from paceline.runtime.build import EngineSpec
from paceline.runtime.process_worker import ProcessWorker
from paceline.runtime.ranks import RankedWorker, process_ranks
from paceline.target.build import build_target_engine
from paceline.types import Acceptance, Cause, Mode, Rendezvous, SamplingParams, SpeculationParams
from paceline_bench.processes import read_process

RANK_TIMEOUT_S, SHORT_TIMEOUT_S = 120.0, 8.0
"""Ranks wait for each other longer than a busy machine stops one; a short time is for those that die or hang."""
TEXTS = ["abcdefgh", "the quick brown fox jumps over it", "zz"]
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "repetition_penalty": 1.2},
    {"temperature": 0.9, "min_tokens": 4, "stop_token_ids": (50, 51, 52)},
]
MODES = [
    SpeculationParams(mode=Mode.PLAIN),
    SpeculationParams(mode=Mode.OVERLAPPED, max_draft_tokens=5),
    SpeculationParams(mode=Mode.SEQUENTIAL, max_draft_tokens=3),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("models"))


def config_of(
    folder: Path, *, target: int = 1, draft: int | None = 1, timeout_s: float = RANK_TIMEOUT_S, **options: object
) -> LocalConfig:
    """``target`` and ``draft`` ranks; no draft: None."""
    model = {"dtype": "float32", "compile": False, "rank_timeout_s": timeout_s}
    drafter = None if draft is None else {"path": str(folder / "draft"), "tensor_parallel_size": draft, **model}
    return LocalConfig(
        target={
            "path": str(folder / "target"),
            "tensor_parallel_size": target,
            "adaptive": False,
            "max_model_len": 256,
            "batch_invariant": "off",
            **model,
        },
        draft=drafter,
        **{"pin_cores": False, "worker": "thread"} | options,
    )


@pytest.mark.parametrize(
    ("placement", "threads", "num_cores", "target", "draft"),
    [
        ("auto", (1, 1), 2, ([0, 1], 1), [1]),
        ("auto", (2, 1), 4, ([0, 1, 2], 1), [2]),
        ("auto", (1, 3), 4, ([0, 1, 2, 3], 3), [1, 2, 3]),
        ("auto", (1, 2), 2, ([], 0), []),
        ("auto", (1, 1), 1, ([], 0), []),
        ("apart", (2, 1), 4, ([0, 2], 0), [1]),
    ],
)
def test_a_draft_in_either_place_lends_its_cores(
    placement: str,
    threads: tuple[int, int],
    num_cores: int,
    target: tuple[list[int], int],
    draft: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The target's own come first, as its threads take them in order."""
    monkeypatch.setattr(ranks, "available_cores", lambda: [*range(num_cores)])
    config = LocalConfig(
        target={"path": "t", "cpu_threads": threads[0]},
        draft={"path": "d", "cpu_threads": threads[1], "placement": placement},
    )
    made: dict[str, tuple[EngineSpec, list[int]]] = {}

    def keep(kind, build, on_messages, on_death, cores):
        made[kind] = build.__self__, cores

    monkeypatch.setattr(ranks, "ProcessWorker", keep)
    for kind in ("target", "draft"):
        ranks.local_worker(config, kind, None, print, print)
    (spec, cores), (_, others) = made["target"], made["draft"]
    assert (cores, spec.setup.shared_cores) == target
    assert others == draft


def outputs(pipeline: LocalPipeline, modes: list[SpeculationParams]) -> list[list[tuple[int, ...]]]:
    """Of every text and sampling, all at once, by mode."""
    running = [
        [
            pipeline.submit(text, SamplingParams(max_tokens=40, seed=7 * i + j, **sampling), mode)
            for i, text in enumerate(TEXTS)
            for j, sampling in enumerate(SAMPLING)
        ]
        for mode in modes
    ]
    return [[generation.result.token_ids for generation in generations] for generations in running]


@pytest.fixture(scope="module")
def plain(checkpoints: Path) -> list[tuple[int, ...]]:
    with LocalPipeline(config_of(checkpoints, draft=None)) as pipeline:
        return outputs(pipeline, MODES[:1])[0]


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        *slow([(2, 1), (1, 2)]),
        *nightly([(4, 1), (2, 2)]),
    ],
)
@pytest.mark.usefixtures("forked_workers")
def test_the_tokens_are_those_of_plain_decoding_in_one_process(
    target: int, draft: int, checkpoints: Path, plain: list[tuple[int, ...]]
) -> None:
    """All modes side by side, sessions whose tokens the ranks draw beside sessions whose logits they join."""
    with LocalPipeline(config_of(checkpoints, target=target, draft=draft)) as pipeline:
        found = outputs(pipeline, MODES)
        rejecting = pipeline.generate("abc", SamplingParams(max_tokens=20, seed=3), _rejection()).result
        scored = pipeline.generate(TEXTS[1], prompt_logprobs=3, max_tokens=0).result.prompt_logprobs
        token_ids = pipeline.encode(TEXTS[1], SamplingParams())
    for mode, tokens in zip(MODES, found, strict=True):
        assert tokens == plain, mode
    assert len(rejecting.token_ids) <= 20
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "target", dtype=torch.float32)
    with torch.no_grad():
        log_probs = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    assert len(scored) == len(token_ids)
    for row, token_id, one in zip(log_probs, token_ids[1:], scored[1:], strict=False):
        assert abs(row[token_id].item() - one.logprob) < 1e-4
        assert [value for _, value in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def _rejection() -> SpeculationParams:
    return SpeculationParams(acceptance=Acceptance.REJECTION, max_draft_tokens=4)


@pytest.mark.parametrize(
    ("method", "draft"), [*slow([("eagle3", 1)]), *nightly([("eagle3", None), ("medusa", None), ("draft_model", None)])]
)
@pytest.mark.usefixtures("forked_workers")
def test_the_head_of_a_sharded_target_changes_no_text(method: str, draft: int | None) -> None:
    """The embedded target in two ranks, whose first one runs the head: its states and tokens are whole. With a draft
    the head proposes where that has nothing."""
    name = "draft" if method == "draft_model" else method
    head = HeadOptions(method=method, model=f"paceline/embedded-{name}", num_speculative_tokens=4)
    prompts, options = ["def read_file(path):", "import os\n"], SAMPLING[:4]
    found = []
    for degree, heads in ((1, []), (2, [head])):
        config = config_of(TARGET_DIR.parent, target=degree, draft=draft if heads else None)
        config = config.model_copy(update={"target": config.target.model_copy(update={"heads": heads})})
        with LocalPipeline(config) as pipeline:
            running = [
                pipeline.submit(prompt, SamplingParams(max_tokens=24, seed=i, **each), MODES[1])
                for prompt in prompts
                for i, each in enumerate(options)
            ]
            found.append([generation.result for generation in running])
    plain, headed = found
    assert [r.token_ids for r in headed] == [r.token_ids for r in plain]
    # Beside a draft, how much is the head's depends on how late the draft is.
    accepted = [r.speculation.head_accepted if draft is None else r.speculation.accepted for r in headed]
    assert sum(accepted) > len(headed)
    assert not any(r.speculation.drafted for r in plain)


@pytest.mark.nightly
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_compiled_ranks_of_rounded_weights_change_no_text(quantization: str) -> None:
    """In bfloat16, as they are served: proposals are verified by the bits of plain decoding."""
    config = config_of(TARGET_DIR.parent, target=2)
    options = {"compile": True, "quantization": quantization, "dtype": "bfloat16", "batch_invariant": "require"}
    config = config.model_copy(update={"target": config.target.model_copy(update=options)})
    with LocalPipeline(config) as pipeline:
        plain, overlapped = outputs(pipeline, MODES[:2])
        accepted = pipeline.generate("import os\n", SamplingParams(max_tokens=60), MODES[1]).result.speculation.accepted
    assert overlapped == plain
    assert accepted > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_rank_that_draws_by_another_seed_is_caught(
    checkpoints: Path, plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: the first rank draws its part of the vocabulary with other noise than is drawn without ranks."""
    real = ranks_module.sample_sharded

    def mutant(group, logits, first, keys, *others):
        other = type(keys)(keys.greedy, keys.seeds ^ 1, keys.positions, keys.num_greedy)
        return real(group, logits, first, other, *others)

    monkeypatch.setattr(ranks_module, "sample_sharded", mutant)
    with LocalPipeline(config_of(checkpoints, target=2, draft=None)) as pipeline:
        found = outputs(pipeline, MODES[:1])[0]
    differ = [tokens != expected for tokens, expected in zip(found, plain, strict=True)]
    assert any(differ[1 :: len(SAMPLING)]), "sampled sessions draw where the logits are"
    assert not any(differ[:: len(SAMPLING)]), "greedy ones use no noise"


# -- ranks that die or hang --------------------------------------------------------------------------------------------


def running_ranks() -> list[int]:
    """Processes of followers that were started here."""
    return [child.pid for child in multiprocessing.active_children() if "rank" in child.name and child.pid]


def gone(pid: int, within_s: float = 60.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if read_process(pid) is None:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "reason"),
    [
        pytest.param(signal.SIGKILL, "rank 1", id="killed"),
        pytest.param(signal.SIGSTOP, "rank 1", id="stopped"),
    ],
)
@pytest.mark.usefixtures("forked_workers")
def test_a_target_ends_with_any_of_its_ranks(
    number: signal.Signals, reason: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other ranks of this machine meet elsewhere
    timeout_s = SHORT_TIMEOUT_S if number is signal.SIGSTOP else RANK_TIMEOUT_S
    with LocalPipeline(config_of(checkpoints, timeout_s=timeout_s, target=2, draft=None)) as pipeline:
        (rank,) = running_ranks()
        generation = pipeline.submit("abc", SamplingParams(max_tokens=200, ignore_eos=True, seed=1))
        next(iter(generation))
        os.kill(rank, number)
        with pytest.raises(EngineError, match=reason):
            _ = generation.result
        with pytest.raises(EngineError, match=reason):
            pipeline.submit("abc")
    assert gone(rank), "nothing is left"
    assert not list(tmp_path.glob("paceline-ranks-*"))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_an_idle_target_ends_with_its_rank_too(checkpoints: Path) -> None:
    with LocalPipeline(config_of(checkpoints, target=2, draft=None)) as pipeline:
        (rank,) = running_ranks()
        os.kill(rank, signal.SIGKILL)
        end = time.monotonic() + 60.0
        while pipeline.ready and time.monotonic() < end:
            time.sleep(0.05)
        with pytest.raises(EngineError, match="target rank 1"):
            pipeline.submit("abc")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_draft_that_has_lost_a_rank_is_started_again(checkpoints: Path, plain: list[tuple[int, ...]]) -> None:
    with LocalPipeline(config_of(checkpoints, draft=2)) as pipeline:
        (rank,) = running_ranks()
        os.kill(rank, signal.SIGKILL)
        assert outputs(pipeline, MODES[1:2])[0] == plain
        end = time.monotonic() + 60.0
        while not (pipeline.draft.up and pipeline.num_draft_restarts) and time.monotonic() < end:
            time.sleep(0.05)
        assert pipeline.num_draft_restarts == 1
        speculation = pipeline.generate("abc", SamplingParams(max_tokens=40, seed=1), MODES[1]).result.speculation
        assert Cause.DRAFT_DOWN not in speculation.causes
        assert running_ranks() != [rank]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_rank_is_not_left_when_its_leader_is_killed(checkpoints: Path) -> None:
    """The engine in a process of its own, as by default."""
    with LocalPipeline(config_of(checkpoints, target=2, draft=None, worker="process")) as pipeline:
        leader = pipeline.target.worker._leader.pid
        (rank,) = running_ranks()
        os.kill(leader, signal.SIGKILL)
        assert gone(rank), "a rank ends with the first one"
        with pytest.raises(EngineError):
            pipeline.submit("abc")


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_a_model_that_cannot_be_split_so_is_refused_with_the_degrees_that_can(tmp_path: Path) -> None:
    """Before anything is left behind."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=48, intermediate_size=96, num_hidden_layers=1, num_attention_heads=6,
        num_key_value_heads=6, head_dim=8,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "target")
    letters_tokenizer().save_pretrained(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"(?s)4.*1, 2, 3"), LocalPipeline(config_of(tmp_path, target=4, draft=None)):
        pass
    assert not running_ranks()


@pytest.mark.slow
def test_without_a_compiler_ranks_exchange_over_gloo(
    checkpoints: Path,
    plain: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same tokens; and a rank that dies is noticed there too."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with LocalPipeline(config_of(checkpoints, timeout_s=SHORT_TIMEOUT_S, target=2, draft=None)) as pipeline:
        assert outputs(pipeline, MODES[:1])[0] == plain
        time.sleep(SHORT_TIMEOUT_S + 1)  # ranks may wait for work longer than for each other
        assert outputs(pipeline, MODES[:1])[0] == plain
        (rank,) = running_ranks()
        generation = pipeline.submit("abc", SamplingParams(max_tokens=200, ignore_eos=True, seed=1))
        next(iter(generation))
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineError, match="rank"):
            _ = generation.result
    assert "exchange over gloo, which is slower than shared memory: there is no C++ compiler" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_ranks_meet_at_a_port_too(checkpoints: Path, plain: list[tuple[int, ...]]) -> None:
    """As on several hosts. The port is the system's choice; engines without a pipeline around them."""
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    rendezvous = Rendezvous(f"tcp:127.0.0.1:{store.port}", 2, timeout_s=RANK_TIMEOUT_S)
    deaths: list[str] = []
    setup = config_of(checkpoints, target=2, draft=None).target_setup()
    follower = ProcessWorker("rank", EngineSpec(setup, rendezvous.of(1)).build, deaths.extend, deaths.append)
    follower.spawn()
    outcomes: list[Outcome] = []
    engine = build_target_engine(setup, outcomes.extend, rendezvous)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=40, seed=0, **SAMPLING[0])
    prompt = tuple(load_tokenizer(str(checkpoints / "target")).encode(TEXTS[0]))
    engine.receive([OpenSession("s", 1, prompt, len(prompt), 0, sampling, MODES[0])])
    while not outcomes or outcomes[-1].finish_reason is None:
        engine.step()
    engine.close()
    follower.stop()
    assert tuple(t for outcome in outcomes for t in outcome.token_ids) == plain[0]
    assert deaths == [], "a rank whose first one leaves ends in peace"


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_what_is_drawn_goes_to_other_ranks_unchanged() -> None:
    def row(seed: int, temperature: float, length: int) -> Row:
        params = SamplingParams(temperature=temperature)
        return Row(SamplerState(params, seed, (11,) * length, vocab_size=300), ())

    picks = Picks.of([None, row(2**64 - 1, 0.7, 5), None, row(3, 0.0, 9)])
    twin = Picks.decode(picks.encode())
    assert torch.equal(picks.numbers, twin.numbers)
    bits = torch.tensor([0.7, 1.0]).view(torch.int32).tolist()
    assert twin.numbers.tolist() == [[1, -1, 5, 0, bits[0]], [3, 3, 9, 1, bits[1]]]
    assert twin.others(5) == [0, 2, 4]


class _Fake:
    """A worker that is told what becomes of it."""

    def __init__(self, name: str, on_death, error: Exception | None = None) -> None:
        self.name, self.on_death, self.error = name, on_death, error
        self.alive, self.stopped = True, False

    def spawn(self) -> None:
        pass

    def wait_ready(self) -> None:
        if self.error is not None:
            raise self.error
        if self.name == "leader" and getattr(self, "hangs", False):
            time.sleep(3600)

    def stop(self, timeout_s: float = 5.0) -> None:
        self.stopped = True


def test_a_rank_that_cannot_start_fails_the_engine_although_the_first_waits_for_it() -> None:
    made: list[_Fake] = []

    def leader(on_death) -> _Fake:
        made.append(_Fake("leader", on_death))
        made[-1].hangs = True
        return made[-1]

    worker = RankedWorker(
        leader, [lambda died: _Fake("rank 1", died, ConfigError("no such file"))], lambda reason: None
    )
    worker.spawn()
    with pytest.raises(ConfigError, match="no such file"):
        worker.wait_ready()


def test_the_death_of_several_ranks_is_told_once() -> None:
    deaths: list[str] = []
    fakes: list[_Fake] = []

    def make(name: str):
        def maker(on_death) -> _Fake:
            fakes.append(_Fake(name, on_death))
            return fakes[-1]

        return maker

    worker = RankedWorker(make("leader"), [make("rank 1"), make("rank 2")], deaths.append)
    worker.start()
    fakes[2].on_death("rank 2 has died")
    fakes[0].on_death("the leader has lost rank 2")
    assert deaths == ["rank 2 has died"]
    assert not worker.alive
    worker.stop()
    assert all(fake.stopped for fake in fakes)


def test_one_rank_needs_no_meeting(checkpoints: Path) -> None:
    assert process_ranks(config_of(checkpoints).target_setup()) == (None, [])
    assert process_ranks(config_of(checkpoints, draft=None).draft_setup()) == (None, [])
    rendezvous, followers = process_ranks(config_of(checkpoints, target=3).target_setup())
    assert rendezvous is not None
    assert (rendezvous.degree, rendezvous.rank, len(followers)) == (3, 0, 2)


@pytest.mark.parametrize(("seen", "devices"), [(2, [0, 1]), (4, [0, 1])])
def test_each_rank_makes_its_own_device_the_current_one(
    seen: int, devices: list[int], checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that a host shows to its ranks the one of its number."""
    current: list[torch.device] = []
    joined: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(ranks_module, "connect_rank", lambda rendezvous, device: joined.append(device) or nullcontext())
    meeting = Rendezvous("tcp:10.0.0.1:6000", degree=2)
    for rank in range(2):
        with ranks_module.ranked(str(checkpoints), TargetOptions(device="cuda"), meeting.of(rank)):
            pass
    assert current == joined == [torch.device("cuda", number) for number in devices]


def test_ranks_of_one_host_that_see_too_few_devices_are_refused(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    meeting = Rendezvous("file:nowhere", degree=2, rank=1)
    with (
        pytest.raises(ConfigError, match="is 2 and there are 1 GPUs: at most 1 are allowed here"),
        ranks_module.ranked(str(checkpoints), TargetOptions(device="cuda"), meeting),
    ):
        pass


def test_graphs_of_ranks_that_cannot_exchange_in_them_are_refused() -> None:
    reason = "the ranks may be on several hosts"
    with pytest.raises(ConfigError, match=f"cuda_graphs is true and the ranks run eagerly, as {reason}: use 'auto'"):
        require_graphs(True, torch.device("cuda"), reason)
    require_graphs("auto", torch.device("cuda"), reason)
    require_graphs(True, torch.device("cuda"), None)
