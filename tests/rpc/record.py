"""Records what one version of the protocol says, for the tests of those that come after it.

    PYTHONPATH=CHECKOUT/services .venv/bin/python tests/rpc/record.py VERSION

writes ``recorded/VERSION.binpb``, the descriptors, and ``recorded/VERSION.json``: batches with every kind of message,
alone and in columns, and the pickled values of reports. CHECKOUT is the last commit of that version: it runs before
``PROTOCOL_VERSION`` is raised, so this file imports nothing of the tests.
"""

import json
import pickle
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet

from paceline.config import DraftModel, LocalConfig, LogConfig, RouterConfig, TargetModel
from paceline.fleet.report import Report
from paceline.messages import (
    CloseSession,
    Commit,
    DraftState,
    Echo,
    Hint,
    InFlight,
    Node,
    Nodes,
    OpenSession,
    Outcome,
    PromptScores,
    SessionFailed,
    SparseDistribution,
    SpeculationWanted,
    States,
    TreeLost,
)
from paceline.rpc import streams
from paceline.types import (
    Acceptance,
    Cause,
    FinishReason,
    Mode,
    PoolScaling,
    PromptLogprobs,
    ReplicaStatus,
    Round,
    RouterView,
    SamplingParams,
    SeedScope,
    ServerInfo,
    SpeculationParams,
    Startup,
    StructuredOutput,
    TokenLogprob,
)
from paceline.v1 import draft_pb2, generation_pb2, target_pb2, types_pb2

FOLDER = Path(__file__).parent / "recorded"
NAMES = ("s1", "s2", "s3")


def opens() -> list[OpenSession]:
    """A session by the defaults, and one that sets every parameter."""
    sampling = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=-0.2, logit_bias={5: -1.5, 9: 2.0}, bad_words=((3, 4), (5,)), max_tokens=40, min_tokens=2,
        stop_token_ids=(8, 9), seed=2**63 + 5, seed_scope=SeedScope.GLOBAL, logprobs_mode="raw_logprobs",
        top_logprobs=3, structured_output=StructuredOutput(regex="[ab]+"), allowed_token_ids=(1, 2, 3, 8),
        include_stop_str_in_output=True, skip_special_tokens=False, prompt_logprobs=2,
    )  # fmt: skip
    speculation = SpeculationParams(
        mode=Mode.SEQUENTIAL, acceptance=Acceptance.REJECTION, max_draft_tokens=5, saguaro=0.5
    )
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    return [
        OpenSession("s1", 1, (5, 6, 7), 3, 2**64 - 1, SamplingParams(seed=1), SpeculationParams()),
        OpenSession("s2", 4, (5, 6, 7, 8), 3, 77, sampling, speculation, (0, 2), "salt", trace),
    ]


def trees() -> list[Nodes]:
    """Nodes under both rules, and none."""
    q = SparseDistribution.of((3, 4), (0.25, 0.75))
    return [
        Nodes("s1", 1, 10, (Node(1, 0, 5, 0.5), Node(2, 1, 6, 0.1))),
        Nodes("s2", 1, 11, (Node(3, 0, 4, 0.75, True, q), Node(4, 3, 3, 0.25, False)), False, 0.002),
        Nodes("s3", 1, 12, (), True),
    ]


