"""Every drafting method through the real service: each text is that of plain decoding.

    python benchmarks/methods_service.py > benchmarks/results/methods-service.txt
    python benchmarks/methods_service.py --method PARD --method lookahead --heads heads

For each method of docs/methods.md that can draft for the embedded target, a ``paceline serve`` of its own is started
with the configuration of the page; held-out prompts are streamed over gRPC at temperatures 0 and 1, some at once, and
each text is compared with what one process writes by plain decoding. Heads that the package does not hold are made here
by a few steps of training: they are poor, but their tokens are verified, and some accepted. Printed as soon as they are
there: texts, those that differ, and the method's own tokens. The status is 1 if a text differs or a method fails. The
tokens of overlapped drafts depend on how busy the machine is, the texts do not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from methods import MODEL, model_of
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.client import AsyncClient
from paceline.config import LocalConfig
from paceline.drafters.catalogue import METHODS, Method, Place
from paceline.drafters.training.options import HeadForm, Kind, Schedule, TrainingOptions
from paceline.drafters.training.run import train_head
from paceline.embedded import TARGET_DIR
from paceline.errors import PacelineError
from paceline.local import LocalPipeline
from paceline.types import Mode, Result, SamplingParams, SpeculationParams
from paceline_bench.processes import ServiceProcess
from paceline_bench.prompts import Prompt, held_out_prompts

TEMPERATURES = (0.0, 1.0)
TARGET = str(TARGET_DIR)
BOUNDARIES = {"early_exit": (6,), "speculative_streaming": (5,)}
"""Of heads that draft with layers of the target."""
PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}
"""Of Ray Serve with its proxy, which on a busy machine takes longer to start than Serve waits."""


@dataclass
class Counted:
    """What the texts of one method were, and its own tokens."""

    texts: int = 0
    different: int = 0
    rounds: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, method: Method, result: Result, plain: Result) -> None:
        """Counts one text, and tokens of the method: those of the draft, of heads or of the target's own text."""
        counted = result.speculation
        self.texts, self.different = self.texts + 1, self.different + (result.token_ids != plain.token_ids)
        self.rounds, self.tokens = self.rounds + counted.rounds, self.tokens + len(result.token_ids)
        heads = counted.head_drafted, counted.head_accepted
        own = counted.lookup_drafted, counted.lookup_accepted
        if method.place is Place.POOL:
            found = counted.drafted - heads[0] - own[0], counted.accepted - heads[1] - own[1]
        else:
            found = heads if method.kind else own
        self.drafted, self.accepted = self.drafted + found[0], self.accepted + found[1]


def made_head(kind: str, folder: Path, num_steps: int) -> str:
    """A head of the embedded target that has seen two thousand tokens; one that is there already is taken."""
    if not (folder / "report.json").exists():
        options = TrainingOptions(
            HeadForm(cast(Kind, kind), boundaries=BOUNDARIES.get(kind, ())),
            TARGET,
            [Path(__file__).parents[1] / "services" / "paceline" / "core"],
            folder,
            Schedule(num_steps),
            num_tokens=2048,
            temperatures=(),
            held_out_rows=2,
        )
        train_head(options, lambda *told: None)
    return str(folder)


def served(made: Path, heads: Path, names: Sequence[str], num_steps: int) -> Iterator[tuple[Method, str | None]]:
    """The methods, with their checkpoints: of the package, drafts made in ``made``, heads made or kept in ``heads``.

    ``names``: only these; (): all.
    """
    for method in METHODS:
        if method.kind == "plugin" or (names and method.name not in names):
            continue
        kind = str(method.options.get("method", method.kind))
        if (model := model_of(method, None, made, num_steps)) is None and method.needs_model and kind in get_args(Kind):
            model = made_head(kind, heads / kind, num_steps)
        if model is not None or not method.reads:
            yield method, model


