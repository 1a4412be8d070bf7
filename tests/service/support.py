"""Real replica processes and a router without Ray: what the tests of the service kill, pause and restart.

Targets are slowed down by a pause in each step, so that streams last long enough to be disturbed.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, field

from tests.support.loops import bounded
from tests.support.processes import context

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config import DraftModel, LocalConfig, RouterConfig, TargetModel, apply_worker_environment
from paceline.metrics.registry import Registry
from paceline.metrics.router import RouterMetrics
from paceline.router.admission import TargetInfo
from paceline.router.pool import Member, StaticPool
from paceline.router.router import Router
from paceline.types import Request, Result, SamplingParams, SpeculationParams

START_TIMEOUT_S = 300.0
EOS_IDS = (7,)


def tiny_pair(folder, **changes) -> LocalConfig:
    """The pair of the ``checkpoints`` fixture, in float32 and as it is."""
    exact = {"dtype": "float32", "compile": False, "device": "cpu"}
    target = {"max_model_len": 2048, "max_sessions": 8, "batch_invariant": "off", **exact, **changes}
    return LocalConfig(
        # what one test makes of its draft must not change the next
        target=TargetModel(path=str(folder / "target"), adaptive=False, **target),
        draft=DraftModel(path=str(folder / "draft"), tree_step_tokens=8, **exact),
        worker="thread",
        pin_cores=False,
    )


_broken = threading.Event()


class _Slowed:
    """An engine whose steps take at least ``pause_s``; like a larger model it sleeps without the interpreter lock."""

    def __init__(self, engine, pause_s):
        self._engine, self._pause_s = engine, pause_s

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def step(self):
        if _broken.is_set():
            raise RuntimeError("broken by a test")
        worked = self._engine.step()
        if worked and self._pause_s:
            time.sleep(self._pause_s)
        return worked


def _main(kind, config, replica_id, pause_s, pipe):
    apply_worker_environment()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, lambda *_: _broken.set())

    async def run():
        from paceline.runtime.server import engine_server

        setup = config.target_setup() if kind == "target" else config.draft_setup()
        server = engine_server(setup, replica_id=replica_id)
        build = server.host.factory
        server.host.factory = lambda emit: _Slowed(build(emit), pause_s)
        await server.start()
        pipe.send(server.address)
        await asyncio.to_thread(multiprocessing.parent_process().join)

    asyncio.run(run())


@dataclass
class Replica:
    """A replica in a process of its own."""

    kind: str
    config: LocalConfig
    replica_id: str
    pause_s: float = 0.0
    address: str = ""
    process: multiprocessing.Process = field(default=None, repr=False)

    def spawn(self):
        self._pipe, child = context.Pipe(duplex=False)
        args = (self.kind, self.config, self.replica_id, self.pause_s, child)
        self.process = context.Process(target=_main, args=args, daemon=True)
        self.process.start()
        child.close()
        return self

    def wait(self):
        assert self._pipe.poll(START_TIMEOUT_S), f"{self.replica_id} did not start"
        self.address = self._pipe.recv()
        return self

    @property
    def member(self) -> Member:
        return Member(self.replica_id, self.address)

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.signal(signal.SIGKILL)
        self.process.join()

    def stop(self):
        if self.process is not None and self.process.is_alive():
            self.kill()


@contextlib.contextmanager
def replicas(config, targets=1, drafts=1, target_pause_s=0.0, draft_pause_s=0.0):
    """Started targets and drafts; ended on exit."""
    kinds = [("target", target_pause_s)] * targets + [("draft", draft_pause_s)] * drafts
    started = [Replica(kind, config, f"{kind}-{i}", pause_s).spawn() for i, (kind, pause_s) in enumerate(kinds)]
    try:
        for replica in started:
            replica.wait()
        yield started[:targets], started[targets:]
    finally:
        for replica in started:
            replica.stop()


@contextlib.asynccontextmanager
async def routed(config, targets, drafts, token="", **settings):
    """A started router over pools with these replicas, which ask for ``token``; yields it with both pools."""
    pools = (
        StaticPool("target", [r.member for r in targets]),
        StaticPool("draft", [r.member for r in drafts]),
    )
    info = TargetInfo(load_tokenizer(config.target.path), config.target.max_model_len, EOS_IDS)
    metrics = RouterMetrics(Registry("router"), "tiny")
    router = Router(info, *pools, RouterConfig(**{"chunk_window_s": 0.0, **settings}), metrics=metrics, token=token)
    await router.start()
    try:
        yield router, *pools
    finally:
        await router.stop()


async def until(condition, timeout_s=180.0, what="the condition"):
    """Waits for a condition of the event loop's own state."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


_num_requests = 0


async def collect(router, prompt, *, sampling=None, speculation=None, stop=(), on_chunk=None):
    """All chunks and the result of one request. If ``on_chunk`` returns True, the stream is left: no result."""
    global _num_requests
    _num_requests += 1
    request = Request(
        f"r{_num_requests}", prompt, sampling or SamplingParams(), speculation or SpeculationParams(), stop
    )
    chunks, result = [], None
    async with contextlib.aclosing(router.generate(request)) as stream:
        async for item in stream:
            if isinstance(item, Result):
                result = item
            else:
                chunks.append(item)
                if on_chunk is not None and on_chunk(chunks) is True:
                    return chunks, None
    assert result is not None
    return chunks, result


_runner = asyncio.Runner()  # one loop for all tests: grpc.aio complains of each that has been closed


def run(coroutine):
    """Its result, in that loop."""
    return _runner.run(bounded(coroutine))
