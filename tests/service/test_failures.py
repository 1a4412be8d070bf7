"""What a client sees when replicas are killed, hang, are slow, come back or drain: the same tokens, once each.

Real processes, real signals, real gRPC streams; the coupled rule's tokens are those of plain decoding in one process.
"""

import asyncio
import signal

import pytest
from tests.router.test_link import delay
from tests.service.support import Replica, collect, replicas, routed, tiny_pair, until
from tests.support.rings import nightly, slow

from paceline.errors import DeadlineExceededError, EngineError
from paceline.types import Cause, Mode, SamplingParams, SpeculationParams

STEP_S = 0.02
DRAFT_TIMEOUT_S = 0.6
NUM_TOKENS = 160
MORE = 20
"""Rounds of a stream after the one that was waited for."""
SAMPLINGS = [
    SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=3, ignore_eos=True),
]
ONE = SAMPLINGS[1]
PROMPT = "abcdefgh"


def causes(chunks):
    return [chunk.round.cause for chunk in chunks if chunk.round is not None]


def same_as(plain, sampling, chunks):
    """True if a stream that may have been left has the tokens of plain decoding so far."""
    tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
    return tokens == plain(PROMPT, sampling.model_copy(update={"max_tokens": len(tokens)}))


def at(count, action):
    """Calls ``action`` once ``count`` chunks have come."""
    return lambda chunks: action() if len(chunks) == count else None


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [
        (Mode.OVERLAPPED, SAMPLINGS[1]),
        *slow([(Mode.OVERLAPPED, SAMPLINGS[0]), (Mode.SEQUENTIAL, SAMPLINGS[1]), (Mode.PLAIN, SAMPLINGS[0])]),
        *nightly([(Mode.SEQUENTIAL, SAMPLINGS[0]), (Mode.PLAIN, SAMPLINGS[1])]),
    ],
)
async def test_the_service_gives_the_tokens_of_plain_decoding_in_one_process(checkpoints, plain, sampling, mode):
    config = tiny_pair(checkpoints)
    with replicas(config, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts) as (router, _, _):
            chunks, result = await collect(router, PROMPT, sampling=sampling, speculation=SpeculationParams(mode=mode))
            assert result.token_ids == plain(PROMPT, sampling)
            assert [t for chunk in chunks for t in chunk.token_ids] == list(result.token_ids)
            assert "".join(chunk.text for chunk in chunks) == result.text
            assert (result.speculation.accepted > 0) == (mode is not Mode.PLAIN)


@pytest.mark.parametrize(
    ("number", "sampling"),
    [
        pytest.param(signal.SIGKILL, SAMPLINGS[1], id="killed-sampled", marks=pytest.mark.nightly),
        pytest.param(signal.SIGKILL, SAMPLINGS[0], id="killed-greedy", marks=pytest.mark.nightly),
        pytest.param(signal.SIGSTOP, SAMPLINGS[0], id="hung-greedy", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, SAMPLINGS[1], id="hung-sampled", marks=pytest.mark.nightly),
    ],
)
async def test_a_lost_draft_costs_neither_a_token_nor_a_pause_and_its_successor_speculates_again(
    checkpoints, plain, sampling, number
):
    """A stream that paused would never come to the chunk with which the successor is let in; it is left after that."""
    config = tiny_pair(checkpoints)
    with replicas(config, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts, draft_timeout_s=DRAFT_TIMEOUT_S) as (router, _, pool):
            back = Replica("draft", config, "draft-new")
            lost_at, back_at = [], []

            def on_chunk(chunks):
                if not lost_at and len(chunks) >= 8 and Cause.HIT in causes(chunks):
                    drafts[0].signal(number)
                    lost_at.append(len(chunks))
                    back.spawn()
                if lost_at and not back_at and back._pipe.poll():
                    back.wait()
                    pool.set_members([back.member])
                    back_at.append(len(chunks))
                return bool(back_at) and Cause.HIT in causes(chunks[back_at[0] :])[:-MORE]

            try:
                await collect(router, PROMPT, sampling=SamplingParams(max_tokens=4))  # both are warm
                endless = sampling.model_copy(update={"max_tokens": 1500})
                chunks, _ = await collect(router, PROMPT, sampling=endless, on_chunk=on_chunk)
            finally:
                drafts[0].stop()
                back.stop()
            assert same_as(plain, endless, chunks)
            assert lost_at, "the draft was of no use from the beginning"
            assert {Cause.DRAFT_DOWN, Cause.DISABLED, Cause.LATE} & set(causes(chunks))
            assert back_at, "the stream was too short to see the draft come back"
            assert Cause.HIT in causes(chunks[back_at[0] :])


