"""The one-process pipeline for real: both engines in workers, sessions between them, faults mid-stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import pytest
from tests.support.fake_service import wait_until
from tests.support.models import VOCAB, letters_tokenizer, prompt, save_pair

from paceline.checkpoint.tokenizer import JsonTokenizer
from paceline.config import DraftModel, HeadOptions, LocalConfig, NgramOptions, TargetModel
from paceline.errors import EngineError, InvalidRequestError, PromptTooLongError, TokenizerMismatchError
from paceline.local import LocalPipeline, link
from paceline.messages import OpenSession, SessionFailed
from paceline.runtime.build import EngineSpec
from paceline.types import Acceptance, Cause, FinishReason, Mode, SamplingParams
from paceline.types import SpeculationParams as Speculation

TIMEOUT_S = 60
MAX_LEN = 2048


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories of a target and a good draft with random weights."""
    return save_pair(tmp_path_factory.mktemp("models"))


@dataclass
class Tapped:
    """A factory whose engines can be looked at, broken, or told to refuse sessions."""

    factory: object
    engines: list = field(default_factory=list)
    pause_s: float = 0.0
    """Before each step: a target that is slow enough to be drafted for."""
    broken: bool = False
    refuses: bool = False
    held: threading.Event | None = None
    """No step begins before it is set."""

    def __call__(self, emit):
        self.engines.append(TappedEngine(self, self.factory(emit), emit))
        self.broken = False
        return self.engines[-1]


@dataclass
class TappedEngine:
    tap: Tapped
    engine: object
    emit: object

    def receive(self, messages):
        if self.tap.refuses:
            self.emit([SessionFailed(m.session_id, m.epoch, "no room") for m in messages if isinstance(m, OpenSession)])
        else:
            self.engine.receive(messages)

    def step(self):
        if self.tap.broken:
            raise RuntimeError("out of order")
        if self.tap.held is not None:
            self.tap.held.wait(TIMEOUT_S)
        time.sleep(self.tap.pause_s)
        return self.engine.step()

    def wait_s(self):
        wait_s = self.engine.wait_s()
        return 0.05 if wait_s is None else wait_s  # looks at ``broken`` now and then

    def facts(self):
        return self.engine.facts()

    def close(self):
        self.engine.close()


def config_of(folder, worker="thread", **options):
    """A pair as its files are; ``options``: those of the target."""
    run = {"dtype": "float32", "compile": False}
    return LocalConfig(
        # what one test makes of its draft must not change the next
        target=TargetModel(
            path=str(folder / "target"), adaptive=False, batch_invariant="off", **run, **{"max_sessions": 8, **options}
        ),
        draft=DraftModel(path=str(folder / "draft"), **run),
        worker=worker,
        pin_cores=False,
    )


@pytest.fixture(scope="module")
def threaded(checkpoints):
    """A pipeline of thread workers, and the taps on its engines."""
    config = config_of(checkpoints)
    target, draft = (Tapped(EngineSpec(setup).build) for setup in (config.target_setup(), config.draft_setup()))
    with LocalPipeline(config, target_factory=target, draft_factory=draft) as pipeline:
        pipeline.taps = target, draft
        yield pipeline


def sampled(max_tokens=24, **options):
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 5, "ignore_eos": True, "temperature": 0.8, **options})


def nothing_is_held(pipeline):
    target, draft = (tap.engines[-1].engine for tap in pipeline.taps)
    return target.num_sessions == draft.num_sessions == 0 and target.runner.cache.num_used == 0


def run(pipeline, token_ids, sampling, mode=Mode.OVERLAPPED, **options):
    return pipeline.submit(token_ids, sampling, Speculation(mode=mode, **options)).result


@pytest.fixture
def slow_target(threaded):
    threaded.taps[0].pause_s = 0.02
    yield
    threaded.taps[0].pause_s = 0.0


