"""Sessions of a draining target take their KV pages along, between real processes: the same tokens, once each."""

import asyncio
import signal

import pytest
from tests.service.support import collect, replicas, routed, tiny_pair, until
from tests.support.rings import slow

from paceline.types import PAGE_SIZE, SamplingParams

STEP_S = 0.02
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4
"""Keys and values of 2 layers with 2 heads of 16 in float32."""
PROMPTS = ["".join(chr(97 + (i * i + n) % 26) for i in range(300)) for n in range(4)]
SAMPLING = SamplingParams(max_tokens=160, temperature=1.0, seed=3, ignore_eos=True)


def counted(router, name):
    """A counter of both targets."""
    return sum(status.counters.get(name, 0) for status in router.statuses()["target"])


async def drained(router, pool, targets, plain, on_drain=lambda old: None):
    """Drains the target that serves most once all streams have begun; asserts their tokens."""
    await until(lambda: len(router.targets.open_links()) == 2)
    begun, done = set(), []

    def on_chunk(prompt):
        def note(chunks):
            begun.update({prompt} if len(chunks) > 8 else ())
            if len(begun) == len(PROMPTS) and not done:
                links = router.targets.links
                old = max(targets, key=lambda t: len(links[t.replica_id].sessions))
                done.append(len(links[old.replica_id].sessions))
                on_drain(old)
                pool.set_members([t.member for t in targets if t is not old])

        return note

    results = await asyncio.gather(*(collect(router, p, sampling=SAMPLING, on_chunk=on_chunk(p)) for p in PROMPTS))
    for prompt, (chunks, result) in zip(PROMPTS, results, strict=True):
        assert result.token_ids == plain(prompt, SAMPLING)
        assert [t for chunk in chunks for t in chunk.token_ids] == list(result.token_ids)
    return done[0]


@pytest.mark.parametrize(
    ("tested", "timeout_s"), [("auto", 30.0), *slow([("auto", 0.0), ("off", 30.0)])], ids=lambda value: str(value)
)
async def test_sessions_of_a_draining_target_bring_their_pages(checkpoints, plain, tested, timeout_s):
    """Unless they are not to, or the self-test is off."""
    config = tiny_pair(checkpoints, batch_invariant=tested)
    with replicas(config, targets=2, target_pause_s=STEP_S) as (targets, drafts):
        async with routed(config, targets, drafts, page_move_timeout_s=timeout_s) as (router, pool, _):
            num_moved = await drained(router, pool, targets, plain)
            assert num_moved >= 1
            pages, num_bytes = counted(router, "pages_moved"), counted(router, "page_bytes_moved")
            if tested == "off" or not timeout_s:
                assert (pages, num_bytes) == (0, 0)
            else:
                assert pages >= 2 * num_moved
                assert num_bytes == pages * PAGE_SIZE * TOKEN_BYTES
            assert counted(router, "moves_failed") == 0
            assert [len(link.sessions) for link in router.targets.links.values()] == [0]


@pytest.mark.parametrize("number", [signal.SIGKILL, *slow([signal.SIGSTOP])])
async def test_a_target_that_is_lost_while_it_drains_costs_no_token(checkpoints, plain, number):
    config = tiny_pair(checkpoints, batch_invariant="auto")
    with replicas(config, targets=2, target_pause_s=STEP_S) as (targets, drafts):
        settings = {"target_timeout_s": 1.0, "page_move_timeout_s": 2.0}
        async with routed(config, targets, drafts, **settings) as (router, pool, _):
            await drained(router, pool, targets, plain, on_drain=lambda old: old.signal(number))
            await until(lambda: counted(router, "moves_failed") >= 1)
