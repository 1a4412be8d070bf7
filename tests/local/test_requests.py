"""What its router does for the one-process pipeline: streams that resume, deadlines, the end of what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.support.fake_service import wait_until
from tests.support.fakes import Scripted
from tests.support.letters import Letters
from tests.support.mutants import Mutant, mutant

from paceline.checkpoint.files import Checkpoint
from paceline.config import LocalConfig, RouterConfig, TargetModel
from paceline.errors import DeadlineExceededError, EngineError
from paceline.local import LocalPipeline, link
from paceline.local.link import DraftWorkerLink
from paceline.messages import OpenSession, Outcome
from paceline.router.relay import Relay
from paceline.router.service import GenerationService
from paceline.router.thread import RouterThread
from paceline.types import Cause, Chunk, FinishReason, Request, Result, Round, SamplingParams

TEXT = b"to return"


def spell(message: Any) -> Sequence[Outcome]:
    """The letters of TEXT that the context lacks, one in each round."""
    if not isinstance(message, OpenSession):
        return ()
    start, end = message.num_prompt_tokens, message.num_prompt_tokens + message.sampling.max_tokens
    return [
        Outcome(
            message.session_id,
            message.epoch,
            at,
            (TEXT[at - start],),
            (0.0,),
            Round(0, 0, Cause.DISABLED),
            FinishReason.LENGTH if at == end - 1 else None,
        )
        for at in range(len(message.token_ids), end)
    ]


def silent(message: Any) -> Sequence[Outcome]:
    return ()


def routers() -> set[threading.Thread]:
    """The threads of pipelines that have not been stopped."""
    return {one for one in threading.enumerate() if one.name in {"paceline-router", "paceline-restart"}}


@contextlib.contextmanager
def pipeline_of(answer: Callable[[Any], Sequence[Any]], draft: Any = None, **router: Any) -> Iterator[LocalPipeline]:
    """A pipeline whose target answers so, with one place."""
    pipeline = LocalPipeline(
        LocalConfig(target=TargetModel(path="scripted", max_sessions=1), worker="thread", pin_cores=False),
        target_factory=lambda emit: Scripted(emit, answer),
        draft_factory=draft,
        tokenizer=Letters(),  # type: ignore[arg-type]
        checkpoint=Checkpoint("scripted", 64, (), 128),
        router=RouterConfig(chunk_window_s=0, **router),
    )
    before = routers()
    with pipeline:
        yield pipeline
    assert routers() <= before


def request_of(name: str = "r", generated: bytes = b"") -> Request:
    sampling = SamplingParams(max_tokens=len(TEXT), seed=1)
    return Request(name, "abc", sampling, generated_token_ids=tuple(generated))


async def stream(pipeline: LocalPipeline, request: Request) -> tuple[bytes, Result]:
    """The tokens of the chunks, and the result."""
    token_ids: list[int] = []
    async with contextlib.aclosing(GenerationService(pipeline.router).run(request)) as items:
        async for item in items:
            if isinstance(item, Chunk):
                token_ids += item.token_ids
            else:
                return bytes(token_ids), item
    raise AssertionError("a stream without a result")


@pytest.mark.parametrize("num_generated", [0, 3, len(TEXT) - 1])
def test_a_stream_that_broke_goes_on_where_it_was(num_generated: int) -> None:
    with pipeline_of(spell) as pipeline:
        streamed, result = asyncio.run(stream(pipeline, request_of(generated=TEXT[:num_generated])))
    assert streamed == TEXT[num_generated:]
    assert (result.text, result.usage.completion_tokens) == (TEXT[num_generated:].decode(), len(TEXT))


def test_a_request_that_takes_too_long_ends_whether_it_has_begun_or_waits() -> None:
    async def both(pipeline: LocalPipeline) -> list[Any]:
        asked = [stream(pipeline, request_of(name)) for name in "ab"]
        return await asyncio.gather(*asked, return_exceptions=True)

    with pipeline_of(silent, request_timeout_s=0.05) as pipeline:
        errors = asyncio.run(both(pipeline))
        assert [type(error) for error in errors] == [DeadlineExceededError] * 2
        wait_until(lambda: not pipeline.router.active)


def test_a_caller_who_leaves_frees_the_place_of_the_next() -> None:
    opened: list[Any] = []

    def second(message: Any) -> Sequence[Outcome]:
        opened.extend([message] if isinstance(message, OpenSession) else [])
        return spell(message) if len(opened) == 2 else ()

    async def leaves(pipeline: LocalPipeline) -> bytes:
        first = asyncio.create_task(stream(pipeline, request_of("a")))
        while not pipeline.router.num_running:
            await asyncio.sleep(0.001)
        next_one = asyncio.create_task(stream(pipeline, request_of("b")))
        while not pipeline.router.num_queued:
            await asyncio.sleep(0.001)
        first.cancel()
        return (await next_one)[0]

    with pipeline_of(second) as pipeline:
        assert asyncio.run(leaves(pipeline)) == TEXT
        assert not pipeline.router.active


def test_a_callback_that_would_wait_for_itself_is_told_so() -> None:
    found: list[BaseException] = []

    def on_change() -> None:
        try:
            pipeline.submit("abc")
        except RuntimeError as error:
            found.append(error)

    with pipeline_of(spell) as pipeline:
        assert pipeline.submit("abc", SamplingParams(max_tokens=2), on_change=on_change).result.text == "to"
        assert pipeline.server_info().sessions_running == 0
    assert "a callback of the pipeline submits a request" in str(found[0])


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_an_error_of_a_callback_ends_no_request(error: type[BaseException]) -> None:
    """Neither its own nor one that waits, whose turn comes in another one's end."""

    def fails() -> None:
        raise error

    opened: list[Any] = []

    def all_but_the_first(message: Any) -> Sequence[Outcome]:
        opened.extend([message] if isinstance(message, OpenSession) else [])
        return () if len(opened) == 1 else spell(message)

    sampling = SamplingParams(max_tokens=2)
    with pipeline_of(all_but_the_first) as pipeline:
        first, second = (pipeline.submit("abc", sampling, on_change=fails, on_open=fails) for _ in range(2))
        first.cancel()
        assert first.result.finish_reason is FinishReason.ABORT
        assert second.result.text == "to"
        assert pipeline.ready