@pytest.mark.usefixtures("slow_target")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_all_modes_give_identical_tokens(threaded, temperature):
    sampling = sampled(temperature=temperature)
    plain, sequential, overlapped = (run(threaded, prompt(1, 30), sampling, mode) for mode in Mode)
    assert plain.token_ids == sequential.token_ids == overlapped.token_ids
    assert plain.speculation.drafted == 0
    assert sequential.speculation.accepted > 0
    assert overlapped.speculation.accepted > 0
    assert threaded.tokenizer.decode(plain.token_ids) == plain.text
    wait_until(lambda: nothing_is_held(threaded))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_in_either_place_changes_no_token(checkpoints, threaded, temperature):
    """Its model drafts in the target while the draft is kept from answering, and the draft where it is not."""
    run_, path = {"dtype": "float32", "compile": False}, str(checkpoints / "draft")
    config = LocalConfig(
        target=TargetModel(path=str(checkpoints / "target"), max_sessions=8, batch_invariant="off", **run_),
        draft=DraftModel(path=path, placement="auto", **run_),
        worker="thread",
        pin_cores=False,
    )
    target, draft = (Tapped(EngineSpec(setup).build) for setup in (config.target_setup(), config.draft_setup()))
    plain = run(threaded, prompt(1, 30), sampled(temperature=temperature, max_tokens=60), Mode.PLAIN)
    with LocalPipeline(config, target_factory=target, draft_factory=draft) as pipeline:
        target.pause_s = 0.005
        draft.refuses = True
        found = [run(pipeline, prompt(1, 30), sampled(temperature=temperature, max_tokens=60))]
        draft.refuses = False
        found += [run(pipeline, prompt(1, 30), sampled(temperature=temperature, max_tokens=60)) for _ in range(2)]
    assert [result.token_ids for result in found] == [plain.token_ids] * 3
    (mounted,) = target.engines[0].engine.heads.mounted
    assert mounted.name == f"draft_model {path}"
    assert mounted.stats.rows > 0, "by the model in the target"
    assert draft.engines[0].engine.stats.nodes_published > 0, "by the draft"


def test_the_parent_reads_tokenizer_and_configuration_without_transformers(threaded):
    assert isinstance(threaded.tokenizer._tokenizer, JsonTokenizer)
    assert threaded.max_model_len == threaded.checkpoint.max_model_len == MAX_LEN


