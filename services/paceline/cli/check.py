"""``paceline check``: what ``paceline serve`` would run, the memory that it takes, and what keeps it from starting.

Reads files and ports, loads no weights. Exit status: 0 it may start, 1 it cannot; the others as in ``exit.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.size import gib
from paceline.cli.exit import EXIT_DONE, EXIT_FAILED
from paceline.cli.numbers import number
from paceline.cli.serve import add_config_flags, read_config
from paceline.cli.table import table, working
from paceline.config import ServiceConfig
from paceline.errors import ConfigError
from paceline.preflight.estimate import RAY_BYTES, MemoryEstimate
from paceline.preflight.service import Examination, Pool, examine
from paceline.types import PAGE_SIZE

if TYPE_CHECKING:
    from paceline.cluster.changes import Comparison

_UNKNOWN = "?"
_MAX_KEYS = 12
_MOST_GIB = 4096
"""The largest memory of a GPU that is taken for one: bytes and MiB are larger."""
_COMPILER = "about 0.2 GiB"
"""Measured with the embedded target: 189 MiB until the replica ends."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline check``."""
    parser.description = "Reports what memory each replica takes, and what keeps the service from starting here."
    add_config_flags(parser)
    parser.add_argument(
        "--address",
        metavar="RAY_ADDRESS",
        help="as of paceline serve: other machines run it, and nothing of this one is checked (nor is it asked)",
    )
    parser.add_argument(
        "--device-memory-gib",
        type=number(0, _MOST_GIB, open_low=True),
        metavar="GIB",
        help="memory of each GPU of the machines that run it: also checks that the models fit; implies --address",
    )
    parser.add_argument(
        "--against",
        metavar="FILE|URL",
        help="also report what deploying it over a running service would replace: the file that runs, or the address "
        "of the cluster's dashboard, such as http://HEAD:8265",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Runs ``paceline check``."""
    config = read_config(args)
    against = None if args.against is None else _comparison(args.against, config)
    gpu_bytes = None if args.device_memory_gib is None else int(args.device_memory_gib * (1 << 30))
    here = args.address is None and gpu_bytes is None
    with working("reading the checkpoints"):
        # As ``serve`` does: its Ray is told of all the cores that it needs.
        examination = examine(config, memory=here, cores=False, ports=here, surge=True, forms=True, gpu_bytes=gpu_bytes)
    if gpu_bytes is not None and not any(pool.on_gpu for pool in examination.pools):
        what = f"--device-memory-gib is {args.device_memory_gib:g}, but no model is placed on a GPU"
        raise ConfigError(f"{what}: --device cuda places the target there, --draft-device cuda the draft")
    if args.json:
        found = as_json(examination) | ({} if against is None else {"against": asdict(against)})
        print(json.dumps(found, indent=2))
    else:
        print("\n".join([*report(config, examination), *(() if against is None else compared(args.against, against))]))
    return EXIT_DONE if examination.may_start else EXIT_FAILED


def as_json(examination: Examination) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {
        "may_start": examination.may_start,
        "left_bytes": examination.left_bytes,
        "gpu_bytes": examination.gpu_bytes,
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
    yield from table([_HEADER, *(_row(pool) for pool in examination.pools)], sys.stdout)
    yield ""
    for pool in examination.pools:
        yield from _remarks(config, pool, examination)
    yield f"Ray and Serve take about {gib(RAY_BYTES)} in addition to the replicas."
    has = "" if left is None else f"; this machine has {gib(left)} left"
    yield f"Together {gib(examination.machine_bytes)} of host memory{has}."
    yield ""
    yield from (f"{finding.severity}: {finding.message}" for finding in examination.findings)
    yield "The service may start." if examination.may_start else "The service would not start."


def _comparison(where: str, config: ServiceConfig) -> Comparison:
    from paceline.cluster.changes import compare, running_config  # loads Ray, which nothing else here does

    return compare(running_config(where), config)


def compared(where: str, against: Comparison) -> Iterator[str]:
    """Returns lines that describe the effect of deploying a configuration over the one at ``where``."""
    keys = against.keys
    yield ""
    yield f"Against {where}: " + (f"{len(keys)} keys differ." if keys else "nothing differs.")
    yield from (f"  {key}" for key in keys[:_MAX_KEYS])
    if len(keys) > _MAX_KEYS:
        yield f"  and {len(keys) - _MAX_KEYS} more, which --json lists"
    width = max(len(change.deployment) for change in against.changes)
    for change in against.changes:
        how = f": {change.how}" if change.how else ""
        yield f"{change.deployment:<{width}}  {change.outcome}{how}"


_HEADER = ("MiB", "replicas", "ranks", "process", "weights", "KV", "trees", "workspace", "each", "all")


def _row(pool: Pool) -> tuple[str, ...]:
    estimate = pool.estimate
    if estimate is None:
        return (pool.key, str(pool.num_replicas), *[_UNKNOWN] * (len(_HEADER) - 2))
    counts = (str(pool.num_replicas), str(estimate.num_ranks))
    parts = (
        estimate.process_bytes,
        estimate.weights_bytes + estimate.packed_bytes,
        estimate.kv_bytes + estimate.linear_bytes + estimate.copies_bytes,
        estimate.tree_bytes,
        estimate.workspace_bytes,
        estimate.total_bytes,
        pool.num_processes * estimate.total_bytes,
    )
    cells = [f"{-(-part >> 20):,}" for part in parts]
    if _keeps_something_else(estimate):
        cells[2] = _UNKNOWN
    return (pool.key, *counts, *cells)


def _of_gpu(config: ServiceConfig, pool: Pool, gpu_bytes: int | None) -> Iterator[str]:
    """A sentence about the memory of a GPU. ``gpu_bytes``: as of the Examination."""
    parts = f"{pool.key}: weights, KV and workspace are in the memory of a GPU"
    if gpu_bytes is not None and pool.estimate is not None:
        yield f"{parts}: {gib(pool.estimate.device_bytes)} of its {gib(gpu_bytes)}."
        return
    by_share = pool.key == "target_config" and config.target_config.engine_kwargs.kv_fraction is not None
    then = "; kv_fraction decides then how many pages there are" if by_share else ""
    yield f"{parts}, which is read when the replica starts{then}. --device-memory-gib GIB sizes it now."


def _keeps_something_else(estimate: MemoryEstimate) -> bool:
    return estimate.num_pages > 0 and estimate.kv_bytes == 0


def _remarks(config: ServiceConfig, pool: Pool, examination: Examination) -> Iterator[str]:
    """Explanations of a pool's numbers, a sentence each."""
    estimate = pool.estimate
    if estimate is None:
        yield f"{pool.key}: nothing is known of {pool.model_id!r}; see below."
        return
    if pool.on_gpu:
        yield from _of_gpu(config, pool, examination.gpu_bytes)
        if pool.key == "target_config" and config.target_config.engine_kwargs.attention == "flashinfer":
            yield (
                f"{pool.key}: FlashInfer attends to whole blocks of prompts. A replica does not start, and says why, "
                "where it is not installed or its bits do not hold."
            )
    elif pool.key == "draft_config" and estimate.weights_bytes and examination.pools[0].on_gpu:
        yield f"{pool.key}: it runs on CPU cores, as it reserves no GPU: accelerator_type or --draft-device cuda does."
    if pool.rotary is not None:
        yield f"{pool.key}: {pool.rotary}, the context that these were trained for."
    if pool.kv_scales is not None:
        yield f"{pool.key}: {pool.kv_scales}."
    if estimate.packed_bytes:
        yield f"{pool.key}: compiled weights are held twice; the start that compiles them keeps {_COMPILER} more."
    if estimate.linear_bytes:
        kept = f"{gib(estimate.linear_bytes)} are rows and {estimate.num_states} states of linear layers"
        copies = f", and {gib(estimate.copies_bytes)} their copies in host memory" if estimate.copies_bytes else ""
        yield f"{pool.key}: of KV, {kept}{copies}."
    if _keeps_something_else(estimate):
        yield f"{pool.key}: how much its attention keeps per token cannot be told from its configuration."
    elif estimate.num_pages:
        room = f"{estimate.num_pages:,} KV pages of {PAGE_SIZE} tokens, {estimate.num_pages * PAGE_SIZE:,} tokens"
        longest = f"{estimate.num_longest:,} of the longest, {estimate.max_len:,}"
        yield f"{pool.key}: {room}: {estimate.num_typical:,} sessions of {estimate.typical_len:,} tokens, {longest}."
        yield f"{pool.key}: a token takes {estimate.token_bytes / 1024:,.1f} KiB of KV in each process."
