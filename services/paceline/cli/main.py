"""The command line. Whatever the user can get wrong ends in one sentence on stderr and exit status 2.

Exit status: 0 done, 1 an engine or the service failed, or would fail (``check``), 2 usage, configuration or request at
fault, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from paceline import __version__, logs
from paceline.cli.common import EXIT_ENGINE, EXIT_INTERRUPTED, EXIT_USAGE, given, local_config, write_text
from paceline.errors import ConfigError, InvalidRequestError, PacelineError
from paceline.local import Generation, LocalPipeline
from paceline.refusals import explain_parameter
from paceline.types import Acceptance, Mode, Result, SamplingParams, SpeculationParams

if TYPE_CHECKING:
    from paceline.client import Stream


_FLAGS = {
    "max_draft_tokens": "--draft-tokens",
    "path": "--target",
}
"""Flags whose name is not that of the field they set."""

_LOCAL_FLAGS = ("local", "target", "draft", "drafter", "dtype", "compile", "tensor_parallel_size")
_SERVICE_FLAGS = ("timeout", "request_id", "tls", "tls_ca")


class Parser(argparse.ArgumentParser):
    """Reports a mistake as one sentence."""

    def error(self, message: str) -> Any:
        """Exits with status 2."""
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """All commands."""
    from paceline.cli.check import add_parser as add_check
    from paceline.cli.plan import add_parser as add_plan
    from paceline.cli.serve import add_parser as add_serve
    from paceline.cli.status import add_parser as add_status

    parser = Parser(prog="paceline", description="Lossless speculative decoding.")
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    generate = commands.add_parser("generate", help="continue a prompt", description="Continue a prompt.")
    generate.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from standard input")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    generate.add_argument("--logprobs", action="store_true", help="with --json: the log probability of every token")
    _add_model_flags(generate)
    _add_service_flags(generate)
    _add_sampling_flags(generate)
    generate.set_defaults(run=run_generate)

    add_serve(commands)
    add_status(commands)
    add_check(commands)
    add_plan(commands)

    demo = commands.add_parser(
        "demo",
        help="overlapped against plain decoding",
        description="Starts the service, decodes one prompt plain and overlapped, in turn, and compares tokens and "
        "speed.",
    )
    _add_model_flags(demo, local="run both engines under this process instead of the service")
    demo.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default 256")
    demo.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default 0: greedy")
    demo.add_argument("--seed", type=int, default=1, metavar="S", help="default 1")
    demo.add_argument("--repeats", type=int, default=3, metavar="R", help="runs of each mode (default 3)")
    demo.set_defaults(run=_run_demo)
    for command in entry_points(group="paceline.commands"):  # those of other packages: `paceline bench`
        command.load()(commands)
    return parser


def _add_model_flags(
    parser: argparse.ArgumentParser, local: str = "run both engines on this machine (the default)"
) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--local", action="store_true", default=None, help=local)
    group.add_argument("--target", metavar="ID_OR_PATH", help="target model (default: the embedded one)")
    group.add_argument("--draft", metavar="ID_OR_PATH", help="draft model (default: the embedded one)")
    group.add_argument("--drafter", choices=["model", "ngram"], help="what proposes tokens (default: model)")
    group.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], help="default: auto")
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile both models, once per machine and checkpoint (default: on the CPU)",
    )
    group.add_argument(
        "--tensor-parallel-size", type=int, metavar="N", help="processes that share the target's weights (default 1)"
    )
    group.add_argument("--verbose", action="store_true", help="say how the engines run and what their self-test found")


def _add_service_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("service")
    group.add_argument("--address", metavar="HOST:PORT", help="ask a running service instead of --local")
    group.add_argument("--timeout", type=float, metavar="SECONDS", help="for the whole request (default: no limit)")
    group.add_argument("--request-id", metavar="ID", help="default: drawn at random")
    group.add_argument("--tls", action="store_true", default=None, help="encrypt, and check the service's certificate")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="--tls, with the authorities of this PEM file")


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="default 128")
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end of sequence before as many")
    group.add_argument("--temperature", type=float, metavar="T", help="default 0: greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="N", help="default 0: every token")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="R")
    group.add_argument("--presence-penalty", type=float, metavar="A")
    group.add_argument("--frequency-penalty", type=float, metavar="A")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after end of sequence")
    group.add_argument("--seed", type=int, metavar="S", help="default: drawn at random")
    group = parser.add_argument_group("speculation")
    group.add_argument("--mode", choices=[mode.value for mode in Mode], default=Mode.OVERLAPPED.value)
    group.add_argument("--acceptance", choices=[rule.value for rule in Acceptance])
    group.add_argument("--draft-tokens", type=int, dest="max_draft_tokens", metavar="K")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """What the sampling flags say. Raises pydantic's ValidationError."""
    return SamplingParams(**given(args, list(SamplingParams.model_fields)))