@pytest.mark.slow
def test_engines_in_threads_start_where_nothing_was_imported(checkpoints):
    """Both import transformers at once, of which half an import has not every name."""
    script = """
import sys
from paceline.config import DraftModel, LocalConfig, TargetModel
from paceline.local import LocalPipeline, link
run = {"dtype": "float32", "device": "cpu", "compile": False}
target, draft = TargetModel(path=sys.argv[1], **run), DraftModel(path=sys.argv[2], **run)
with LocalPipeline(LocalConfig(target=target, draft=draft, worker="thread")):
    pass
"""
    command = [sys.executable, "-c", script, str(checkpoints / "target"), str(checkpoints / "draft")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sixteen_mixed_requests_at_once(threaded):
    """More than are admitted at a time; each gets what it gets alone."""
    requests = []
    for i in range(16):
        sampling = sampled(
            8 + i,
            seed=i,
            temperature=(0.0, 0.7, 1.2)[i % 3],
            top_k=20 * (i % 2),
            repetition_penalty=1.0 + 0.2 * (i % 4 == 3),
            ignore_eos=i % 5 != 0,
        )
        speculation = Speculation(mode=list(Mode)[i % 3], max_draft_tokens=1 + i % 8)
        requests.append((prompt(i, 3 + 11 * i), sampling, speculation))
    generations = [threaded.submit(*request) for request in requests]
    for generation, (token_ids, sampling, _) in zip(generations, requests, strict=True):
        chunks = list(generation)
        alone = run(threaded, token_ids, sampling, Mode.PLAIN)
        assert generation.result.token_ids == alone.token_ids
        assert generation.result.finish_reason == alone.finish_reason
        assert "".join(chunk.text for chunk in chunks) == generation.result.text == alone.text
    wait_until(lambda: nothing_is_held(threaded))


@pytest.mark.slow
def test_many_sessions_in_a_kv_cache_that_holds_two_of_them(checkpoints, threaded):
    """Twelve sessions that grow to three pages each in six pages: never more is held, and each gets what it gets
    alone by plain decoding."""
    requests = [(prompt(i, 60), sampled(80, seed=i, temperature=i % 2)) for i in range(12)]
    alone = [run(threaded, *request, Mode.PLAIN) for request in requests]
    config = config_of(checkpoints, kv_pages=6)
    tap = Tapped(EngineSpec(config.target_setup()).build)
    most_held, modes = [], list(Mode)
    with LocalPipeline(config, target_factory=tap) as pipeline:
        engine = tap.engines[0].engine
        cache, forward = engine.runner.cache, engine.runner.forward
        num_bytes = sum(pool.nbytes for pool in (*cache.keys, *cache.values))

        def watched(steps):
            held = {page for session in engine.sessions.values() for page in session.pages}
            assert held <= set(range(6))
            engine.check_integrity()
            most_held.append(len(held))
            return forward(steps)

        engine.runner.forward = watched
        running = [
            pipeline.submit(*request, Speculation(mode=modes[i % len(modes)])) for i, request in enumerate(requests)
        ]
        results = [generation.result for generation in running]
        wait_until(lambda: cache.num_used == 0)
        assert sum(pool.nbytes for pool in (*cache.keys, *cache.values)) == num_bytes
    assert [result.token_ids for result in results] == [result.token_ids for result in alone]
    assert {len(result.token_ids) for result in results} == {80}
    assert max(most_held) == 6, "the budget was needed"
    assert engine.stats.preemptions > 0


def test_the_rejection_rule_runs_and_ends(threaded):
    result = run(threaded, prompt(2, 12), sampled(), acceptance=Acceptance.REJECTION)
    assert result.finish_reason is FinishReason.LENGTH
    assert len(result.token_ids) == 24


def test_cancel_in_the_middle_of_a_stream_frees_both_engines(threaded):
    generation = threaded.submit(prompt(3, 80), sampled(1500))
    received = [next(generation) for _ in range(4)]
    generation.cancel()
    received += generation
    result = generation.result
    assert result.finish_reason is FinishReason.ABORT
    assert sum((chunk.token_ids for chunk in received), ()) == result.token_ids
    assert len(result.token_ids) < 1500
    wait_until(lambda: nothing_is_held(threaded))
    generation.cancel()  # of a finished request: nothing


def test_cancel_of_a_request_that_waits_its_turn(checkpoints, threaded):
    running = [threaded.submit(prompt(i, 5), sampled(1500)) for i in range(8)]
    waiting = threaded.submit(prompt(9, 5), sampled())
    waiting.cancel()
    assert waiting.result.token_ids == ()
    for generation in running:
        generation.cancel()
    wait_until(lambda: nothing_is_held(threaded))


def test_a_stop_string_across_tokens_cuts_exactly_and_frees_the_engines(threaded):
    token_ids, sampling = prompt(4, 20), sampled(64)
    whole = run(threaded, token_ids, sampling, Mode.PLAIN)
    texts = [threaded.tokenizer.decode([token_id]) for token_id in whole.token_ids]
    at = next(i for i in range(8, 60) if len(texts[i]) == 2 and texts[i + 1] and texts[i + 2])
    stop = texts[at][-1] + texts[at + 1] + texts[at + 2][0]
    for mode in Mode:
        generation = threaded.submit(token_ids, sampling, Speculation(mode=mode), stop=[stop, "zzzz"])
        streamed = "".join(chunk.text for chunk in generation)
        result = generation.result
        assert streamed == result.text == whole.text[: whole.text.index(stop)]
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    wait_until(lambda: nothing_is_held(threaded))


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "error", "message"),
    [
        (prompt(1, 2000), 49, PromptTooLongError, "has 2000 tokens and max_tokens is 49: together at most 2048"),
        ((10, VOCAB, 11), 8, InvalidRequestError, f"token id {VOCAB}: 0 to {VOCAB - 1} are allowed"),
        ((10, -1), 8, InvalidRequestError, "token id -1"),
        ((), 8, InvalidRequestError, "holds no token"),
        ("", 8, InvalidRequestError, "holds no token"),
        ("a\udcff", 8, InvalidRequestError, "not valid Unicode"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(threaded, token_ids, max_tokens, error, message):
    with pytest.raises(error, match=message):
        threaded.submit(token_ids, sampled(max_tokens))


def test_the_longest_request_that_fits(threaded):
    result = run(threaded, prompt(5, MAX_LEN - 12), sampled(12))
    assert len(result.token_ids) == 12


@pytest.mark.usefixtures("slow_target")
def test_a_draft_that_refuses_the_session_leaves_it_plain(threaded):
    draft = threaded.taps[1]
    expected = run(threaded, prompt(6, 20), sampled(), Mode.PLAIN)
    draft.refuses = True
    result = run(threaded, prompt(6, 20), sampled())
    draft.refuses = False
    assert result.token_ids == expected.token_ids
    assert result.speculation.causes[Cause.DRAFT_DOWN] > 0
    assert run(threaded, prompt(6, 20), sampled()).speculation.accepted > 0


@pytest.mark.usefixtures("slow_target")
def test_a_restarted_draft_takes_up_running_sessions(threaded, monkeypatch):
    monkeypatch.setattr(link, "RESTART_S", 0.05)
    draft = threaded.taps[1]
    generation = threaded.submit(prompt(7, 20), sampled(1900))
    other = threaded.submit(prompt(8, 20), sampled(1900), Speculation(mode=Mode.PLAIN))
    for _ in range(5):
        next(generation)
    draft.broken = True
    went_plain = resumed = False
    for chunk in generation:
        if chunk.round is not None:
            went_plain = went_plain or chunk.round.cause is Cause.DRAFT_DOWN
            resumed = went_plain and chunk.round.num_accepted > 0
        if resumed:
            break
    generation.cancel()
    other.cancel()
    assert went_plain
    assert resumed
    assert threaded.num_draft_restarts == 1
    assert len(draft.engines) == 2
    tokens = generation.result.token_ids
    assert run(threaded, prompt(7, 20), sampled(len(tokens)), Mode.PLAIN).token_ids == tokens
    wait_until(lambda: nothing_is_held(threaded))


def test_without_a_draft_model(checkpoints, threaded):
    expected = run(threaded, prompt(10, 20), sampled(), Mode.PLAIN)
    for draft in (NgramOptions(), None):
        config = config_of(checkpoints).model_copy(update={"draft": draft})
        with LocalPipeline(config) as pipeline:
            result = run(pipeline, prompt(10, 20), sampled())
            assert result.token_ids == expected.token_ids
            if draft is None:
                assert not {Cause.DRAFT_DOWN, Cause.LATE} & {*result.speculation.causes}, "no draft is missing"
                assert Cause.DISABLED in result.speculation.causes


@pytest.mark.parametrize("beside_a_draft", [False, True])
def test_with_a_head(checkpoints, threaded, beside_a_draft):
    """The draft model in the target's process, alone and beside a draft: the text of plain decoding, and its origin."""
    head = HeadOptions(method="draft_model", model=str(checkpoints / "draft"), num_speculative_tokens=3)
    config = config_of(checkpoints, heads=[head])
    with LocalPipeline(config if beside_a_draft else config.model_copy(update={"draft": None})) as pipeline:
        for temperature in (0.0, 0.7, 1.0):
            sampling = sampled(temperature=temperature)
            expected = run(threaded, prompt(10, 20), sampling, Mode.PLAIN)
            generation = pipeline.submit(prompt(10, 20), sampling, Speculation())
            headed = [c.round.head_accepted for c in generation if c.round is not None]
            result = generation.result
            assert result.token_ids == expected.token_ids
            assert result.speculation.head_accepted == sum(headed)
            if not beside_a_draft:
                assert result.speculation.accepted == sum(headed) > 0
        assert run(pipeline, prompt(10, 20), sampled(), Mode.PLAIN).speculation.drafted == 0


def test_a_draft_with_other_tokens_is_refused_before_any_worker_starts(checkpoints, tmp_path):
    (tmp_path / "target").symlink_to(checkpoints / "target")
    (tmp_path / "draft").mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / "draft" / name).symlink_to(checkpoints / "draft" / name)
    letters_tokenizer(VOCAB - 1).save_pretrained(tmp_path / "draft")
    pipeline = LocalPipeline(config_of(tmp_path))
    with pytest.raises(TokenizerMismatchError, match=f"{VOCAB - 1} tokens"):
        pipeline.start()
    assert not pipeline.target.worker.alive


def test_stopping_ends_what_is_in_progress(checkpoints):
    with LocalPipeline(config_of(checkpoints, max_sessions=1)) as pipeline:
        generations = [pipeline.submit(prompt(i, 9), sampled(1500)) for i in range(3)]
    assert {generation.result.finish_reason for generation in generations} == {FinishReason.ABORT}
    with pytest.raises(EngineError, match="stopped"):
        pipeline.submit(prompt(1, 9))
    pipeline.stop()


def test_a_request_that_waits_its_turn_says_how_long(checkpoints):
    config, both = config_of(checkpoints, max_sessions=1), threading.Event()
    target = Tapped(EngineSpec(config.target_setup()).build, held=both)
    with LocalPipeline(config, target_factory=target) as pipeline:
        opened = []
        requests = [pipeline.submit(prompt(i, 9), sampled(6), on_open=lambda i=i: opened.append(i)) for i in (0, 1)]
        assert opened == [0]
        both.set()  # nothing is decided before both are there
        first, second = (request.result.timing for request in requests)
    assert opened == [0, 1]
    assert second.queue_s >= first.decode_s > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_workers")
def test_processes_that_are_killed(checkpoints, monkeypatch):
    """The draft's death changes no token and the draft comes back; the target's ends every request with an error."""
    monkeypatch.setattr(link, "RESTART_S", 0.05)
    with LocalPipeline(config_of(checkpoints, worker="process", max_sessions=2)) as pipeline:
        expected = run(pipeline, prompt(1, 30), sampled(300), Mode.PLAIN)
        assert run(pipeline, prompt(1, 30), sampled(300), Mode.SEQUENTIAL).token_ids == expected.token_ids

        generation = pipeline.submit(prompt(1, 30), sampled(300))
        for _ in range(4):
            next(generation)
        os.kill(pipeline.draft.worker.pid, signal.SIGKILL)
        assert generation.result.token_ids == expected.token_ids

        wait_until(lambda: pipeline.draft.up and pipeline.num_draft_restarts == 1)
        result = run(pipeline, prompt(1, 30), sampled(300), Mode.SEQUENTIAL)
        assert result.token_ids == expected.token_ids
        assert result.speculation.accepted > 0

        generations = [pipeline.submit(prompt(i, 9), sampled(1900)) for i in range(4)]
        next(generations[0])
        os.kill(pipeline.target.worker.pid, signal.SIGKILL)
        for generation in generations:
            with pytest.raises(EngineError, match="target engine failed: its process ended"):
                _ = generation.result
        with pytest.raises(EngineError, match="its process ended"):
            list(generations[0])
        with pytest.raises(EngineError):
            pipeline.submit(prompt(1, 9))
