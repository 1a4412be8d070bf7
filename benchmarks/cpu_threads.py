"""Tokens/s of one session by layouts of the same two cores: `python benchmarks/cpu_threads.py`.

A grown target and the embedded draft, compiled, in bfloat16. The pipelines stand side by side and take turns, prompt by
prompt; one that is not asked sleeps. Every text must be that of plain decoding on one core.

    plain        the target alone, on one core and with its products shared by two (cpu_threads)
    co-located   the draft model as a head in the target's process, K = 4, on one core and on two
    overlapped   the draft on the second core

The last table is what the controllers of the co-located targets have learned in the end, in ms: their steps by tokens,
and the depths of the draft by leaves. A depth of one leaf is a token of a path by one call.
``tests/plan/test_layouts.py`` forecasts with them.

    python benchmarks/cpu_threads.py [--rounds 5] [--prompts 4] [--max-tokens 64] [--size 150M] [--temperatures 0 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from paceline.checkpoint.files import embedded_paths
from paceline.cli.table import table
from paceline.config import DraftModel, HeadOptions, LocalConfig, TargetModel
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline_bench.grow import parse_size
from paceline_bench.models import grown
from paceline_bench.prompts import held_out_prompts
from paceline_bench.steps import WatchedFactory, learning_target

_K = 4
_SIZES, _LEAVES = (1, 2, 4, 5, 8, 9, 16), (1, 2, 4)


def layouts(target: str, draft: str) -> dict[str, LocalConfig]:
    """The configurations, by name; the first one is the baseline."""
    head = HeadOptions(method="draft_model", model=draft, num_speculative_tokens=_K)
    model = {"path": target, "dtype": "bfloat16", "compile": True}
    return {
        "plain, 1 core": LocalConfig(target=TargetModel(**model)),
        "plain, 2 threads": LocalConfig(target=TargetModel(**model, cpu_threads=2)),
        "co-located, 1 core": LocalConfig(target=TargetModel(**model, heads=[head])),
        "co-located, 2 threads": LocalConfig(target=TargetModel(**model, heads=[head], cpu_threads=2)),
        "overlapped, 2 cores": LocalConfig(
            target=TargetModel(**model), draft=DraftModel(path=draft, dtype="bfloat16", compile=True)
        ),
    }


def built(config: LocalConfig, learned: Path) -> LocalPipeline:
    """A layout; a target with a head writes what it learns to the file."""
    if not config.target.heads:
        return LocalPipeline(config)
    return LocalPipeline(config, target_factory=WatchedFactory(config.target_setup(), learned, learning_target))


def show_learned(files: Path) -> None:
    """Prints the table of what targets that have ended have written to ``files``."""
    rows = [("learned, ms", *(f"step of {n}" for n in _SIZES), *(f"depth of {n}" for n in _LEAVES))]
    for file in sorted(files.iterdir()):
        learned = json.loads(file.read_text(encoding="utf-8"))
        steps, depths = dict(learned["target_s"]), dict(learned["draft_s"])
        times = (*(steps[n] for n in _SIZES), *(depths.get(n) for n in _LEAVES))
        rows.append((file.name, *("-" if seconds is None else f"{1e3 * seconds:.2f}" for seconds in times)))
    print(*table(rows), sep="\n")


def main() -> None:
    """Measures, compares the texts, prints a table for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--size", type=parse_size, default=parse_size("150M"), help="parameters of the target")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()
    target, draft = map(str, embedded_paths())
    with ExitStack() as stack:
        configs = layouts(grown(target, args.size, "bfloat16"), draft)
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")))
        stack.callback(show_learned, files)
        pipelines = {name: stack.enter_context(built(config, files / name)) for name, config in configs.items()}
        baseline = next(iter(pipelines))
        prompts = held_out_prompts(pipelines[baseline].tokenizer, args.prompts)
        for temperature in args.temperatures:
            rates: dict[str, list[float]] = {name: [] for name in pipelines}
            prefills: dict[str, list[float]] = {name: [] for name in pipelines}
            for turn in range(args.rounds + 1):  # the first round warms up
                spent = dict.fromkeys(pipelines, 0.0)
                num_tokens = 0
                for index, prompt in enumerate(prompts):
                    sampling = SamplingParams(
                        max_tokens=args.max_tokens, temperature=temperature, seed=index, ignore_eos=True
                    )
                    texts = {}
                    for name, pipeline in pipelines.items():
                        mode = Mode.PLAIN if name.startswith("plain") else Mode.OVERLAPPED
                        salt = f"{turn}.{temperature}"  # no prompt is found in the cache
                        result = pipeline.generate(
                            prompt.token_ids, sampling, SpeculationParams(mode=mode), cache_salt=salt
                        ).result
                        texts[name] = result.token_ids
                        spent[name] += result.timing.decode_s
                        if turn:
                            prefills[name].append(result.timing.prefill_s)
                    if any(text != texts[baseline] for text in texts.values()):
                        raise SystemExit(f"texts differ: prompt {index} at temperature {temperature:g}")
                    num_tokens += args.max_tokens - 1
                for name in pipelines if turn else ():
                    rates[name].append(num_tokens / spent[name])
            rows: list[tuple[str, ...]] = [("layout", "tokens/s", "quartiles", "of plain", "prefill ms")]
            for name, values in rates.items():
                ratio = statistics.median(a / b for a, b in zip(values, rates[baseline], strict=True))
                low, _, high = statistics.quantiles(values) if len(values) > 1 else values * 3
                rows.append(
                    (
                        name,
                        f"{statistics.median(values):.1f}",
                        f"{low:.1f} .. {high:.1f}",
                        f"{ratio:.2f}",
                        f"{1e3 * statistics.median(prefills[name]):.0f}",
                    )
                )
            print(f"temperature {temperature:g}", *table(rows), "", sep="\n", file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
