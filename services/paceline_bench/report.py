"""The report of a benchmark in plain text, and the facts about the machine that belong to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cli.table import table
from paceline_bench.latency import METRICS, latencies
from paceline_bench.machine import environment, floor_s
from paceline_bench.records import Ratio, RequestRecord, Share, Summary, best_of, one_token_steps, summarise

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


def as_json(
    settings: dict[str, Any],
    facts: dict[str, ModelFacts],
    records: Sequence[RequestRecord],
    *,
    floor: Mapping[str, Any] | None = None,
    timelines: Sequence[Mapping[str, Any]] = (),
    label: str = "",
) -> dict[str, Any]:
    """What ``--json`` writes: settings, environment, models, summaries and every request."""
    target_s, draft_s = one_token_steps(records)
    return {
        "label": label,
        "environment": environment(),
        "settings": settings,
        "models": {role: asdict(fact) | {"text": fact.describe()} for role, fact in facts.items()},
        "floor": dict(floor or {}),
        "one_token_step_s": {"target": target_s, "draft": draft_s},
        "summaries": [asdict(summary) for summary in summarise(records)],
        "timelines": list(timelines),
        "requests": [record.to_json() for record in records],
    }


def describe_machine(machine: Mapping[str, Any], dtype: str) -> str:
    """One line."""
    flags = " ".join(machine.get("cpu_flags", ()))
    load = machine.get("load_average", ["?"])[0]
    return (
        f"cpu {machine['cpu']} ({flags}), {machine['cores']} cores, load {load}, one torch thread per engine; python "
        f"{machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}, {dtype}; commit "
        f"{machine.get('commit')}"
    )


def describe_floor(floor: Mapping[str, Any], records: Sequence[RequestRecord]) -> list[str]:
    """How near the one-token steps of plain decoding come to what the memory allows; [] where it was not measured."""
    context = mean_context(records)
    least_s, (step_s, _) = floor_s(floor, "target", context), one_token_steps(records)
    if least_s is None or step_s is None:
        return []
    weights = floor["target"]["weight_bytes"] / 1e6
    read = (
        f"{weights:.0f} MB of weights and the KV of {context:.0f} tokens at {floor['read_bytes_per_s'] / 1e9:.1f} GB/s"
    )
    return [
        (
            f"floor of a one-token target step: {least_s * 1e3:.2f} ms ({read}, as one core reads), measured "
            f"{step_s * 1e3:.2f} ms: {least_s / step_s:.0%} of the floor's rate"
        )
    ]


def mean_context(records: Sequence[RequestRecord]) -> float:
    """KV positions of a session in the middle of its decoding, mean over all."""
    lengths = [r.prompt_tokens + r.num_tokens / 2 for r in records]
    return sum(lengths) / len(lengths) if lengths else 0.0


def render(
    facts: dict[str, ModelFacts],
    dtype: str,
    records: Sequence[RequestRecord],
    title: str,
    floor: Mapping[str, Any] | None = None,
) -> str:
    """The tables."""
    lines = [
        title,
        describe_machine(environment(), dtype),
        *(f"{role}: {fact.describe()}" for role, fact in facts.items()),
        *describe_floor(floor or {}, records),
    ]
    summaries = summarise(records)
    for temperature in dict.fromkeys(s.temperature for s in summaries):
        of_it = [s for s in summaries if s.temperature == temperature]
        lines += ["", f"temperature {temperature:g}", *_speed_table(of_it), "", *_draft_table(of_it)]
        lines += _comparison(of_it, temperature)
        lines += ["", *latency_table(of_it, [r for r in records if r.temperature == temperature])]
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
        "gap: between two chunks; ITL: per token, 0 for those that come with another; TPOT: per request, decode time "
        "per token."
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


def latency_table(summaries: Sequence[Summary], records: Sequence[RequestRecord]) -> list[str]:
    """Percentiles in milliseconds."""
    rows: list[Sequence[str]] = [("p50/p90/p95/p99 in ms", *(name.upper() for name in METRICS))]
    for s in summaries:
        found = latencies(r for r in records if r.method == s.method)
        rows.append((s.method, *(milliseconds(found[name]) for name in METRICS)))
    return table(rows)


def milliseconds(values: Mapping[int, float | None]) -> str:
    """Percentiles with slashes between them."""
    return "/".join("-" if v is None else f"{v * 1e3:.1f}" if v < 0.1 else f"{v * 1e3:.0f}" for v in values.values())


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