def directions() -> dict[str, list[Any]]:
    """Messages of every kind, by direction: alone, and so that those of one kind may share columns."""
    rounds = (Round(4, 2, Cause.HIT), Round(3, 3, Cause.LATE, 1, 1, 2, 2), Round(0, 0, Cause.START))
    top = (((3, -0.5), (1, -1.5)), ((2, -0.1),))
    reasons = (None, FinishReason.STOP, FinishReason.LENGTH)
    outcomes = [
        Outcome(name, 2, 10 + i, (5, 6), (-0.1, -0.2), rounds[i], reasons[i], i, top if i == 1 else ())
        for i, name in enumerate(NAMES)
    ]
    in_flights = [InFlight(name, 2, 12 + i, tuple(range(1, i + 1))) for i, name in enumerate(NAMES)]
    commits = [Commit(name, 3, 10 + i, (5, 6)[: i + 1], (1, 2)[:i]) for i, name in enumerate(NAMES)]
    states = States("s1", 3, 4, 2, bytes(range(8)))
    hint = Hint("s1", 3, 10, (0, 2), 0.5, bytes(32))
    scores = PromptScores("s1", 2, PromptLogprobs(1, (TokenLogprob(-0.5, 2, ((3, -0.25),)),)))
    failed = SessionFailed("s1", 2, "no room", True)
    closes = [CloseSession("s1", 2)]
    return {
        "to_target": [
            *opens(), *closes, DraftState("s1", 2, True, 3, 10), DraftState("s2", 2, False), Echo(2**63), *trees(),
            *closes, trees()[1],
        ],
        "from_target": [
            outcomes[1], scores, in_flights[1], *outcomes, *in_flights, states, hint, TreeLost("s1", 2),
            SpeculationWanted("s1", 2, True), SpeculationWanted("s2", 2, False, 3), failed, Echo(7),
        ],
        "to_draft": [*opens(), *closes, commits[2], Echo(5), *commits, states, hint],
        "from_draft": [*trees(), failed, Echo(7), trees()[0]],
    }  # fmt: skip


def statuses() -> list[ReplicaStatus]:
    """What replicas say of themselves."""
    full = ReplicaStatus(
        "t1", "target", 5, 3, 1, 8, kv_pages_used=2, kv_pages=64, busy_s=0.5, pid=9, node="10.0.0.1", model="big",
        draining=True, busy_share=0.25, counters={"steps": 3.0}, controller="4 tokens", measures={"step:1": 0.5},
        batch_invariant="yes", execution="compiled",
    )  # fmt: skip
    return [full, ReplicaStatus("d1", "draft", 1, 0, 0, 4)]


def pickled() -> list[Any]:
    """What processes of a cluster send each other as Python values."""
    status, view = statuses()[0], RouterView({"target": ("t1",)}, 3, 2)
    local = LocalConfig(target=TargetModel(path="t", max_sessions=3), draft=DraftModel(path="d", tree_step_tokens=7))
    startup = Startup("t2", "target", "10.0.0.2", "loading", 1.5)
    scaling = PoolScaling("draft", 2, 1, 0, 4, 1.5, "sessions", "more sessions", 3.0)
    return [
        Report("t1", "target", status, {"paceline_rounds_total": {("hit",): 3.0}}, 7, view),
        startup,
        ServerInfo("0.1.0", 9.0, {"target": (status,)}, 3, 1, 0.5, 2.0, 0.75, 3, 2, (scaling,), (startup,), 0.0),
        local.target_setup(),
        local.draft_setup(),
        RouterConfig(max_queued_requests=5),
        LogConfig(json=True),
    ]


ENCODERS = {
    "to_target": lambda messages, status: streams.encode_to_target(messages),
    "from_target": streams.encode_from_target,
    "to_draft": lambda messages, status: streams.encode_to_draft(messages),
    "from_draft": streams.encode_from_draft,
}


def main(version: str) -> None:
    """Writes the record of the version that is imported."""
    files = FileDescriptorSet()
    for module in (types_pb2, target_pb2, draft_pb2, generation_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    (FOLDER / f"{version}.binpb").write_bytes(files.SerializeToString(deterministic=True))
    recorded = {
        "batches": {
            name: ENCODERS[name](messages, statuses()[0]).SerializeToString(deterministic=True).hex()
            for name, messages in directions().items()
        },
        "pickled": [pickle.dumps(value, protocol=4).hex() for value in pickled()],
        "fields": {
            kind.__name__: [each.name for each in fields(kind)]
            for kind in (Report, ReplicaStatus, RouterView, Startup, PoolScaling, ServerInfo)
        },
    }
    (FOLDER / f"{version}.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