def test_a_callback_that_would_wait_for_its_request_is_told_so() -> None:
    found: list[Any] = []

    def on_change() -> None:
        assert there.wait(60)
        for wait in (lambda: generation.result.text, lambda: list(generation)):
            try:
                found.append(wait())
            except RuntimeError as error:
                found.append(str(error))

    there = threading.Event()
    with pipeline_of(spell) as pipeline:
        generation = pipeline.submit("abc", SamplingParams(max_tokens=1), on_change=on_change)
        there.set()
        wait_until(lambda: len(found) == 4)
    refused = "a callback of the pipeline waits for a request, which waits for it: use a thread"
    assert found == [refused, refused, "t", []]


def test_a_pipeline_that_runs_is_not_started_again() -> None:
    with pipeline_of(spell) as pipeline:
        with pytest.raises(RuntimeError, match="started already"):
            pipeline.start()
        assert pipeline.submit("abc", SamplingParams(max_tokens=2)).result.text == "to"


def stopped_while_it_starts() -> None:
    """The engine is built after the stop, which does not wait for it."""
    building, go = threading.Event(), threading.Event()

    def factory(emit: Any) -> Scripted:
        building.set()
        go.wait(60)
        return Scripted(emit, spell)

    pipeline = LocalPipeline(
        LocalConfig(target=TargetModel(path="scripted"), worker="thread", pin_cores=False),
        target_factory=factory,
        tokenizer=Letters(),  # type: ignore[arg-type]
        checkpoint=Checkpoint("scripted", 64, (), 128),
    )
    before = routers()
    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(pipeline.start)
        assert building.wait(60)
        pipeline.stop(timeout_s=0)
        go.set()
        with pytest.raises(EngineError, match="stopped"):
            started.result()
    assert routers() <= before
    with pytest.raises(EngineError, match="stopped"):
        pipeline.submit("abc")
    assert pipeline.server_info().pools == {"target": ()}
    pipeline.stop()


