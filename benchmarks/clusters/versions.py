"""Two versions of Paceline in one service: ten streams while their target is replaced by one of the other, and back.

    python benchmarks/clusters/versions.py COMMIT [--streams N]

Routers, targets and drafts are processes that run the code of COMMIT (``git archive``) or of this checkout, over gRPC
and without Ray. For each pairing a router with a draft streams to clients of its own process; when every stream has
begun its target leaves for one of the other version, and later that one for the first. Then the streams' tokens are
compared with plain decoding of this checkout. Exit status 1 if one differs, a stream fails or no draft token was used.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
NEW, OLD = "new", "old"
PAIRINGS = [
    # router, target at the beginning and in the end, target between, draft
    (OLD, OLD, NEW, OLD),
    (OLD, OLD, NEW, NEW),
    (NEW, OLD, NEW, OLD),
    (NEW, NEW, OLD, NEW),
    (NEW, NEW, OLD, OLD),
    (OLD, NEW, OLD, NEW),
]
PROMPTS = "def read_file(path):", "import os\n", "class Stack:", "for i in range(", "def add(a, b):"
TOKENS = 96


def replica(kind: str) -> None:
    """A target or draft of the embedded pair: prints its address, and runs until its standard input ends."""
    from paceline.config import DraftModel, LocalConfig, TargetModel
    from paceline.runtime.server import engine_server

    exact: dict[str, Any] = {"dtype": "float32", "compile": False, "device": "cpu"}
    target = TargetModel(path=str(pair() / "target"), max_sessions=16, adaptive=False, **exact)
    config = LocalConfig(target=target, draft=DraftModel(path=str(pair() / "draft"), **exact))
    setup = config.target_setup() if kind == "target" else config.draft_setup()

    async def run() -> None:
        server = engine_server(setup, replica_id=f"{kind}-{os.getpid()}")
        await server.start()
        print(json.dumps({"replica_id": f"{kind}-{os.getpid()}", "address": server.address}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop()

    asyncio.run(run())


def router(asked: dict[str, Any]) -> None:
    """Streams to clients of its own while the targets take turns; prints what each stream had."""
    from paceline.checkpoint.tokenizer import load_tokenizer
    from paceline.config import RouterConfig
    from paceline.metrics.registry import Registry
    from paceline.metrics.router import RouterMetrics
    from paceline.router.admission import TargetInfo
    from paceline.router.pool import Member, StaticPool
    from paceline.router.router import Router
    from paceline.types import Request, Result, SamplingParams, SpeculationParams

    first, second, draft = (Member(**asked[name]) for name in ("first", "second", "draft"))
    progress = [0] * asked["streams"]
    turns = [(2 * TOKENS // 3, [first]), (TOKENS // 4, [second])]

    async def run() -> None:
        targets, drafts = StaticPool("target", [first]), StaticPool("draft", [draft])
        info = TargetInfo(load_tokenizer(str(pair() / "target")), 1024, ())
        made = Router(info, targets, drafts, RouterConfig(), metrics=RouterMetrics(Registry("router"), "pair"))
        await made.start()
        while len(made.statuses()["target"]) + len(made.statuses()["draft"]) < 2:
            await asyncio.sleep(0.05)

        async def stream(i: int) -> dict[str, Any]:
            mode = ("sequential", "overlapped")[i % 2]
            sampling = SamplingParams(max_tokens=TOKENS, seed=i, temperature=float(i % 3 > 0), ignore_eos=True)
            request = Request(f"r{i}", PROMPTS[i % len(PROMPTS)], sampling, SpeculationParams(mode=mode))
            async for item in made.generate(request):
                if isinstance(item, Result):
                    stats = item.speculation
                    return {"tokens": item.token_ids, "accepted": stats.accepted, "drafted": stats.drafted}
                progress[i] += len(item.token_ids)
                if turns and min(progress) >= turns[-1][0]:
                    targets.set_members(turns.pop()[1])
            raise AssertionError("a stream ends by its result")

        found = await asyncio.gather(*map(stream, range(asked["streams"])))
        print(json.dumps({"streams": found, "turns": 2 - len(turns)}), flush=True)
        await made.stop()

    asyncio.run(run())


def plain(num_streams: int) -> list[list[int]]:
    """The tokens of each stream without a draft."""
    from paceline.config import LocalConfig, TargetModel
    from paceline.local import LocalPipeline
    from paceline.types import SamplingParams

    target = TargetModel(path=str(pair() / "target"), dtype="float32", compile=False, device="cpu")
    with LocalPipeline(LocalConfig(target=target, draft=None, worker="thread", pin_cores=False)) as pipeline:
        found = []
        for i in range(num_streams):
            sampling = SamplingParams(max_tokens=TOKENS, seed=i, temperature=float(i % 3 > 0), ignore_eos=True)
            found.append(list(pipeline.generate(PROMPTS[i % len(PROMPTS)], sampling).result.token_ids))
        return found


def pair() -> Path:
    """The embedded models, those of this checkout for both versions."""
    return REPOSITORY / "services/paceline/embedded"


def start(code: Path, *arguments: str) -> subprocess.Popen[str]:
    """This program in a process that imports the package from ``code``."""
    environment = os.environ | {"PYTHONPATH": str(code / "services"), "OMP_NUM_THREADS": "1"}
    command, pipe = [sys.executable, __file__, *arguments], subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd=code)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The line that a process prints. Ends the program if it ends without one."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        sys.exit(f"{process.args} ended with {process.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


def unpacked(commit: str, folder: Path) -> Path:
    """The code of a commit."""
    made = subprocess.run(["git", "archive", commit, "services"], cwd=REPOSITORY, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--streams", type=int, default=10)
    args = parser.parse_args()
    if args.streams < 1:
        parser.error(f"--streams is {args.streams}: at least 1 is needed")
    expected = plain(args.streams)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        code = {NEW: REPOSITORY, OLD: unpacked(args.commit, Path(folder))}
        command = ["git", "log", "--no-walk=unsorted", "--format=%h", args.commit, "HEAD"]
        ids = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
        print(f"{time.strftime('%d %B %Y')}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores")
        print(f"old {ids[0]}, new {ids[1]}; {args.streams} streams of {TOKENS} tokens; embedded pair")
        print(f"\n{'router':7} {'target':18} {'draft':6} {'equal':>7} {'drafted':>8} {'accepted':>9} {'turns':>6}")
        parts = {(kind, age): start(code[age], "--replica", kind) for kind in ("target", "draft") for age in code}
        try:
            members = {key: answer(process) for key, process in parts.items()}
            for router_age, first, second, draft in PAIRINGS:
                asked = {"first": members["target", first], "second": members["target", second]}
                asked |= {"draft": members["draft", draft], "streams": args.streams}
                process = start(code[router_age], "--router", json.dumps(asked))
                found = answer(process)
                process.wait(60)
                equal = sum(each["tokens"] == tokens for each, tokens in zip(found["streams"], expected, strict=True))
                drafted, accepted = (sum(each[name] for each in found["streams"]) for name in ("drafted", "accepted"))
                wrong += equal < args.streams or not accepted or found["turns"] < 2
                pairing = f"{router_age:7} {f'{first}, {second}, {first}':18} {draft:6} {equal:>3} of {args.streams}"
                print(f"{pairing} {drafted:>7} {accepted:>9} {found['turns']:>6}", flush=True)
        finally:
            for process in parts.values():
                process.terminate()
    return wrong > 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["--replica"], ["--router"]):
        import paceline

        assert Path(paceline.__file__).is_relative_to(Path.cwd()), "the version that was asked for"
    if sys.argv[1:2] == ["--replica"]:
        replica(sys.argv[2])
    elif sys.argv[1:2] == ["--router"]:
        router(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