def configuration(method: Method, model: str | None, at_once: int) -> dict[str, Any]:
    """That of the page, eager in float32; all but prompt lookup ask for all their tokens in every step."""
    tree = method.configuration(TARGET, model)
    engine = tree["target_config"].setdefault("engine_kwargs", {})
    engine |= MODEL | {"adaptive": not method.kind, "max_sessions": at_once}
    for head in engine.get("heads", ()):
        head["probe"] = False  # which would refuse heads that were hardly trained
    if method.place is Place.POOL:
        draft = tree["draft_config"].setdefault("engine_kwargs", {})
        if method.kind == "model":
            draft |= MODEL
        if method.kind == "head":
            draft |= {"dtype": MODEL["dtype"], "device": MODEL["device"]}
        if method.kind == "cascade":
            draft["drafters"][0]["options"] = MODEL
    return tree


def requests(prompts: Sequence[Prompt], max_tokens: int) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt at each temperature."""
    return [
        (prompt, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i, ignore_eos=True))
        for temperature in TEMPERATURES
        for i, prompt in enumerate(prompts)
    ]


def plain_results(asked: Sequence[tuple[Prompt, SamplingParams]]) -> list[Result]:
    """What one process without a draft writes, a token at a time."""
    config = LocalConfig(target={**MODEL, "path": TARGET}, worker="thread")
    speculation = SpeculationParams(mode=Mode.PLAIN)
    with LocalPipeline(config) as pipeline:
        running = [pipeline.submit(list(prompt.token_ids), sampling, speculation) for prompt, sampling in asked]
        return [generation.result for generation in running]


async def streamed(
    address: str, asked: Sequence[tuple[Prompt, SamplingParams]], mode: Mode, at_once: int
) -> list[Result]:
    """The results of a service, ``at_once`` streams at a time."""
    places = asyncio.Semaphore(at_once)
    async with AsyncClient(address) as client:

        async def ask(prompt: Prompt, sampling: SamplingParams) -> Result:
            async with places:
                speculation = SpeculationParams(mode=mode)
                stream = client.generate(prompt.token_ids, sampling, speculation=speculation, timeout_s=600.0)
                return await stream.result

        return [*await asyncio.gather(*(ask(*each) for each in asked))]


def row(method: Method, counted: Counted) -> tuple[str, ...]:
    """A line of the table."""
    share = f"{counted.accepted / counted.drafted:.3f}" if counted.drafted else "-"
    own = f"{counted.accepted}/{counted.drafted}"
    per_step = f"{counted.tokens / max(counted.rounds, 1):.3f}"
    return method.name, str(counted.texts), str(counted.different), own, share, per_step


def main() -> int:
    """Serves and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--at-once", type=int, default=8, help="streams at a time (default 8)")
    parser.add_argument("--training-steps", type=int, default=20, help="of heads and of PARD (default 20)")
    parser.add_argument("--heads", type=Path, help="folder that keeps what is trained here for the next run")
    names = [method.name for method in METHODS if method.kind != "plugin"]
    parser.add_argument("--method", action="append", default=[], choices=names, metavar="NAME", help=", ".join(names))
    args = parser.parse_args()
    os.environ.update({name: value for name, value in PATIENCE.items() if name not in os.environ})
    asked = requests(held_out_prompts(load_tokenizer(str(TARGET_DIR)), args.prompts), args.max_tokens)
    command = f"python benchmarks/methods_service.py --prompts {args.prompts} --max-tokens {args.max_tokens}"
    command += "".join(f" --method '{name}'" for name in args.method)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"{command}     ({cores} cores with a load of {load:.0f} at the start)\n")
    plain, wrong = plain_results(asked), False
    width = max(map(len, names))
    header = ("method", "texts", "different", "accepted/drafted", "share", "tokens/step")
    widths = (width, *map(len, header[1:]))

    def show(cells: Sequence[str]) -> None:
        print("  ".join([cells[0].ljust(width), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]))
        sys.stdout.flush()

    show(header)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        for method, model in served(made, args.heads or made / "heads", args.method, args.training_steps):
            counted = Counted()
            try:
                with ServiceProcess(configuration(method, model, args.at_once)) as service:
                    results = asyncio.run(streamed(service.address, asked, method.mode, args.at_once))
            except PacelineError as error:
                print(f"{method.name}: {error}", flush=True)
                wrong = True
                continue
            for result, expected in zip(results, plain, strict=True):
                counted.add(method, result, expected)
            wrong = wrong or counted.different > 0
            show(row(method, counted))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