def test_a_pipeline_may_be_stopped_while_it_starts() -> None:
    stopped_while_it_starts()


def refused_in_a_forked_process() -> None:
    """Of a fork it has the objects, but not the threads: the test ends by an alarm if a call waits."""
    with pipeline_of(spell) as pipeline:
        process = multiprocessing.get_context("fork").Process(target=asks_in_another_process, args=(pipeline,))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert pipeline.submit("abc", SamplingParams(max_tokens=2)).result.text == "to"


def asks_in_another_process(pipeline: LocalPipeline) -> None:
    signal.alarm(20)
    with pytest.raises(EngineError, match="no router runs in this process"):
        pipeline.submit("abc")


def test_a_request_of_a_forked_process_is_refused() -> None:
    refused_in_a_forked_process()


def test_what_is_asked_of_a_pipeline_that_does_not_run() -> None:
    with pipeline_of(spell) as pipeline:
        assert (pipeline.ready, pipeline.trouble) == (True, "")
    with pytest.raises(EngineError, match="stopped"):
        pipeline.submit("abc")
    with pytest.raises(EngineError, match="stopped"):
        asyncio.run(stream(pipeline, request_of()))
    with pytest.raises(EngineError, match="stopped"):
        pipeline.start()
    assert (pipeline.ready, pipeline.trouble) == (False, "the pipeline has been stopped")
    assert not pipeline.cancel_request("r")


def test_messages_that_cannot_be_used_end_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken by a test")

    monkeypatch.setattr(Relay, "on_target", broken)
    with pipeline_of(spell) as pipeline, pytest.raises(EngineError, match="RuntimeError: broken by a test"):
        _ = pipeline.submit("abc", SamplingParams(max_tokens=2)).result


def draft_dies_as_soon_as_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death is told before its start, three times: it is never up, and the fourth one stays."""
    monkeypatch.setattr(link, "RESTART_S", 0.001)
    seen: list[bool] = []
    with pipeline_of(spell, draft=lambda emit: Scripted(emit, silent)) as pipeline:
        draft = pipeline.draft
        assert draft is not None
        on_ready = draft.on_ready

        def dies(worker: Any) -> None:
            if len(seen) < 3:
                draft.on_death(worker, "died")
            on_ready(worker)
            seen.append(draft.up)

        monkeypatch.setattr(draft, "on_ready", dies)
        pipeline.router.post(draft.on_death, draft.worker, "died")
        wait_until(lambda: len(seen) == 4)
        assert seen == [False, False, False, True]
        assert draft.num_restarts == 4


def test_a_draft_that_dies_as_soon_as_it_is_back_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_dies_as_soon_as_it_is_back(monkeypatch)


@mutant(DraftWorkerLink, "on_ready")
def _the_dead_come_up(_: Any, draft: DraftWorkerLink, worker: Any) -> None:
    draft.go(up=True)


@mutant(RouterThread, "start_thread")
def _a_start_that_overlooks_the_stop(start: Any, router: RouterThread) -> None:
    start(router)
    router.closed = None


@pytest.mark.parametrize(
    ("change", "error", "check"),
    [
        (_the_dead_come_up, AssertionError, draft_dies_as_soon_as_it_is_back),
        (_a_start_that_overlooks_the_stop, pytest.fail.Exception, lambda _: stopped_while_it_starts()),
    ],
)
def test_a_mutant_is_noticed(change: Mutant, error: Any, check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    with pytest.raises(error):
        check(monkeypatch)
