"""Processes of two versions of Paceline in one service, over gRPC, as in an upgrade: the same tokens, or a refusal.

A peer of the version before is this code behind its recorded protocol (``tests/rpc/recorded``): what that does not know
never reaches it, and it states no version. ``benchmarks/clusters/versions.py`` runs the code of two commits.

Mutants that must fail here: no check by the replica; none by the router; a router that gives old targets what they do
not know; a target that takes an opening of which it understands a part.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from tests.rpc.test_protocol import OLD
from tests.service.support import collect, routed, tiny_pair, until

from paceline.errors import EngineError
from paceline.router import link as link_module
from paceline.router.link import DRAFT, TARGET
from paceline.router.pool import Member
from paceline.rpc import protocol
from paceline.runtime import server as server_module
from paceline.types import Mode, SamplingParams, SpeculationParams

CURRENT, BEFORE = protocol.VERSION, protocol.VERSION - 1
PROMPTS = [f"def f{i}(x):" for i in range(10)]
HOW = [SpeculationParams(mode=mode) for mode in 5 * [Mode.SEQUENTIAL, Mode.OVERLAPPED]]
"""Sequential sessions wait for their drafts, so that some of each draft's tokens are verified whatever the load."""
SAMPLING = [SamplingParams(max_tokens=48, seed=i, temperature=float(i % 2), ignore_eos=True) for i in range(10)]


def known_before(batch):
    """What a peer of the version before finds in a batch, and what is left of one that it sends."""
    old = OLD[batch.DESCRIPTOR.name].FromString(batch.SerializeToString())
    old.DiscardUnknownFields()
    return type(batch).FromString(old.SerializeToString())


def as_before(kind):
    """A stream, or the protocol of a server, behind the recorded one."""
    return kind._replace(**coded(kind)) if hasattr(kind, "_replace") else replace(kind, **coded(kind))


def coded(kind):
    return {
        "decode": lambda batch: kind.decode(known_before(batch)),
        "encode": lambda *messages: known_before(kind.encode(*messages)),
    }


@contextlib.asynccontextmanager
async def replica(config, kind, version, monkeypatch):
    """A target or draft of a version in this process."""
    setup = config.target_setup() if kind == "target" else config.draft_setup()
    with monkeypatch.context() as patch:
        if version == BEFORE:
            protocols = {name: as_before(each) for name, each in server_module.PROTOCOLS.items()}
            patch.setattr(server_module, "PROTOCOLS", protocols)
        server = server_module.engine_server(setup, replica_id=f"{kind}-{version}")
        await server.start()
    if version not in (BEFORE, CURRENT):
        server.host._status = replace(server.host._status, protocol=version)
    try:
        yield server
    finally:
        await server.stop()


@contextlib.contextmanager
def routers_of(version, monkeypatch):
    """Links of a router of this version."""
    with monkeypatch.context() as patch:
        if version == BEFORE:
            patch.setattr(link_module, "TARGET", as_before(TARGET))
            patch.setattr(link_module, "DRAFT", as_before(DRAFT))
        if version != CURRENT:
            key = "nothing" if version == BEFORE else protocol.KEY
            stated = SimpleNamespace(KEY=key, VERSION=version, refusal=lambda _: "")
            patch.setattr(link_module, "protocol", stated)
        yield


def members(*servers):
    return [Member(server.host.status().replica_id, server.address) for server in servers]


async def test_streams_go_on_while_targets_of_two_versions_take_turns(checkpoints, plain, monkeypatch):
    """Old and new routers with drafts of the other version; each stream is moved to a new target, and back."""
    config = tiny_pair(checkpoints, max_sessions=16)
    expected = [plain(prompt, sampling) for prompt, sampling in zip(PROMPTS, SAMPLING, strict=True)]

    async def streams(router_version, first, second, draft):
        with routers_of(router_version, monkeypatch):
            async with routed(config, [], []) as (router, targets, drafts):
                targets.set_members(members(first))
                drafts.set_members(members(draft))
                await until(lambda: len([s for side in router.statuses().values() for s in side]) == 2)
                moves, num_chunks, turns = [], Counter(), [first, second]
                router.metrics.moved = moves.append

                def turn(prompt, chunks):
                    """When each stream has a chunk, and again when each has three, all move to the other target."""
                    num_chunks[prompt] = len(chunks)
                    if turns and len(num_chunks) == len(PROMPTS) and min(num_chunks.values()) >= (1, 3)[len(turns) % 2]:
                        targets.set_members(members(turns.pop()))

                asked = zip(PROMPTS, SAMPLING, HOW, strict=True)
                found = await asyncio.gather(
                    *(collect(router, p, sampling=s, speculation=how, on_chunk=partial(turn, p)) for p, s, how in asked)
                )
                return [result for _, result in found], moves

    async with contextlib.AsyncExitStack() as stack:
        made = {}
        for kind in ("target", "draft"):
            for version in (BEFORE, CURRENT):
                server = await stack.enter_async_context(replica(config, kind, version, monkeypatch))
                made[kind, version] = server
        for router, first, second, draft in (
            (BEFORE, BEFORE, CURRENT, CURRENT),
            (CURRENT, BEFORE, CURRENT, BEFORE),
            (CURRENT, CURRENT, BEFORE, BEFORE),
        ):
            parts = made["target", first], made["target", second], made["draft", draft]
            results, moves = await streams(router, *parts)
            assert [result.token_ids for result in results] == expected, (router, first, second, draft)
            assert sum(result.speculation.accepted for result in results) > 0, (router, first, second, draft)
            assert moves.count("drain") >= 2  # three chunks are at most 27 of 48 tokens


