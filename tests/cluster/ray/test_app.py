"""The application on a real cluster: streams, errors, cancels, deadlines, metrics, traces and leases."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from pathlib import Path

import grpc
import openai
import pytest
import ray
from tests.cluster.ray.conftest import ON_RAY, config_for, letters, until
from tests.support.local import plain_results
from tests.support.rings import nightly

from paceline.errors import ConfigError
from paceline.types import SamplingParams
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc, types_pb2

pytestmark = ON_RAY

LONG = 1500
"""Tokens of a stream that outlives what is done to it."""


def request(text, max_tokens=32, *, seed=None, temperature=0.0, mode=None, request_id=""):
    sampling = types_pb2.SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    if seed is not None:
        sampling.seed = seed
    message = pb.GenerateRequest(request_id=request_id, text=text, sampling_params=sampling)
    if mode is not None:
        message.speculation.mode = mode
    return message


@contextlib.asynccontextmanager
async def stub_of(app):
    async with grpc.aio.insecure_channel(app.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def collect(call):
    """Token ids, text and the last message of a stream."""
    token_ids, text, complete = [], "", None
    async for response in call:
        assert complete is None
        if response.HasField("complete"):
            complete = response.complete
        else:
            token_ids += response.chunk.token_ids
            text += response.chunk.text
    return token_ids, text, complete


async def replicas(app, kind):
    """Statuses of the replicas that a router sees."""
    return (await app.ask("Router", "statuses"))[0].get(kind, [])


async def leases(app, deployment):
    return sum(await app.ask(deployment, "num_leases"))


async def assert_all_free(app):
    """No lease, no session, nothing queued."""

    seen = {}

    async def free():
        seen["leases"] = [await leases(app, name) for name in (app.TARGET, app.DRAFT)]
        seen["sessions"] = [(s.kind, s.num_sessions) for k in ("target", "draft") for s in await replicas(app, k)]
        seen["requests"] = await app.ask("Router", "num_requests")
        return not any([*seen["leases"], *(count for _, count in seen["sessions"]), *seen["requests"]])

    try:
        await until(free)
    except AssertionError:
        pytest.fail(f"still held: {seen}")


def plain(pair, prompts, max_tokens):
    """Token ids of each prompt by plain decoding in this process."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [[*result.token_ids] for result in plain_results(pair / "target", [(p, sampling) for p in prompts])]


def test_build_names_the_deployments(pair):
    from paceline.cluster.app import build, build_draft_deployment, build_target_deployment
    from paceline.config import ServiceConfig

    config = ServiceConfig.parse(config_for(pair))
    target = build_target_deployment(config)
    draft = build_draft_deployment(config)
    assert target._bound_deployment.name == "Target:tests--target_v1"
    assert draft._bound_deployment.name == "Draft:tests--draft"
    assert build(config)._bound_deployment.num_replicas == 2
    with pytest.raises(ConfigError, match="draft_config is null"):
        build_draft_deployment(config.with_overrides(["draft_config=null"]))
    with pytest.raises(ConfigError, match="no such key"):
        build({"target_confg": {}})


async def test_errors_come_with_status_details_and_trailers(app):
    async with stub_of(app) as stub:
        call = stub.Generate(request("hello", 10**6))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(call)
        error = caught.value
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_tokens is 1000000" in error.details()
    assert dict(error.trailing_metadata())["paceline-error"] == "PromptTooLongError"


async def _cancel(app, stub, how):
    """One request that is left in the given way after it has begun."""
    call = stub.Generate(request(letters(12), LONG))
    if how == "reader is cancelled":
        reader = asyncio.create_task(collect(call))
        await asyncio.sleep(0.3)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        call.cancel()
        return
    async for _ in call:
        if how == "slow reader":
            await asyncio.sleep(0.2)
        break
    call.cancel()


@pytest.mark.parametrize(
    "how", ["connection is dropped", *nightly(["reader is cancelled", "on a message", "slow reader"])]
)
async def test_every_cancel_frees_the_session_everywhere(app, how):
    """50 of each kind, ten at a time."""
    finished = await ended(app)
    for _ in range(5):
        if how == "connection is dropped":
            async with contextlib.AsyncExitStack() as stack:
                stubs = [await stack.enter_async_context(stub_of(app)) for _ in range(10)]
                calls = [stub.Generate(request(letters(12), LONG)) for stub in stubs]
                await asyncio.gather(*(call.read() for call in calls))
        else:
            async with stub_of(app) as stub:
                await asyncio.gather(*(_cancel(app, stub, how) for _ in range(10)))
    await assert_all_free(app)
    assert await ended(app) == finished, "a cancelled request ran to its end"
    logs = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    texts = [file.read_text(errors="replace") for file in logs.glob("replica_paceline_Router*")]
    assert len(texts) >= 2
    assert not any("GeneratorExit" in text for text in texts), "a client that leaves is no error"


