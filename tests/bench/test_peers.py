"""Other engines beside ours in `paceline bench local --peer`: made-up ones, behind the real worker and its pipe."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import EngineError
from paceline.types import SamplingParams, SpeculationParams
from paceline_bench import peers
from paceline_bench.compare.run import open_arm
from paceline_bench.compare.spec import Spec, arm_of
from paceline_bench.jobs import Job
from paceline_bench.local import methods
from paceline_bench.peers import PeerProcess, Unit, start_of
from paceline_bench.prompts import Prompt
from paceline_bench.report.documents import read_run
from paceline_bench.report.sections import all_sections
from paceline_bench.settings import LocalSettings, Peer

ENGINES = Path(__file__).parent / "engines"
MODELS = str(TARGET_DIR), str(DRAFT_DIR)
CORE = min(os.sched_getaffinity(0))
UNIT = Unit(((7, 20), (40,)), (6, 4), 0.0, 5, 0)


@pytest.fixture
def python(tmp_path: Path) -> str:
    """A Python with the made-up engines."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={ENGINES} exec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are in OpenVINO's form already."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for path in MODELS:
        folder = tmp_path / "cache" / f"openvino-{Path(path).name}"
        folder.mkdir(parents=True)
        (folder / "openvino_model.xml").touch()


def sleeps(process: PeerProcess) -> bool:
    """Waits until the process is stopped, or for a minute."""
    end = time.monotonic() + 60
    while Path(f"/proc/{process._process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.usefixtures("exported")
@pytest.mark.parametrize("engine", ["openvino", "vllm"])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_an_engine_answers_every_prompt_and_sleeps_between_units(python: str, engine: str, draft_tokens: int) -> None:
    start = start_of(Peer(engine, python), MODELS, draft_tokens, (CORE,), "bfloat16", 2)
    assert bool(start.draft) == bool(draft_tokens)
    with PeerProcess(python, start) as process:
        for _ in range(2):
            assert sleeps(process)
            long, short = process.generate(replace(UNIT, draft_tokens=draft_tokens))
            assert long.token_ids == tuple(range(21, 27))
            assert short.token_ids == tuple(range(41, 45))
            assert [r.tokens for r in long.rounds] == ([4, 2] if draft_tokens else [1] * 6)
            assert 0 < long.prefill_s == long.rounds[0].at_s < long.prefill_s + long.decode_s
        pid = process._process.pid
    assert not Path(f"/proc/{pid}").exists()


def test_a_comparison_has_an_arm_of_another_engine(python: str) -> None:
    target = {"model_loading_config": {"model_id": "paceline/embedded-target"}, "engine_kwargs": {"dtype": "bfloat16"}}
    tree = {"target_config": target, "draft_config": None}
    spec = Spec.model_validate({"configuration": tree, "baseline": "own", "arms": {"own": {}}})
    with ExitStack() as stack:
        ask = open_arm(arm_of(spec, "own", {"peer": f"vllm={python}"}), spec, stack)
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        (reply,) = ask([Job(Prompt("", (7, 20)), sampling)], SpeculationParams(), "")
    assert reply.token_ids == (21, 22, 23)


def test_llama_cpp_answers_every_prompt_in_batches_of_its_width(python: str) -> None:
    """Mutant: rows that start at position 0 again in a second batch."""
    start = start_of(Peer("llama.cpp", python), ("model.gguf", ""), 0, (CORE,), "bfloat16", 2)
    with PeerProcess(python, start) as process:
        for _ in range(2):
            long, short = process.generate(UNIT)
            assert (long.token_ids, short.token_ids) == (tuple(range(21, 27)), tuple(range(41, 45)))
            assert [r.tokens for r in long.rounds] == [1] * 6
    with pytest.raises(EngineError, match=r"^llama.cpp failed: RuntimeError: folder cannot be read"):
        PeerProcess(python, replace(start, target="folder")).__enter__()


def test_one_process_serves_every_k_of_an_engine_that_takes_it_with_a_request() -> None:
    def starts(engine: str) -> set[peers.Start]:
        peer = Peer(engine, "python")
        return {start_of(peer, MODELS, k, (CORE,), "bfloat16", 1) for k in (0, 2, 4)}

    assert sorted(bool(start.draft) for start in starts("openvino")) == [False, True]
    assert sorted(start.draft_tokens for start in starts("vllm")) == [0, 2, 4]


def test_an_engine_that_does_not_start_says_why(python: str, tmp_path: Path) -> None:
    target = tmp_path / "broken"
    target.mkdir()
    (target / "config.json").write_text("{}")
    start = start_of(Peer("vllm", python), (str(target), ""), 0, (CORE,), "bfloat16", 1)
    with pytest.raises(EngineError, match=rf"^vllm failed: ValueError: {target} cannot be read"):
        PeerProcess(python, start).__enter__()


def test_an_engine_that_ends_is_named(python: str) -> None:
    start = start_of(Peer("vllm", python), MODELS, 0, (CORE,), "bfloat16", 1)
    with PeerProcess(python, start) as process, pytest.raises(EngineError, match=r"^vllm ended"):
        process.generate(replace(UNIT, prompts=((13,),), max_tokens=(2,)))
    with pytest.raises(EngineError, match=r"^vllm cannot be started: .*nonexistent"):
        PeerProcess("/nonexistent", start).__enter__()


def test_methods_of_other_engines_have_the_cores_and_k_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.workers.available_cores", lambda: (0, 1, 2, 3))
    settings = LocalSettings(*MODELS, peers=(Peer("vllm", "python"),), sequential_draft_tokens=(3,), cpu_threads=(4,))
    assert [(m.name, m.cores) for m in methods(settings) if m.engine == "vllm"] == [
        ("vllm, 1 thread", 1),
        ("vllm, 1 thread K=3", 1),
        ("vllm, 2 threads", 2),
        ("vllm, 2 threads K=3", 2),
        ("vllm, 4 threads", 4),
        ("vllm, 4 threads K=3", 4),
    ]
    ours = [(m.name, m.cores) for m in methods(settings) if m.shared]
    assert ours[2:] == [("plain, 4 threads", 4), ("co-located, 4 threads K=4", 4)]
    alone = replace(settings, draft="", cpu_threads=())
    assert [m.name for m in methods(alone) if m.engine == "vllm"] == ["vllm, 1 thread", "vllm, 2 threads"]


@pytest.mark.slow
def test_a_run_compares_ours_with_theirs(python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The text of another engine is compared with plain decoding's, and does not fail a run that differs from it."""
    file = tmp_path / "run.json"
    run = ["--prompts", "1", "--max-tokens", "8", "--temperatures", "0", "--no-compile", "--worker", "thread"]
    run += ["--modes", "plain", "--baselines", "none", "--sequential-draft-tokens", "4", "--dtype", "bfloat16"]
    assert main(["bench", "local", *run, "--peer", f"vllm={python}", "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "Against other engines" in said
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["settings"]["peers"] == ["vllm"]
    theirs = [r for r in written["requests"] if r["engine"] == "vllm"]
    assert {(r["cores"], r["identical"]) for r in theirs} >= {(1, False)}
    (section,) = [s for s in all_sections([read_run(file)]) if s.title.startswith("Against other engines")]
    assert {"decoding", "end to end"} <= {row[4] for row in section.rows[1:]}
