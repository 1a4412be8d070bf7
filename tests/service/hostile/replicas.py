"""Replicas in this process that hostile peers meet, and what has to hold for them afterwards."""

import contextlib
import math
from dataclasses import dataclass

from tests.service.support import _Slowed, until

from paceline.router.pool import Member
from paceline.runtime.host import EngineHost
from paceline.runtime.server import EngineServer, engine_server
from paceline.types import SamplingParams

STEP_S = 0.01
PROMPT = "abcdefgh"
VICTIM = SamplingParams(max_tokens=80, temperature=1.0, seed=5, ignore_eos=True)
NAN, INF = math.nan, math.inf


@dataclass
class Served:
    """A started replica of this process."""

    server: EngineServer

    @property
    def host(self) -> EngineHost:
        return self.server.host

    @property
    def member(self) -> Member:
        return Member(self.host.kind, self.server.address)

    def count(self, name):
        return self.host.status().counters[name]


async def served(config, kind, pause_s=STEP_S, **options) -> Served:
    setup = config.target_setup() if kind == "target" else config.draft_setup()
    server = engine_server(setup, replica_id=kind, **options)
    build = server.host.factory
    server.host.factory = lambda emit: _Slowed(build(emit), pause_s)
    await server.start()
    return Served(server)


@contextlib.asynccontextmanager
async def both(config, **options):
    """A target and a draft."""
    started = []
    try:
        for kind, pause_s in (("target", STEP_S), ("draft", 0.0)):
            started.append(await served(config, kind, pause_s, **options))
        yield started
    finally:
        for one in started:
            await one.server.stop()


async def assert_free(*all_served):
    for one in all_served:
        await until(
            lambda: not one.host.num_sessions and not one.host.status().num_sessions,  # noqa: B023
            what=f"{one.host.kind} holds no session",
        )
        await until(lambda: not one.host.status().kv_pages_used, what="no page is used")  # noqa: B023