async def ended(app):
    """Requests that ran to their natural end, over all routers."""
    counts = []
    while len(counts) < 2 or counts[-1] != counts[-2]:
        await asyncio.sleep(2.5)  # every router reports once a second
        (text,) = await app.ask("Monitor", "exposition")
        lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total")]
        counts.append(sum(float(line.rpartition(" ")[2]) for line in lines if 'finished_reason="length"' in line))
    return counts[-1]


async def test_a_deadline_frees_the_session(app):
    async with stub_of(app) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stub.Generate(request(letters(9), LONG), timeout=0.3))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await assert_all_free(app)


async def test_cancel_reaches_the_router_that_has_the_request(app):
    async with stub_of(app) as stub:
        reply = await stub.Cancel(pb.CancelRequest(request_id="nobody"))
        assert not reply.cancelled
        for i in range(6):  # routers are chosen by the proxy: one of the two unary calls meets the other one
            call = stub.Generate(request(letters(9), LONG, request_id=f"c{i}"))
            await anext(aiter(call))
            assert (await stub.Cancel(pb.CancelRequest(request_id=f"c{i}"))).cancelled
            _, _, complete = await collect(call)
            assert complete.finish_reason == "abort"


async def test_reflection_health_model_and_server_info(app):
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(app.address) as channel:
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"paceline.v1.GenerationService", "grpc.health.v1.Health"} <= set(services)
        health = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=60).status == serving
        watch = health.Watch(health_pb2.HealthCheckRequest(service="paceline.v1.GenerationService"), timeout=60)
        assert next(watch).status == serving
        watch.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            health.Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=60)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        info = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60)
        assert (info.model_id, info.draft_model_id, info.dtype) == ("tests/target.v1", "tests/draft", "float32")
        defaults = info.default_sampling_params
        assert (defaults.temperature, defaults.max_tokens, defaults.seed_scope) == (0.0, 128, "prompt")

        async def reported():
            fleet = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
            return {pool.name: len(pool.replicas) for pool in fleet.pools} == {"target": 1, "draft": 1, "router": 2}

        await until(reported)


def page(app, path):
    with urllib.request.urlopen(app.url + path, timeout=60) as reply:
        return reply.read().decode()


async def test_the_acceptance_length_is_that_of_the_metrics(app):
    def total(name):
        lines = page(app, "/metrics").splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}_total"))

    async with stub_of(app) as stub:
        for mode in ("sequential", "plain"):
            await collect(stub.Generate(request("def read", mode=mode)))

        async def agrees():
            info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60)
            drafts, accepted = (total(f"vllm:spec_decode_num_{name}") for name in ("drafts", "accepted_tokens"))
            return total("paceline_rounds") and info.acceptance_length == 1 + (accepted / drafts if drafts else 0)

        await until(agrees)


async def test_what_replicas_log_is_in_the_files_of_ray_at_once(app):
    """A failed request is named there, what it said is not."""
    request_id, prompt = "find-me-in-the-log", "nobody else's business"
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())

    def lines():
        return [line for file in folder.glob("worker-*.err") for line in file.read_text(errors="replace").splitlines()]

    async with stub_of(app) as stub:
        with pytest.raises(grpc.aio.AioRpcError):
            await collect(stub.Generate(request(prompt, 10**6, request_id=request_id)))
    await until(lambda: any(request_id in line for line in lines()), what="the request is named")
    assert sum("is ready after" in line for line in lines()) >= 2
    assert not any(prompt in line for line in lines())


async def test_metrics_are_one_page_for_all_replicas(app):
    def both_routers_reported():
        text = page(app, "/metrics")
        return text if 'paceline_replicas_up{kind="router"} 2.0' in text else ""

    text = await until(both_routers_reported)
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tests/target.v1"}' in text
    assert page(app, "/health") == "serving\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        page(app, "/nothing")


