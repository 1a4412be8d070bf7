"""Routers are killed under streams of every kind: the clients continue them at the next router, and nobody notices.

Real processes, SIGKILL, real connections; what the streams must be is what plain decoding in one process gives.
"""

import asyncio
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
from tests.service.support import replicas, routed, tiny_pair
from tests.support.door import opened
from tests.support.processes import context

from paceline.client import AsyncClient, Client
from paceline.cluster.ports import free_ports
from paceline.config import apply_worker_environment
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams

PROMPT = "the quick brown fox "
NUM_TOKENS = 300
KILLED_AFTER = (8, 24)
"""Tokens of every stream that have come when a router is killed: one of nine in a round still runs then."""
_LONG = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
OPTIONS = {
    "greedy": (SamplingParams(**_LONG, seed=1), Mode.OVERLAPPED, ()),
    "sampled": (SamplingParams(**_LONG, seed=2, temperature=1.0), Mode.OVERLAPPED, ()),
    "penalties": (
        SamplingParams(
            **_LONG, seed=3, temperature=1.0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4
        ),
        Mode.SEQUENTIAL,
        (),
    ),
    "minimum": (
        SamplingParams(
            max_tokens=NUM_TOKENS, min_tokens=240, seed=4, temperature=1.0, stop_token_ids=tuple(range(20, 90))
        ),
        Mode.OVERLAPPED,
        (),
    ),
    "stop string": (SamplingParams(**_LONG, seed=5, temperature=1.0), Mode.PLAIN, None),
}
"""Sampling, mode and stop strings; None: one that comes late in the text."""


def _router_main(config, members, port, pipe):
    apply_worker_environment()
    pools = [[SimpleNamespace(member=member) for member in kind] for kind in members]

    async def main():
        async with routed(config, *pools) as (router, *_), opened(router, port=port):
            pipe.send(port)
            await asyncio.to_thread(multiprocessing.parent_process().join)

    asyncio.run(main())


class Routers:
    """Router processes of the same replicas, behind one address; a context manager."""

    def __init__(self, config, engines, count):
        members = [[replica.member for replica in kind] for kind in engines]
        self._pipes, self.processes, ports = [], [], free_ports(count)
        self.address = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        for port in ports:
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_router_main, args=(config, members, port, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self.processes.append(process)

    def __enter__(self):
        for pipe in self._pipes:
            assert pipe.poll(300), "a router did not start"
        return self

    def kill_first(self):
        process = self.processes.pop(0)
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def __exit__(self, *_):
        while self.processes:
            self.kill_first()


@pytest.fixture(scope="module")
def unbroken(checkpoints):
    """The results of plain decoding in one process, and the requests: stop strings are chosen from the texts."""
    config = tiny_pair(checkpoints).model_copy(update={"draft": None})
    plain = SpeculationParams(mode=Mode.PLAIN)
    results, requests = {}, {}
    with LocalPipeline(config) as pipeline:
        for name, (sampling, mode, stop) in OPTIONS.items():
            if stop is None:
                text = pipeline.generate(PROMPT, sampling, plain).result.text
                stop = (
                    next(
                        text[i : i + 4] for i in range(2 * len(text) // 3, len(text)) if text.find(text[i : i + 4]) == i
                    ),
                )
            requests[name] = (sampling, SpeculationParams(mode=mode), stop)
            results[name] = pipeline.generate(PROMPT, sampling, plain, stop).result
    return requests, results


def same(name, result, expected):
    """Asserts that a stream is the unbroken one."""
    assert result.token_ids == expected.token_ids, name
    assert result.text == expected.text, name
    assert result.logprobs == pytest.approx(expected.logprobs, abs=1e-4), name
    assert (result.finish_reason, result.matched_stop) == (expected.finish_reason, expected.matched_stop), name
    assert result.usage.completion_tokens == len(result.token_ids), name
    assert result.usage.prompt_tokens == expected.usage.prompt_tokens, name


@pytest.mark.slow
async def test_killed_routers_break_no_stream_of_either_client(checkpoints, unbroken):
    requests, expected = unbroken
    config = tiny_pair(checkpoints, max_sessions=16)
    with replicas(config, target_pause_s=0.02) as engines, Routers(config, engines, 3) as routers:
        counts, kills = {}, iter(KILLED_AFTER)
        due = next(kills)

        def came(name, chunk):
            nonlocal due
            counts[name] = counts.get(name, 0) + len(chunk.token_ids)
            if due is not None and len(counts) == 2 * len(requests) and min(counts.values()) >= due:
                routers.kill_first()
                due = next(kills, None)

        async def awaited(client, name):
            sampling, speculation, stop = requests[name]
            stream = client.generate(PROMPT, sampling, speculation, stop=stop, logprobs=True, timeout_s=200)
            async for chunk in stream:
                came((name, "async"), chunk)
            return name, stream.num_resumes, await stream.result

        def blocking(client, name, loop):
            sampling, speculation, stop = requests[name]
            stream = client.generate(PROMPT, sampling, speculation, stop=stop, logprobs=True, timeout_s=200)
            for chunk in stream:
                loop.call_soon_threadsafe(came, (name, "blocking"), chunk)
            return name, stream.num_resumes, stream.result

        loop = asyncio.get_running_loop()
        with Client(routers.address) as one:
            async with AsyncClient(routers.address) as other:
                streams = [awaited(other, name) for name in requests]
                streams += [asyncio.to_thread(blocking, one, name, loop) for name in requests]
                found = await asyncio.gather(*streams)
        for name, num_resumes, result in found:
            same(name, result, expected[name])
            assert num_resumes >= 1, name
        assert max(num_resumes for _, num_resumes, _ in found) >= 2
