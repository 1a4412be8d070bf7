"""``paceline batch``: answers a file of requests, with engines on this machine or with a running service over HTTP.

Ctrl-C or the loss of the service ends the run and keeps its answers; the same command continues it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.cli.exit import EXIT_DONE, EXIT_FAILED
from paceline.cli.generate import add_engine_flags, local_config
from paceline.cli.remote import CONNECT_S, HttpService, add_remote_flags, require_http, service_of
from paceline.errors import ConfigError, PacelineError
from paceline.logs import is_quiet, narrate
from paceline.web.batch import Batch, read_requests

_CONCURRENCY = 32


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline batch``."""
    parser.description = "Answer the requests of a file in OpenAI's batch format; an interrupted batch goes on."
    parser.add_argument("-i", "--input", required=True, type=Path, metavar="FILE", help="JSONL: a request in each line")
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="FILE", help="JSONL: their answers, in the same order"
    )
    parser.add_argument("--concurrency", type=int, metavar="N", help=f"requests at once (default: {_CONCURRENCY})")
    add_engine_flags(parser, "run both engines on this machine (the default)")
    parser.add_argument("--chat-template", metavar="FILE", help="a Jinja template (default: the target's)")
    add_remote_flags(parser)
    parser.set_defaults(run=run_batch)


def run_batch(args: argparse.Namespace) -> int:
    """Runs ``paceline batch``. Exit status 1: some answers are errors, which the output tells."""
    service = service_of(args)
    concurrency = _CONCURRENCY if args.concurrency is None else args.concurrency
    if concurrency < 1:
        raise ConfigError(f"--concurrency is {concurrency}: at least 1 is needed")
    requests = read_requests(args.input)
    if service is not None:
        require_http(service)
    batch = Batch(requests, args.output)
    if batch.num_done:
        narrate(f"{batch.num_done} of {len(requests)} were answered before")
    began, before = time.monotonic(), batch.num_done
    try:
        with _local(args) if service is None else _remote(service) as client:
            asyncio.run(_run(client, batch, concurrency))
        refused = batch.num_refused
        batch.finish()
    except (KeyboardInterrupt, PacelineError):
        done = f"{batch.num_done} of {len(requests)} are answered"
        print(f"{done}: the same command goes on from there", file=sys.stderr)
        raise
    seconds = time.monotonic() - began
    errors = f", {refused} of them by an error" if refused else ""
    narrate(f"{len(requests) - before} requests answered in {seconds:.1f} s{errors}")
    return EXIT_FAILED if refused else EXIT_DONE


async def _run(client: httpx2.AsyncClient, batch: Batch, concurrency: int) -> None:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    async with client:
        with Progress(*columns, console=console, disable=is_quiet() or not console.is_terminal) as bars:
            task = bars.add_task("")
            await batch.run(
                client, concurrency, progress=lambda done, total: bars.update(task, completed=done, total=total)
            )


@contextlib.contextmanager
def _local(args: argparse.Namespace) -> Iterator[httpx2.AsyncClient]:
    """A client of engines in processes of this machine, without a port."""
    from paceline.cli.local_service import local_edge
    from paceline.cli.serve import served_name
    from paceline.cli.startup import starting
    from paceline.config import ServerConfig
    from paceline.local import LocalPipeline
    from paceline.web.app import make_app

    pipeline = LocalPipeline(local_config(args))
    edge = local_edge(pipeline, ServerConfig(chat_template=args.chat_template), served_name(args.target))
    with starting(pipeline, verbose=args.verbose):
        transport = httpx2.ASGITransport(make_app(edge), raise_app_exceptions=False)
        yield httpx2.AsyncClient(transport=transport, base_url="http://local", timeout=None)


@contextlib.contextmanager
def _remote(service: HttpService) -> Iterator[httpx2.AsyncClient]:
    yield httpx2.AsyncClient(
        base_url=service.url,
        headers=service.headers,
        verify=service.tls or True,
        timeout=httpx2.Timeout(None, connect=CONNECT_S),
        limits=httpx2.Limits(max_connections=None),
        trust_env=False,
    )
