"""What hidden states and the heads that read them add to a step: `paceline bench parts head-cost`.

One session of a compiled target, steps of all ways in turn:

    plain              no head, no states
    states             plain decoding, too, of a target whose steps return states (EAGLE-3's, three boundaries), which
                       nothing reads; no head follows the session
    HEAD               a head is fed with every step and asked for K tokens before the next, always; all K are
                       verified. Heads are the embedded ones; the MLP speculator has random weights, tied, of the
                       target's width: it shows what it costs, and nothing of what it brings

The head's share is what it took (fed and asked) over a plain step; the verified rows are not part of it. Medians of the
thread's own time over all steps after the first ones. Each text must be that of plain decoding by the same target: one
that returns states is compiled by itself, and rounds otherwise than one that does not.

    paceline bench parts head-cost [--target-size 150M] [--heads medusa mlp_speculator mtp eagle3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import HeadOptions, TargetOptions, TargetSetup
from paceline.drafters.heads.mlp import MLPSpeculator
from paceline.embedded import TARGET_DIR
from paceline.router.session import Session
from paceline.target.build import build_target_engine
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline_bench.grow import parse_size
from paceline_bench.machine import environment
from paceline_bench.models import grown
from paceline_bench.prompts import held_out_prompts

PLAIN, STATES, MLP = "plain", "states", "mlp_speculator"
HEADS = ("medusa", MLP, "mtp", "eagle3")


@dataclass
class Way:
    """One target with its times."""

    name: str
    engine: Any
    events: list[Any]
    step_s: list[float] = field(default_factory=list)
    head_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted: float = 0.0


def random_mlp(folder: Path, target: str, k: int) -> str:
    """Writes an MLP speculator for ``target`` with random weights; returns its directory."""
    size = json.loads((Path(target) / "config.json").read_text(encoding="utf-8"))
    vocab_size, width = size["vocab_size"], size["hidden_size"]
    module = MLPSpeculator(vocab_size, width, k, tie_weights=True, scale_input=True)
    tensors = {f"speculator.{name}": value.detach().bfloat16() for name, value in module.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"vocab_size": vocab_size, "emb_dim": width, "n_predict": k, "tie_weights": True, "scale_input": True}
    (folder / "config.json").write_text(json.dumps({"model_type": MLP, **config}), encoding="utf-8")
    return str(folder)


def ways(path: str, heads: Sequence[str], k: int, mlp: str) -> list[Way]:
    """A target for each way; ``mlp``: directory of the MLP speculator."""
    made = []
    for name in (PLAIN, STATES, *heads):
        method = {PLAIN: None, STATES: "eagle3"}.get(name, name)
        options = [
            HeadOptions(
                method=m, model=mlp if m == MLP else f"paceline/embedded-{m}", num_speculative_tokens=k, probe=False
            )
            for m in (method,)
            if m is not None
        ]
        setup = TargetSetup(
            path,
            TargetOptions(dtype="bfloat16", device="cpu", compile=True, adaptive=False, heads=options, max_sessions=1),
        )
        events: list[Any] = []
        way = Way(name, build_target_engine(setup, events.extend), events)
        way.engine._clock = way.engine.heads._clock = time.thread_time
        if name == STATES:
            way.engine.heads.feed = way.engine.heads.propose = lambda *args, **kwargs: None
        made.append(way)
    return made


def run(way: Way, session: Session, num_steps: int, warm_up: int, *, kept: bool) -> list[int]:
    """Records the times of a session's steps, if they are ``kept``; returns its tokens."""
    engine, (mounted,) = way.engine, way.engine.heads.mounted or (None,)
    engine.receive(session.open(draft_available=False).to_target)
    tokens: list[int] = []
    before = (0, 0)
    for index in range(num_steps + warm_up):
        started, spent = engine.stats.steps, mounted.stats.seconds if mounted else 0.0
        begun = engine._clock()
        while engine.stats.steps == started:
            assert engine.step(), "the session steps"
        took = engine._clock() - begun
        of_head = (mounted.stats.seconds if mounted else 0.0) - spent
        for event in way.events:
            tokens += getattr(event, "token_ids", ())
            session.on_target(event)
        way.events.clear()
        counted = engine.stats.rounds, engine.stats.head_rows_used
        if index == warm_up:
            before = counted
        if index >= warm_up and kept:
            way.step_s.append(took - of_head)
            way.head_s.append(of_head)
    rounds, used = (now - then for now, then in zip(counted, before, strict=True))
    way.accepted = used / rounds
    engine.receive(session.cancel().to_target)
    while engine.step():
        pass
    way.events.clear()
    return tokens


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        "paceline bench parts head-cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target-size", type=parse_size, help="grown to (default: as it is)")
    parser.add_argument("--heads", nargs="*", default=HEADS, choices=HEADS)
    parser.add_argument("--draft-tokens", type=int, default=4, help="K (default 4)")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=60, help="of each way in a round (default 60)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    path = grown(str(TARGET_DIR), options.target_size, "bfloat16") if options.target_size else str(TARGET_DIR)
    prompts = held_out_prompts(load_tokenizer(str(TARGET_DIR)), options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        mlp = random_mlp(Path(folder), path, options.draft_tokens)
        found = ways(path, options.heads, options.draft_tokens, mlp)
    for number, prompt in enumerate(prompts):
        for way in found:
            sampling = SamplingParams(max_tokens=600, temperature=options.temperature, seed=number, ignore_eos=True)
            texts = []
            for mode in (Mode.PLAIN, Mode.OVERLAPPED) if way.engine.heads.mounted else (Mode.PLAIN,):
                timed = (mode is Mode.PLAIN) == (way.name in (PLAIN, STATES))  # heads follow other sessions
                speculation = SpeculationParams(max_draft_tokens=options.draft_tokens, mode=mode)
                name = f"{way.name} {number} {mode}"
                session = Session(name, prompt.token_ids, sampling, speculation, decode=lambda _: "")
                texts.append(run(way, session, options.steps, 10, kept=timed))
            both = min(map(len, texts))
            assert texts[-1][:both] == texts[0][:both], f"{way.name}: another text than plain decoding's"
    plain_s = statistics.median(found[0].step_s)
    rows = [("way", "step ms", "of plain", "head ms", "of a plain step", "accepted")]
    records = []
    for way in found:
        step_s, head_s = statistics.median(way.step_s), statistics.median(way.head_s)
        records.append({"way": way.name, "step_s": step_s, "head_s": head_s, "accepted": way.accepted})
        of_head = (f"{1e3 * head_s:.3f}", f"{head_s / plain_s:.1%}", f"{way.accepted:.2f}") if head_s else ("-",) * 3
        rows.append((way.name, f"{1e3 * step_s:.3f}", f"{step_s / plain_s:.3f}", *of_head))
    print(*table(rows), sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "records": records}, indent=1))