@pytest.mark.slow
async def test_a_slow_draft_does_not_hold_the_stream_up(checkpoints, plain):
    """A stream that waited for a step of the draft in each round would take far longer than any test may."""
    config = tiny_pair(checkpoints)
    with replicas(config, target_pause_s=STEP_S, draft_pause_s=2.0) as (targets, drafts):
        async with routed(config, targets, drafts) as (router, _, _):
            await collect(router, PROMPT, sampling=SamplingParams(max_tokens=4))
            _, result = await collect(router, PROMPT, sampling=ONE)
            assert result.token_ids == plain(PROMPT, ONE)


@pytest.mark.slow
async def test_a_draft_pool_scaled_to_zero_and_back(checkpoints, plain):
    config = tiny_pair(checkpoints)
    with replicas(config, drafts=2, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts[:1]) as (router, _, pool):
            endless = ONE.model_copy(update={"max_tokens": 1500})
            marks = [0]  # how many chunks had come when it drained, died and had a successor

            def on_chunk(chunks):
                since = causes(chunks[marks[-1] :])
                if len(marks) == 1 and Cause.HIT in since:
                    pool.set_members([])  # it drains: what it serves goes on
                elif len(marks) == 2 and Cause.HIT in since[2:]:
                    drafts[0].kill()
                elif len(marks) == 3 and len(since) == 20:
                    pool.set_members([drafts[1].member])
                else:
                    return len(marks) == 4 and Cause.HIT in since[:-MORE]
                marks.append(len(chunks))
                return False

            chunks, _ = await collect(router, PROMPT, sampling=endless, on_chunk=on_chunk)
            assert same_as(plain, endless, chunks)
            assert len(marks) == 4, f"no hit after {marks}"
            assert {Cause.DRAFT_DOWN, Cause.DISABLED} & set(causes(chunks[marks[2] : marks[3]]))
            assert Cause.HIT in causes(chunks[marks[3] :])


@pytest.mark.parametrize(
    ("loss", "sampling"),
    [
        ("killed", SAMPLINGS[1]),
        *slow([("hung", SAMPLINGS[0]), ("engine", SAMPLINGS[1])]),
        *nightly([("killed", SAMPLINGS[0]), ("hung", SAMPLINGS[1]), ("engine", SAMPLINGS[0])]),
    ],
)
async def test_a_lost_target_costs_no_token(checkpoints, plain, sampling, loss):
    number = {"killed": signal.SIGKILL, "hung": signal.SIGSTOP, "engine": signal.SIGUSR1}[loss]
    config = tiny_pair(checkpoints)
    with replicas(config, targets=2, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts, target_timeout_s=1.0) as (router, _, _):
            await until(lambda: len(router.targets.open_links()) == 2)

            def hit():
                busiest = max(router.targets.links.values(), key=lambda link: len(link.sessions))
                next(t for t in targets if t.replica_id == busiest.member.replica_id).signal(number)

            prompts = [PROMPT, "x", "xy", "xyz"]
            results = await asyncio.gather(
                collect(router, PROMPT, sampling=sampling, on_chunk=at(8, hit)),
                *(collect(router, prompt, sampling=sampling) for prompt in prompts[1:]),
            )
            for prompt, (chunks, result) in zip(prompts, results, strict=True):
                assert result.token_ids == plain(prompt, sampling)
                assert [t for chunk in chunks for t in chunk.token_ids] == list(result.token_ids)
            assert router.active == {}
            await until(lambda: len(router.targets.open_links()) == 1, what="one of two targets is up")