async def test_http_gives_the_tokens_of_grpc_and_a_client_that_leaves_ends_its_request(app):
    asked = [(seed, mode) for seed in range(6) for mode in ("plain", "overlapped")]

    async def by_grpc():
        async with stub_of(app) as stub:
            calls = [stub.Generate(request("thequick", 24, seed=s, temperature=0.9, mode=m)) for s, m in asked]
            return [token_ids for token_ids, _, _ in await asyncio.gather(*map(collect, calls))]

    async def by_http(client):
        def one(seed, mode):
            extra = {"ignore_eos": True, "return_token_ids": True, "speculation": {"mode": mode}}
            given = {"model": "tests/target.v1", "prompt": "thequick", "max_tokens": 24, "temperature": 0.9}
            return client.completions.create(**given, seed=seed, stream=mode == "plain", extra_body=extra)

        found = []
        for answer in await asyncio.gather(*(one(*each) for each in asked)):
            if isinstance(answer, openai.AsyncStream):
                found.append([i async for part in answer for i in getattr(part.choices[0], "token_ids", [])])
            else:
                found.append(answer.choices[0].token_ids)
        return found

    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        assert (await client.models.list()).data[0].id == "tests/target.v1"
        assert await by_http(client) == await by_grpc()
        with pytest.raises(openai.BadRequestError, match="max_tokens is 1000000"):
            await client.completions.create(model="tests/target.v1", prompt="a", max_tokens=10**6)
        stream = await client.completions.create(
            model="tests/target.v1", prompt="a", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        assert sum(await app.ask("Router", "num_requests")) >= 1
        await stream.close()

        async def gone():
            return sum(await app.ask("Router", "num_requests")) == 0

        await until(gone, what="the request has ended")


async def test_requests_leave_traces_below_their_callers(app):
    callers = {f"{i:032x}": f"{i:016x}" for i in (0xA1, 0xA2)}  # trace -> span

    def sent():
        return [
            span for message in app.exported for r in message.resource_spans for s in r.scope_spans for span in s.spans
        ]

    by_grpc, by_http = ({"traceparent": f"00-{trace}-{span}-01"} for trace, span in callers.items())
    async with stub_of(app) as stub:
        await collect(stub.Generate(request("thequick", 8), metadata=[*by_grpc.items()]))
        await collect(stub.Generate(request("thequick", 8)))
    async with openai.AsyncOpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        await client.completions.create(model="tests/target.v1", prompt="thequick", max_tokens=8, extra_headers=by_http)

    wanted = {(trace, name) for trace in callers for name in ("text_completion tests/target.v1", "target", "draft")}

    def arrived():
        return {(span.trace_id.hex(), span.name) for span in sent()}

    await until(lambda: arrived() >= wanted, what="routers and replicas have told the traces of both requests")
    spans = sent()
    requests = {span.span_id: span for span in spans if span.name == "text_completion tests/target.v1"}
    assert {span.trace_id.hex(): span.parent_span_id.hex() for span in requests.values()} == callers
    named = ("queue", "prefill", "target", "draft")
    below = [(span.trace_id.hex(), span.name) for span in spans if span.parent_span_id in requests]
    assert sorted(pair for pair in below if pair[1] in named) == sorted((t, name) for t in callers for name in named)
    replicas = {span.span_id: span.name for span in spans if span.name in ("target", "draft")}
    inside = {(replicas[span.parent_span_id], span.name) for span in spans if span.parent_span_id in replicas}
    assert inside >= {("target", "queue"), ("target", "prefill"), ("target", "round"), ("draft", "prefill")}
    instances = [_instance(r) for message in app.exported for r in message.resource_spans]
    assert len(set(instances)) >= 3, "each process tells its own name"


def _instance(resource_spans):
    """The name of a process among those of the service."""
    attributes = resource_spans.resource.attributes
    return next(entry.value.string_value for entry in attributes if entry.key == "service.instance.id")


async def test_a_session_holds_one_lease_on_its_target_and_at_most_one_on_a_draft(app):
    async def held():
        return await leases(app, app.TARGET) == 3

    async with stub_of(app) as stub:
        calls = [stub.Generate(request(letters(9, i), LONG)) for i in range(3)]
        for call in calls:
            await call.read()
        await until(lambda: held(), 10, "3 leases on the targets")
        assert await leases(app, app.DRAFT) <= 3  # a target gives a draft back that does not pay
        for call in calls:
            call.cancel()
    await assert_all_free(app)