@pytest.mark.parametrize(("side", "version"), [("router", CURRENT + 2), ("router", 0), ("replica", CURRENT + 2)])
async def test_a_peer_two_versions_away_is_refused_with_both_versions(checkpoints, monkeypatch, caplog, side, version):
    config = tiny_pair(checkpoints)
    router_version, target_version = (version, CURRENT) if side == "router" else (CURRENT, version)
    async with replica(config, "target", target_version, monkeypatch) as server:
        with routers_of(router_version, monkeypatch), caplog.at_level(logging.WARNING):
            async with routed(config, [], [], recovery_timeout_s=0.5) as (router, targets, _):
                targets.set_members(members(server))
                link = router.targets.links[server.host.status().replica_id]
                await until(lambda: "paceline-protocol is" in link.reason)
                with pytest.raises(EngineError, match=f"paceline-protocol is {version}: 2 is spoken here"):
                    await collect(router, "a")
                assert not router.ready
    told = [record for record in caplog.records if "paceline-protocol is" in record.getMessage()]
    assert len(told) == 1, "once, not with each try"


async def test_what_only_new_targets_know_goes_to_them_and_is_refused_while_there_is_none(
    checkpoints, plain, monkeypatch
):
    config = tiny_pair(checkpoints).model_copy(update={"draft": None})
    sampling = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, logprob_token_ids=(5, 6))
    async with contextlib.AsyncExitStack() as stack:
        old, new = [
            await stack.enter_async_context(replica(config, "target", version, monkeypatch))
            for version in (BEFORE, CURRENT)
        ]
        router, targets, _ = await stack.enter_async_context(routed(config, [], []))
        targets.set_members(members(old))
        await until(lambda: router.ready)
        with pytest.raises(EngineError, match="logprob_token_ids is set: targets with room are of an old") as told:
            await collect(router, "a", sampling=sampling)
        assert told.value.retry_after_s > 0
        assert (await collect(router, "a"))[1].token_ids
        targets.set_members(members(old, new))
        await until(lambda: len(router.statuses()["target"]) == 2)

        def turn(chunks):
            if len(chunks) == 2:  # the new one leaves: the old one may not go on with it
                targets.set_members(members(old))

        for _ in range(3):
            chunks, result = await collect(router, "a", sampling=sampling)
            assert result.token_ids == plain("a", sampling)
            assert all(len(place) == 3 for chunk in chunks for place in chunk.top_logprobs)
        chunks, result = await collect(router, "a", sampling=sampling, on_chunk=turn)
        assert all(len(place) == 3 for chunk in chunks for place in chunk.top_logprobs)
        assert result.token_ids == plain("a", sampling)
        targets.set_members(members(old, new))
        await until(lambda: len(router.statuses()["target"]) == 2)
        ends = []
        with pytest.raises(EngineError, match="logprob_token_ids is set: targets with room"):  # it has been lost
            await collect(
                router, "a", sampling=sampling.model_copy(update={"max_tokens": 500}),
                on_chunk=lambda chunks: ends or ends.append(asyncio.ensure_future(new.stop())),
            )  # fmt: skip
        assert ends


async def test_an_opening_that_a_target_does_not_know_in_full_ends_by_its_reason(checkpoints, monkeypatch):
    """A router of the version after, which has asked for more than it may."""
    config = tiny_pair(checkpoints).model_copy(update={"draft": None})
    encode = TARGET.encode

    def newer(messages):
        batch = encode(messages)
        for command in batch.commands:
            if command.HasField("open_session"):
                command.open_session.sampling.MergeFromString(b"\xd2\x09\x03abc")
        return batch

    monkeypatch.setattr(link_module, "TARGET", replace(TARGET, encode=newer))
    server_of = replica(config, "target", CURRENT, monkeypatch)
    async with server_of as server, routed(config, [], []) as (router, targets, _):
        targets.set_members(members(server))
        with pytest.raises(EngineError, match=r"sampling.154 is set: this version of Paceline does not"):
            await collect(router, "a")
