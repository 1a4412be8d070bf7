"""The report of a benchmark in plain text, and the facts about the machine that belong to it."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from paceline.bench.records import Ratio, RequestRecord, Share, Summary, best_of, one_token_steps, summarise
from paceline.workers import available_cores

STAND_IN = "grown from the embedded pair, stands in for large weights"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What ran as target or draft."""

    path: str
    num_parameters: int | None
    grown_from: int | None
    """Parameters of the model whose function it computes; None: it is what it is."""

    def describe(self) -> str:
        """One phrase."""
        size = "unknown size" if self.num_parameters is None else f"{self.num_parameters / 1e6:.1f} M parameters"
        if self.grown_from is None:
            return size
        return f"{size} ({STAND_IN}; computes the function of {self.grown_from / 1e6:.1f} M)"


def model_facts(path: str) -> ModelFacts:
    """Read from a checkpoint directory, without its weights; a hub id tells nothing."""
    directory = Path(path).expanduser()
    if not (directory / "config.json").is_file():
        return ModelFacts(path, None, None)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    total = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                size = 1
                for length in tensor["shape"]:
                    size *= length
                total += size
    return ModelFacts(directory.name, total or None, config.get("grown_from_num_parameters"))


def environment() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(available_cores()) or None,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "threads_per_engine": 1,
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def as_json(settings: dict[str, Any], facts: dict[str, ModelFacts], records: Sequence[RequestRecord]) -> dict[str, Any]:
    """What ``--json`` writes: settings, environment, models, summaries and every request."""
    target_s, draft_s = one_token_steps(records)
    return {
        "environment": environment(),
        "settings": settings,
        "models": {role: asdict(fact) | {"text": fact.describe()} for role, fact in facts.items()},
        "one_token_step_s": {"target": target_s, "draft": draft_s},
        "summaries": [asdict(summary) for summary in summarise(records)],
        "requests": [record.to_json() for record in records],
    }


def render(facts: dict[str, ModelFacts], dtype: str, records: Sequence[RequestRecord], title: str) -> str:
    """The tables."""
    machine = environment()
    lines = [
        title,
        (
            f"cpu {machine['cpu']}, {machine['cores']} cores, one torch thread per engine; python "
            f"{machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, {dtype}"
        ),
        *(f"{role}: {fact.describe()}" for role, fact in facts.items()),
    ]
    summaries = summarise(records)
    for temperature in dict.fromkeys(s.temperature for s in summaries):
        of_it = [s for s in summaries if s.temperature == temperature]
        lines += ["", f"temperature {temperature:g}", *_speed_table(of_it), "", *_draft_table(of_it)]
        lines += _comparison(of_it, temperature)
    lines += ["", *_step_ratio(records), *_NOTES]
    return "\n".join(lines)


_NOTES = (
    (
        "tokens/s: decode tokens over decode seconds, totals; x plain: its ratio to plain decoding with the 95 % "
        "bootstrap interval"
    ),
    (
        "over prompts x repeats and [min..max] of single ones; e2e: with prefill. tok/step: decode tokens per target "
        "step, next token included."
    ),
    (
        "hit: the tree held a continuation of the outcome when the step ended. same: requests whose tokens equal "
        "plain decoding's."
    ),
)


def _speed_table(summaries: Sequence[Summary]) -> list[str]:
    rows = [("method", "tokens/s", "x plain", "e2e tok/s", "x plain", "tok/step", "same")]
    for s in summaries:
        same = "-" if s.identical is None else f"{s.identical.hits}/{s.identical.events}"
        rows.append(
            (
                s.method, f"{s.decode_tokens_per_s:.1f}", _ratio(s.ratio), f"{s.end_to_end_tokens_per_s:.1f}",
                "-" if s.end_to_end_ratio is None else f"{s.end_to_end_ratio.value:.2f}",
                f"{s.tokens_per_step:.2f}", same,
            )
        )  # fmt: skip
    return table(rows)


def _draft_table(summaries: Sequence[Summary]) -> list[str]:
    rows = [
        (
            "method", "accepted", "hit after rejection", "hit after full acc.", "hit after none",
            "target step", "draft step (nodes)", "rounds by cause",
        )
    ]  # fmt: skip
    for s in summaries:
        causes = " ".join(f"{cause}:{count}" for cause, count in sorted(s.causes.items()))
        draft = "-" if s.draft_step_s is None else f"{s.draft_step_s * 1e3:.2f} ms ({s.draft_step_nodes:.1f})"
        rows.append(
            (
                s.method, "-" if s.acceptance is None else f"{s.acceptance:.3f}", _share(s.after_rejection),
                _share(s.after_full_acceptance), _share(s.after_no_proposal),
                "-" if s.target_step_s is None else f"{s.target_step_s * 1e3:.2f} ms", draft, causes,
            )
        )  # fmt: skip
    return table(rows)


def _comparison(summaries: Sequence[Summary], temperature: float) -> list[str]:
    overlapped = best_of(summaries, "overlapped", temperature)
    sequential = best_of(summaries, "sequential", temperature)
    if overlapped is None or sequential is None or sequential.decode_tokens_per_s == 0:
        return []
    value = overlapped.decode_tokens_per_s / sequential.decode_tokens_per_s
    return [f"{overlapped.method} against {sequential.method}, the best of its mode: {value:.2f}"]


def _step_ratio(records: Sequence[RequestRecord]) -> list[str]:
    target_s, draft_s = one_token_steps(records)
    if target_s is None or draft_s is None:
        return []
    return [
        (
            f"one-token steps, measured: target {target_s * 1e3:.2f} ms, draft {draft_s * 1e3:.2f} ms, "
            f"draft / target {draft_s / target_s:.3f}"
        )
    ]


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) [{ratio.least:.2f}..{ratio.most:.2f}]"


def _share(share: Share) -> str:
    return "-" if share.rate is None else f"{share.rate:.3f} of {share.events}"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first to the left, the others to the right, the last as it comes."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
