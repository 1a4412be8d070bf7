"""The controller against every fixed setting: `python benchmarks/controller.py --grow-target 150M`.

Two pipelines with the same models: one adapts, the other (`adaptive: false`) has as many draft tokens in every step as
a request allows. For every workload the settings take turns, in an order that rotates: the adaptive one, and K = 0
(plain decoding) to 8 on the fixed one; a unit is one request per session, all at once, and the same requests for every
setting, whose prompts are in the KV cache already. Reported is, with 95 % bootstrap intervals over units in pairs, the
tokens per second of the controller over those of the best fixed K, and over those of plain decoding. The best of nine
is chosen by the same units that it is compared by, so it is also the luckiest of them, and the first ratio is a little
low for that.

Drafts: `light`, the embedded one; `heavy`, grown by `--grow-draft`; `random`, with random weights; `slow`, ten times
as slow per tree step; `dead`, whose messages are all lost.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from paceline.cli.table import table
from paceline.config import DraftModel, DraftSetup, LocalConfig, TargetModel, cache_dir
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.local import LocalPipeline
from paceline.runtime.build import EngineSpec
from paceline.runtime.workers import Emit, Engine, EngineFactory
from paceline.types import Mode, Rendezvous, SamplingParams, SpeculationParams
from paceline_bench.arithmetic import Amount, Ratio, rate, ratio
from paceline_bench.grow import parse_size
from paceline_bench.machine import environment
from paceline_bench.models import grown
from paceline_bench.prompts import Prompt, held_out_prompts

DRAFTS = ("light", "heavy", "random", "slow", "dead")
AUTO = "auto"
FIXED = tuple(range(9))
_TIMES_SLOWER = 10
_STEP_S = 0.004
"""Seconds of a tree step of the embedded draft, roughly."""
_WARM_UP_TOKENS = 48


@dataclass(frozen=True, slots=True)
class SlowFactory:
    """Builds a draft whose every tree step takes `delay_s` longer."""

    setup: DraftSetup
    delay_s: float
    rendezvous: Rendezvous | None = None

    def __call__(self, emit: Emit[Any]) -> Engine[Any]:
        """Builds the engine in its worker."""
        engine = EngineSpec(self.setup, self.rendezvous).build(emit)
        drafter = engine._drafter  # type: ignore[attr-defined]
        expand = drafter.expand

        def slowly(leaves: Any) -> Any:
            time.sleep(self.delay_s)
            return expand(leaves)

        drafter.expand = slowly
        return engine


@dataclass(frozen=True, slots=True)
class DeadFactory:
    """Builds an engine that never answers, as if all its messages were lost."""

    def __call__(self, emit: Emit[Any]) -> Engine[Any]:
        """Builds the engine in its worker."""
        return _Silent()


class _Silent:
    def receive(self, messages: Sequence[Any]) -> None:
        pass

    def step(self) -> bool:
        return False

    def wait_s(self) -> float | None:
        return None

    def close(self) -> None:
        pass


def random_draft() -> str:
    """Directory of a draft of the embedded one's shape, with its tokenizer and random weights."""
    destination = cache_dir() / "grown" / f"{DRAFT_DIR.name}-random"
    if not (destination / "config.json").is_file():
        model = LlamaForCausalLM.from_pretrained(DRAFT_DIR, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.05, generator=generator)
        model.save_pretrained(destination)
        AutoTokenizer.from_pretrained(DRAFT_DIR, trust_remote_code=False).save_pretrained(destination)
    return str(destination)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload."""

    draft: str
    temperature: float
    sessions: int
    tokens_per_s: dict[str, float]
    """Speed-ups of ``auto`` and of each K."""
    best: str
    over_best: Ratio
    over_plain: Ratio
    different: int
    """Number of requests whose tokens are not those of plain decoding; 0 if all is well."""


class Bench:
    """Both pipelines over one pair. A context manager."""

    def __init__(self, args: argparse.Namespace, draft: str, target: str) -> None:
        self._args, self._draft = args, draft
        path = {"heavy": lambda: grown(str(DRAFT_DIR), args.grow_draft, "bfloat16"), "random": random_draft}
        model = {"dtype": "bfloat16", "compile": args.compile}
        self._config = LocalConfig(
            target=TargetModel.model_validate({"path": target, "max_sessions": max(args.sessions), **model}),
            draft=DraftModel.model_validate({"path": path.get(draft, lambda: str(DRAFT_DIR))(), **model}),
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[dict[str, LocalPipeline]]:
        """The pipeline that adapts and the one that does not."""
        with contextlib.ExitStack() as stack:
            pipelines = {}
            for name, adaptive in ((AUTO, True), ("fixed", False)):
                target = self._config.target.model_copy(update={"adaptive": adaptive})
                config = self._config.model_copy(update={"target": target})
                pipelines[name] = stack.enter_context(LocalPipeline(config, draft_factory=self._factory(config)))
            yield pipelines

    def _factory(self, config: LocalConfig) -> EngineFactory[Any, Any] | None:
        if self._draft == "slow" and (setup := config.draft_setup()) is not None:
            return SlowFactory(setup, (_TIMES_SLOWER - 1) * _STEP_S)
        return DeadFactory() if self._draft == "dead" else None

    def compare(self, pipelines: dict[str, LocalPipeline], temperature: float, sessions: int) -> Comparison:
        """All settings in turn."""
        args = self._args
        settings = [AUTO, *map(str, args.fixed)]
        prompts = held_out_prompts(pipelines[AUTO].tokenizer, sessions * args.repeats, args.seed)
        amounts: dict[str, list[Amount]] = {name: [] for name in settings}
        texts: dict[str, list[tuple[int, ...]]] = {name: [] for name in settings}
        for name in settings:
            _unit(pipelines, name, prompts[:sessions], temperature, _WARM_UP_TOKENS)
        until = time.monotonic() + args.settle
        while time.monotonic() < until:
            _unit(pipelines, AUTO, prompts[:sessions], temperature, args.max_tokens)
        for repeat in range(args.repeats):
            unit = prompts[repeat * sessions : (repeat + 1) * sessions]
            for name in (AUTO, "0"):  # both find their prompts cached: the fixed one sees them nine times
                _unit(pipelines, name, unit, temperature, 2)
            for name in settings[repeat % len(settings) :] + settings[: repeat % len(settings)]:
                amount, token_ids = _unit(pipelines, name, unit, temperature, args.max_tokens)
                amounts[name].append(amount)
                texts[name] += token_ids
        speeds = {name: rate(of) for name, of in amounts.items()}
        best = max(settings[1:], key=speeds.__getitem__)
        over_best, over_plain = (ratio(amounts[AUTO], amounts[other]) for other in (best, "0"))
        assert over_best is not None
        assert over_plain is not None
        different = sum(a != b for name in settings for a, b in zip(texts[name], texts["0"], strict=True))
        return Comparison(self._draft, temperature, sessions, speeds, best, over_best, over_plain, different)


def unit(
    pipeline: LocalPipeline, k: int, prompts: Sequence[Prompt], temperature: float, max_tokens: int
) -> tuple[Amount, list[tuple[int, ...]]]:
    """One request per prompt, all at once: tokens after each one's first, from the first of all to the last.

    ``k``: draft tokens that a request allows; 0 for plain decoding.
    """
    speculation = SpeculationParams(mode=Mode.OVERLAPPED if k else Mode.PLAIN, max_draft_tokens=max(k, 1))
    started = time.perf_counter()
    generations = [
        pipeline.submit(
            prompt.token_ids,
            SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i, ignore_eos=True),
            speculation,
        )
        for i, prompt in enumerate(prompts)
    ]
    results = [generation.result for generation in generations]
    seconds = time.perf_counter() - started
    return Amount(sum(r.usage.completion_tokens for r in results), seconds), [r.token_ids for r in results]


def _unit(
    pipelines: dict[str, LocalPipeline], setting: str, prompts: Sequence[Prompt], temperature: float, max_tokens: int
) -> tuple[Amount, list[tuple[int, ...]]]:
    """``unit`` of one setting."""
    if setting == AUTO:
        return unit(pipelines[AUTO], max(FIXED), prompts, temperature, max_tokens)
    return unit(pipelines["fixed"], int(setting), prompts, temperature, max_tokens)


def render(comparisons: Sequence[Comparison]) -> str:
    """One row for each workload."""
    rows = [["draft", "T", "sessions", "auto", "plain", "best fixed", "auto / best fixed", "auto / plain"]]
    for c in comparisons:
        best = f"K={c.best} {c.tokens_per_s[c.best]:.1f}"
        speeds = [f"{c.tokens_per_s[AUTO]:.1f}", f"{c.tokens_per_s['0']:.1f}", best]
        rows.append([c.draft, f"{c.temperature:g}", str(c.sessions), *speeds, shown(c.over_best), shown(c.over_plain)])
    lines = table(rows)
    if worst := min((c.over_best.value for c in comparisons), default=None):
        least = min(c.over_plain.value for c in comparisons)
        lines += ["", f"least auto / best fixed {worst:.3f}, least auto / plain {least:.3f}"]
    if different := sum(c.different for c in comparisons):
        lines.append(f"{different} requests differ from plain decoding")
    return "\n".join(lines)


def shown(value: Ratio) -> str:
    """With its interval."""
    return f"{value.value:.3f} ({value.low:.3f}-{value.high:.3f})"


def main() -> int:
    """Returns 1 if a text differs from plain decoding's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--grow-target", type=_size, metavar="SIZE", help="cost of a larger target, e.g. 150M")
    parser.add_argument("--grow-draft", type=_size, default=15_000_000, metavar="SIZE", help="the heavy one's (15M)")
    parser.add_argument("--drafts", type=_several(str), default=DRAFTS, metavar="NAME,...", help=", ".join(DRAFTS))
    parser.add_argument("--temperatures", type=_several(float), default=(0.0, 1.0), metavar="T,...")
    parser.add_argument("--sessions", type=_several(int), default=(1, 4, 16), metavar="N,...")
    parser.add_argument("--fixed", type=_several(int), default=FIXED, metavar="K,...", help="0 is always among them")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--repeats", type=int, default=4, metavar="R")
    parser.add_argument("--settle", type=float, default=4.0, metavar="S", help="seconds of each load beforehand (4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if unknown := [name for name in args.drafts if name not in DRAFTS]:
        parser.error(f"--drafts names {unknown[0]!r}: {', '.join(DRAFTS)} are allowed")
    if wrong := [k for k in args.fixed if k not in FIXED]:
        parser.error(f"--fixed names {wrong[0]}: 0 to {max(FIXED)} are allowed")
    if min(args.sessions) < 1 or args.max_tokens < 2 or args.repeats < 1:
        parser.error("--sessions and --repeats must be at least 1, --max-tokens at least 2")
    args.fixed = tuple(dict.fromkeys((0, *args.fixed)))
    target = grown(str(TARGET_DIR), args.grow_target, "bfloat16") if args.grow_target else str(TARGET_DIR)
    comparisons = []
    for draft in args.drafts:
        bench = Bench(args, draft, target)
        with bench.running() as pipelines:
            for sessions in args.sessions:
                for temperature in args.temperatures:
                    comparisons.append(bench.compare(pipelines, temperature, sessions))
                    print(render(comparisons[-1:]).splitlines()[1], file=sys.stderr, flush=True)
    print(render(comparisons))
    if args.json is not None:
        settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        data = {"environment": environment(), "settings": settings, "workloads": [asdict(c) for c in comparisons]}
        args.json.write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
    return 1 if any(c.different for c in comparisons) else 0


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _several(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(dict.fromkeys(kind(part.strip()) for part in text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