def run_generate(args: argparse.Namespace) -> int:
    """``paceline generate``."""
    _check_place(args)
    sampling = sampling_params(args)
    speculation = SpeculationParams(**given(args, list(SpeculationParams.model_fields)))
    stop = tuple(args.stop or ())
    if "" in stop:
        raise InvalidRequestError("--stop is empty: it needs at least one character")
    prompt = _read_stdin() if args.prompt == "-" else args.prompt
    if not prompt:
        raise InvalidRequestError("the prompt is empty: at least one character is needed")
    run = _run_local if args.address is None else _run_remote
    with run(args, prompt, sampling, speculation, stop) as generation:
        if args.json:
            unicode = (sys.stdout.encoding or "").lower().startswith("utf")
            print(json.dumps(as_json(generation.result, logprobs=args.logprobs), ensure_ascii=not unicode))
        else:
            write_text(generation, sys.stdout)
            print(summary(generation.result), file=sys.stderr)
    return 0


def _check_place(args: argparse.Namespace) -> None:
    """Refuses flags of the place that is not chosen."""
    local = args.address is None
    for name in _SERVICE_FLAGS if local else _LOCAL_FLAGS:
        if getattr(args, name) is None:
            continue
        flag = "--" + name.replace("_", "-")
        if local:
            raise ConfigError(f"{flag} is given without --address: it is for requests to a service")
        raise ConfigError(f"{flag} is given with --address {args.address}: it is for engines on this machine")
    if args.timeout is not None and not args.timeout > 0:
        raise InvalidRequestError(f"--timeout is {args.timeout}: it must be more than 0")
    if args.logprobs and not args.json:
        raise InvalidRequestError("--logprobs is given without --json: only that shows them")


@contextlib.contextmanager
def _run_local(
    args: argparse.Namespace,
    prompt: str,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    stop: tuple[str, ...],
) -> Iterator[Generation]:
    pipeline = LocalPipeline(local_config(args, with_draft=speculation.mode is not Mode.PLAIN))
    pipeline.load()
    token_ids = pipeline.encode(prompt, sampling)  # refuses what cannot be served before a model is loaded
    with pipeline:
        yield pipeline.generate(token_ids, sampling, speculation, stop)


@contextlib.contextmanager
def _run_remote(
    args: argparse.Namespace,
    prompt: str,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    stop: tuple[str, ...],
) -> Iterator[Stream]:
    from paceline.client import Client, Tls

    tls = Tls(ca_file=args.tls_ca) if args.tls or args.tls_ca is not None else None
    with (
        Client(args.address, tls=tls) as client,
        client.generate(
            prompt,
            sampling,
            speculation,
            stop=stop,
            timeout_s=args.timeout,
            request_id=args.request_id,
            logprobs=args.logprobs,
        ) as stream,
    ):
        yield stream


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is not UTF-8 text: {error}") from error


def as_json(result: Result, *, logprobs: bool = False) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    stats, timing = result.speculation, result.timing
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        **({"logprobs": list(result.logprobs)} if logprobs else {}),
        "finish_reason": result.finish_reason.value,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
        },
        "speculation": {
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "hits": stats.hits,
            "misses": stats.misses,
        },
        "timing": {
            "prefill_s": round(timing.prefill_s, 6),
            "decode_s": round(timing.decode_s, 6),
            "tokens_per_s": round(timing.tokens_per_s, 3),
        },
    }


def summary(result: Result) -> str:
    """One line: speed, tokens per verification, acceptance and hit rate."""
    stats, num_tokens = result.speculation, result.usage.completion_tokens
    parts = [f"{num_tokens} tokens", f"{result.timing.tokens_per_s:.1f} tokens/s"]
    parts.append(f"{num_tokens / max(stats.rounds, 1):.2f} tokens per verification")
    if stats.drafted:
        parts.append(f"acceptance {stats.accepted / stats.drafted:.0%}")
    if stats.hits + stats.misses:
        parts.append(f"hit rate {stats.hits / (stats.hits + stats.misses):.0%}")
    parts.append(f"prefill {result.timing.prefill_s:.3f} s")
    return ", ".join(parts)


def _run_demo(args: argparse.Namespace) -> int:
    from paceline.cli.demo import run_demo

    return run_demo(args)


def describe(error: ValidationError) -> str:
    """One sentence for the first mistake: the flag, the value and what is allowed."""
    kinds: dict[str, type[BaseModel]] = {kind.__name__: kind for kind in (SamplingParams, SpeculationParams)}
    text = explain_parameter(error, kinds.get(error.title, BaseModel))
    field = str(next(iter(error.errors()[0]["loc"]), ""))
    flag = _FLAGS.get(field, "--" + field.replace("_", "-"))
    return flag + text.removeprefix(field) if field and text.startswith(field) else text


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit status."""
    args = build_parser().parse_args(argv)
    logs.configure(logging.INFO if getattr(args, "verbose", False) else logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character still shows the rest
    try:
        status: int = args.run(args)
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ENGINE
    except ValidationError as error:
        return _complain(describe(error), EXIT_USAGE)
    except (ConfigError, InvalidRequestError) as error:
        return _complain(str(error), EXIT_USAGE)
    except PacelineError as error:
        return _complain(str(error), EXIT_ENGINE)


def _complain(message: str, status: int) -> int:
    print(f"paceline: {' '.join(message.split())}", file=sys.stderr)
    return status
