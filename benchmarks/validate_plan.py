"""`paceline plan` against the measurements of a run: `python benchmarks/validate_plan.py [FILE ...]`.

FILE is what `paceline bench local --json` has written. Step times, acceptance, hits after a rejection and the gaps of
lock step are taken from the run; tokens per second and per round, the hit rate and the best K are predicted and
compared with it. So what is tested is the model of a round, not what goes into it. "possible" is the simulation with
as many hits as measured: how much of it overlapped decoding reaches is the last column.

A FILE of `--cpu-threads` is also compared with the rows of targets whose products several cores share.

--service tests several sessions at once, and harder: of that run only the steps of plain decoding at each load are
used, and the drafts and statistics are those of FILE.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.table import table
from paceline.plan.measured import Comparison, Measurements, compare, read, read_service
from paceline.types import Mode

RESULTS = Path(__file__).parent / "results"
_HEADER = (
    *("", "sessions", "tokens/s", "closed form", "error", "simulation", "error"),
    *("tok/round", "closed form", "hits", "closed form", "possible", "reached"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="predictions of the plan's model against measurements")
    pair, service = [RESULTS / f"local-{n}.json" for n in ("light", "heavy")], RESULTS / "service-150m.json"
    parser.add_argument("files", type=Path, nargs="*", default=pair)
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated for each row (default 60)")
    parser.add_argument("--service", type=Path, default=service, help="of paceline bench serve, with FILE's pair")
    options = parser.parse_args()
    runs = [(path, measurements) for path in options.files for measurements in read(path)]
    found = [(path, m, show(path, m, options.seconds)) for path, m in runs]
    print("one session:")
    print_errors([c for _, _, comparisons in found for c in comparisons])
    for path, measurements, comparisons in found:
        overlapped = [c for c in comparisons if c.row.mode is Mode.OVERLAPPED]
        if overlapped:
            best = max(overlapped, key=lambda c: c.row.tokens_per_s)
            run = f"{path.name}, temperature {measurements.temperature:g}"
            print(f"{run}: {best.row.name} reaches {best.reached:.1%} of what is possible")
        print_cores(path, measurements)
    if options.service:
        print()
        several = read_service(options.service, runs[0][1].system)
        print_errors([c for measurements in several for c in show(options.service, measurements, options.seconds)])


def show(path: Path, measurements: Measurements, seconds: float) -> list[Comparison]:
    """Prints one temperature of a run, with the inputs that were taken from it."""
    comparisons, system = compare(measurements, seconds=seconds), measurements.system
    print(
        f"{path.name}, temperature {measurements.temperature:g}: acceptance {system.outcomes.acceptance:.3f}, "
        f"r {system.outcomes.power:.2f}, target step {system.target.seconds(1) * 1e3:.1f} ms, draft step "
        f"{system.draft.seconds(1) * 1e3:.2f} ms, link {system.link_s * 1e3:.2f} ms, "
        f"{system.draft_width} nodes a draft step"
    )
    print("\n".join(table([_HEADER, *map(row, comparisons)])))
    print(best_k(comparisons))
    return comparisons


def print_errors(everything: list[Comparison]) -> None:
    """Prints the errors of tokens per second in closed form, by mode."""
    for mode in Mode:
        if errors := [abs(c.error) for c in everything if c.row.mode is mode]:
            mean = sum(errors) / len(errors)
            print(f"{mode.value}: mean error {mean:.1%}, most {max(errors):.1%}, {len(errors)} rows")


def print_cores(path: Path, measurements: Measurements) -> None:
    """Prints the rows of ``--cpu-threads`` with their forecasts, of the same run."""
    rows = [("", "cores of the target", "K", "tokens/s", "closed form", "error")]
    for core_row in measurements.core_rows:
        rate, forecast = core_row.tokens_per_s, core_row.predicted(measurements).tokens_per_s
        numbers = (f"{rate:.1f}", f"{forecast:.1f}", f"{forecast / rate - 1:+.1%}")
        rows.append((core_row.drafting.value, str(core_row.cores), str(core_row.k or "-"), *numbers))
    if rows[1:]:
        print(f"{path.name}, temperature {measurements.temperature:g}, by the cores that share a target's products:")
        print("\n".join(table(rows)))


def row(c: Comparison) -> tuple[str, ...]:
    """One line of the table."""
    rates = [each.tokens_per_s for each in (c.row, c.predicted, c.simulated)]
    hits = ["-" if each.hit_rate is None else f"{each.hit_rate:.3f}" for each in (c.row, c.predicted)]
    return (
        *(c.row.name, str(c.row.sessions), f"{rates[0]:.1f}", f"{rates[1]:.1f}", f"{c.error:+.1%}", f"{rates[2]:.1f}"),
        *(f"{rates[2] / rates[0] - 1:+.1%}", f"{c.row.tokens_per_round:.2f}", f"{c.predicted.tokens_per_round:.2f}"),
        *hits,
        *((f"{c.possible.tokens_per_s:.1f}", f"{c.reached:.1%}") if c.row.mode is Mode.OVERLAPPED else ("-", "-")),
    )


def best_k(comparisons: list[Comparison]) -> str:
    """The K of each mode that was fastest, and that the model takes for the fastest of those measured."""
    found = []
    for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED):
        of_mode = [c for c in comparisons if c.row.mode is mode]
        if len({c.row.k for c in of_mode}) > 1:
            measured = max(of_mode, key=lambda c: c.row.tokens_per_s).row.k
            predicted = max(of_mode, key=lambda c: c.predicted.tokens_per_s).row.k
            found.append(f"{mode.value} K={measured}, predicted {predicted}")
    return "fastest: " + "; ".join(found) + "\n" if found else ""


if __name__ == "__main__":
    main()
