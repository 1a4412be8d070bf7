"""What clients say and are told is in no log line and on no metrics page: not at DEBUG, not when a request fails."""

import asyncio
import contextlib
import logging
import re

import pytest
from tests.service.support import EOS_IDS, tiny_pair, until

from paceline import logs
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config import LogConfig, RouterConfig
from paceline.errors import PacelineError
from paceline.fleet.monitor import Monitor
from paceline.fleet.report import Reporter
from paceline.metrics.registry import Registry
from paceline.metrics.replica import ReplicaMetrics
from paceline.metrics.router import RouterMetrics
from paceline.router.admission import TargetInfo
from paceline.router.pool import Member, StaticPool
from paceline.router.router import Router
from paceline.router.service import GenerationService
from paceline.rpc.status import to_status
from paceline.runtime.server import engine_server
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import types_pb2

CANARY = "xylophonequagmirezephyr"
STOP = "wyvernjuxtapose"


class Everything(logging.Handler):
    """Keeps every record of every library as each of Paceline's formatters writes it."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [record.getMessage(), repr(record.args), repr(sorted(vars(record).items(), key=str))]


@pytest.fixture
def everything(capfd):
    root, own = logging.getLogger(), logging.getLogger("paceline")
    handlers, levels = root.handlers[:], (root.level, own.level)
    logs.configure_service(LogConfig(level="DEBUG"), replica_id="r")
    handler = Everything()
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def told(secret_ids, text):
    """Where a run of three of the ids, or the words themselves, are in a text."""
    runs = [secret_ids[i : i + 3] for i in range(len(secret_ids) - 2)]
    patterns = [r"\b" + r"\D{1,4}".join(map(str, ids)) + r"\b" for ids in runs] + [CANARY[:8], CANARY[-8:], STOP[:8]]
    return [match[0] for pattern in patterns for match in re.finditer(pattern, text)]


def test_the_search_finds_what_it_looks_for():
    assert told([4, 17, 9], "tokens (4, 17, 9)")
    assert told([4, 17, 9], "[4 17 9 3]")
    assert told([4, 17, 9], f"said {CANARY!r}")
    assert not told([4, 17, 9], "4 sessions, 17 tokens, 39 nodes")


@contextlib.asynccontextmanager
async def service(config):
    """Router and engines in this process; yields the service and a function that makes the metrics page."""
    servers = [
        engine_server(setup, replica_id=f"{kind}-0")
        for kind, setup in (("target", config.target_setup()), ("draft", config.draft_setup()))
    ]
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        pools = [
            StaticPool(kind, [Member(f"{kind}-0", server.address)])
            for kind, server in zip(("target", "draft"), servers, strict=True)
        ]
        info = TargetInfo(load_tokenizer(config.target.path), config.target.max_model_len, EOS_IDS)
        registry = Registry("router-0")
        router = Router(info, *pools, RouterConfig(), metrics=RouterMetrics(registry, "tiny"))
        await router.start()
        stack.push_async_callback(router.stop)
        monitor = Monitor()

        def page():
            reporter = Reporter("router-0", "router", registry)
            monitor.push(reporter.report(servers[0].host.status(), router.view()))
            for kind, server in zip(("target", "draft"), servers, strict=True):
                own = Registry(f"{kind}-0")
                status = server.host.status()
                ReplicaMetrics(own).update(status)
                monitor.push(Reporter(f"{kind}-0", kind, own).report(status))
            return monitor.exposition() + repr(monitor.server_info())

        yield GenerationService(router), page, info.tokenizer


async def test_neither_prompt_nor_output_is_in_logs_or_metrics(checkpoints, everything, capfd):
    secret: list[int] = []
    pages: list[str] = []

    async def ask(generation, message):
        found = []
        async with contextlib.aclosing(generation.generate(message)) as responses:
            async for response in responses:
                found += response.chunk.token_ids
        return found

    async with service(tiny_pair(checkpoints)) as (generation, page, tokenizer):
        await until(lambda: generation._router.ready)
        ids = list(tokenizer.encode(CANARY))
        secret.extend(ids)
        sampling = types_pb2.SamplingParams(max_tokens=40, ignore_eos=True, stop=[STOP], temperature=1.0, seed=5)
        asked = [pb.GenerateRequest(request_id="a", text=CANARY, sampling_params=sampling)]
        tokens = pb.TokenizedInput(input_ids=ids)
        for mode in ("plain", "sequential", "overlapped"):
            message = pb.GenerateRequest(tokenized=tokens, sampling_params=sampling, logprobs=True)
            message.speculation.mode = mode
            asked.append(message)
        for output in await asyncio.gather(*(ask(generation, message) for message in asked)):
            assert len(output) > 10
            secret.extend(output)
        refused = [
            pb.GenerateRequest(text=CANARY * 2000),
            pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[*ids, 10**6])),
            pb.GenerateRequest(text=CANARY, sampling_params=types_pb2.SamplingParams(temperature=-1, stop=[STOP])),
            pb.GenerateRequest(text=CANARY, sampling_params=types_pb2.SamplingParams(stop=["", STOP])),
        ]
        for message in refused:
            with pytest.raises(PacelineError) as refusal:
                await ask(generation, message)
            to_status(refusal.value)
        try:  # what fails in a way that was not foreseen
            generation._router = None
            await ask(generation, asked[0])
        except AttributeError as error:
            logs.unexpected(logging.getLogger("paceline.router"), error)
        pages.append(page())
    captured = capfd.readouterr()
    assert len(everything.lines) > 30
    assert "AttributeError" in "".join(everything.lines)
    for text in ("\n".join(everything.lines), captured.err, captured.out, *pages):
        assert told(secret, text) == []
    assert "vllm:spec_decode_num_drafts" in pages[0]
