"""``paceline check``: what ``paceline serve`` would run, the memory that it takes, and what keeps it from starting.

Reads files and ports, loads nothing. Exit status: 0 it may start, 1 it cannot; the others as in ``exit.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from paceline.checkpoint.size import gib
from paceline.cli.exit import EXIT_DONE, EXIT_FAILED
from paceline.cli.serve import add_config_flags, read_config
from paceline.cli.table import table, working
from paceline.config import ServiceConfig
from paceline.preflight.estimate import RAY_BYTES, MemoryEstimate
from paceline.preflight.service import Examination, Pool, examine
from paceline.types import PAGE_SIZE

_UNKNOWN = "?"
_COMPILER = "about 0.2 GiB"
"""Measured with the embedded target: 189 MiB until the replica ends."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline check``."""
    parser.description = "Reports what memory each replica takes, and what keeps the service from starting here."
    add_config_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Runs ``paceline check``."""
    config = read_config(args)
    with working("reading the checkpoints"):
        examination = examine(config, cores=False)  # as ``serve`` does: its Ray is told of as many cores as it takes
    print(json.dumps(as_json(examination), indent=2) if args.json else "\n".join(report(config, examination)))
    return EXIT_DONE if examination.may_start else EXIT_FAILED


def as_json(examination: Examination) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {
        "may_start": examination.may_start,
        "left_bytes": examination.left_bytes,
        "needed_bytes": examination.machine_bytes,
        "ray_bytes": RAY_BYTES,
        "pools": [_pool_as_json(pool) for pool in examination.pools],
        "findings": [asdict(finding) for finding in examination.findings],
    }


def _pool_as_json(pool: Pool) -> dict[str, Any]:
    found, estimate = asdict(pool), pool.estimate
    if estimate is not None:
        found["estimate"] |= {"least_bytes": estimate.least_bytes, "total_bytes": estimate.total_bytes}
    return found


def report(config: ServiceConfig, examination: Examination) -> Iterator[str]:
    """The lines that are printed."""
    left = examination.left_bytes
    assert left is not None, "the replicas run here"
    yield from table([_HEADER, *(_row(pool) for pool in examination.pools)], sys.stdout)
    yield ""
    for pool in examination.pools:
        yield from _remarks(config, pool)
    yield f"Ray and Serve take about {gib(RAY_BYTES)} in addition to the replicas."
    yield f"Together {gib(examination.machine_bytes)}; this machine has {gib(left)} left."
    yield ""
    yield from (f"{finding.severity}: {finding.message}" for finding in examination.findings)
    yield "The service may start." if examination.may_start else "The service would not start."


_HEADER = ("MiB", "replicas", "ranks", "process", "weights", "KV", "trees", "workspace", "each", "all")


def _row(pool: Pool) -> tuple[str, ...]:
    estimate = pool.estimate
    if estimate is None:
        return (pool.key, str(pool.num_replicas), *[_UNKNOWN] * (len(_HEADER) - 2))
    counts = (str(pool.num_replicas), str(estimate.num_ranks))
    parts = (
        estimate.process_bytes,
        estimate.weights_bytes + estimate.packed_bytes,
        estimate.kv_bytes,
        estimate.tree_bytes,
        estimate.workspace_bytes,
        estimate.total_bytes,
        pool.num_processes * estimate.total_bytes,
    )
    cells = [f"{-(-part >> 20):,}" for part in parts]
    if _keeps_something_else(estimate):
        cells[2] = _UNKNOWN
    return (pool.key, *counts, *cells)


def _keeps_something_else(estimate: MemoryEstimate) -> bool:
    return estimate.num_pages > 0 and estimate.kv_bytes == 0


def _remarks(config: ServiceConfig, pool: Pool) -> Iterator[str]:
    """Explanations of a pool's numbers, a sentence each."""
    estimate = pool.estimate
    if estimate is None:
        yield f"{pool.key}: nothing is known of {pool.model_id!r}; see below."
        return
    by_share = pool.key == "target_config" and config.target_config.engine_kwargs.kv_fraction is not None
    if pool.on_gpu:
        where = "weights, KV and workspace are in the memory of a GPU, which is read when the replica starts"
        yield f"{pool.key}: {where}" + ("; kv_fraction decides then how many pages there are." if by_share else ".")
    if estimate.packed_bytes:
        yield f"{pool.key}: compiled weights are held twice; the start that compiles them keeps {_COMPILER} more."
    if _keeps_something_else(estimate):
        yield f"{pool.key}: how much its attention keeps per token cannot be told from its configuration."
    elif estimate.num_pages:
        room = f"{estimate.num_pages:,} KV pages of {PAGE_SIZE} tokens, {estimate.num_pages * PAGE_SIZE:,} tokens"
        longest = f"{estimate.num_longest:,} of the longest, {estimate.max_len:,}"
        yield f"{pool.key}: {room}: {estimate.num_typical:,} sessions of {estimate.typical_len:,} tokens, {longest}."