@pytest.mark.slow
async def test_without_any_target_left_a_request_ends_as_unavailable_and_says_after_what_time(checkpoints):
    config = tiny_pair(checkpoints)
    with replicas(config, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts, recovery_timeout_s=1.0) as (router, _, _):
            await until(lambda: router.ready)
            with pytest.raises(EngineError, match="no target replica was up for 1 s"):
                await collect(router, PROMPT, sampling=ONE, on_chunk=at(5, targets[0].kill))
            with pytest.raises(EngineError, match="no target replica was up for 1 s"):
                await collect(router, PROMPT, sampling=ONE)
            assert router.active == {}


@pytest.mark.slow
async def test_a_request_that_takes_too_long_ends_and_frees_what_it_held(checkpoints):
    config = tiny_pair(checkpoints)
    with replicas(config, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts, request_timeout_s=0.5) as (router, _, _):
            with pytest.raises(DeadlineExceededError, match=r"longer than 0\.5 s"):
                await collect(router, PROMPT, sampling=ONE.model_copy(update={"max_tokens": 1500}))
            assert router.active == {}
            await until(lambda: open_sessions(router) == [0, 0])


def open_sessions(router):
    """The numbers of sessions that the replicas last said they hold."""
    return [status.num_sessions for statuses in router.statuses().values() for status in statuses]


@pytest.mark.slow
async def test_a_router_that_goes_away_leaves_nothing_behind(checkpoints):
    config = tiny_pair(checkpoints)
    with replicas(config, target_pause_s=STEP_S) as (targets, drafts):
        two = (routed(config, targets, drafts), routed(config, targets, drafts))
        async with two[0] as (witness, _, _), two[1] as (router, _, _):
            endless = ONE.model_copy(update={"max_tokens": 1500})
            tasks = [asyncio.create_task(collect(router, PROMPT, sampling=endless)) for _ in range(4)]
            await until(lambda: max(open_sessions(witness), default=0) == 4)
            for link in [*router.targets.links.values(), *router.drafts.links.values()]:
                link.stop()  # the streams break; nobody closes a session
            await until(lambda: open_sessions(witness) == [0, 0])
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["target", "draft"])
async def test_the_sessions_of_a_draining_replica_move_and_none_is_cut(checkpoints, plain, kind):
    config = tiny_pair(checkpoints)
    with replicas(config, targets=2, drafts=2, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts) as (router, target_pool, draft_pool):
            pool, group = (target_pool, targets) if kind == "target" else (draft_pool, drafts)
            side = router.targets if kind == "target" else router.drafts
            await until(lambda: len(side.open_links()) == 2)

            def drain():
                pool.set_members([group[1].member])
                assert not any(rid == group[0].replica_id and link.sessions for rid, link in side.links.items())

            long = ONE.model_copy(update={"max_tokens": 400})
            tasks = [asyncio.create_task(collect(router, prompt, sampling=long)) for prompt in ("a", "ab", "abc")]
            _, result = await collect(router, PROMPT, sampling=long, on_chunk=at(8, drain))
            assert result.token_ids == plain(PROMPT, long)
            for prompt, task in zip(("a", "ab", "abc"), tasks, strict=True):
                assert (await task)[1].token_ids == plain(prompt, long)
            assert list(side.links) == [group[1].replica_id]


@pytest.mark.slow
async def test_a_draining_target_without_another_finishes_what_it_serves(checkpoints, plain):
    config = tiny_pair(checkpoints)
    with replicas(config, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts, recovery_timeout_s=1.0) as (router, pool, _):
            await until(lambda: router.ready)
            _, result = await collect(router, PROMPT, sampling=ONE, on_chunk=at(8, lambda: pool.set_members([])))
            assert result.token_ids == plain(PROMPT, ONE)
            with pytest.raises(EngineError, match="no target replica was up"):
                await collect(router, PROMPT, sampling=ONE)


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
async def test_a_slow_link_to_the_draft_is_measured_and_changes_no_token(checkpoints, plain, delay_s):
    config = tiny_pair(checkpoints)
    with replicas(config, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts) as (router, _, _):
            measured = []
            (link,) = router.drafts.links.values()
            link._on_latency = measured.append
            delay(link, delay_s)
            _, result = await collect(router, PROMPT, sampling=ONE)
            assert result.token_ids == plain(PROMPT, ONE)
            assert result.speculation.accepted > 0
            await until(lambda: measured)
            assert 2 * delay_s < min(measured) < 60.0
