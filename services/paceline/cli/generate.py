"""``paceline generate``: continues a prompt, by engines on this machine or by a running service."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from paceline.cli.flags import (
    add_form_flags,
    add_model_flags,
    add_sampling_flags,
    add_speculation_flags,
    add_tls_flags,
    check_placement,
    check_positive,
    connection_of,
    draft_config_of,
    flag_of,
    form_of,
    given,
    heads_of,
)
from paceline.config import wants_color
from paceline.errors import ConfigError, InvalidRequestError
from paceline.logs import narrate
from paceline.types import (
    MAX_TOP_LOGPROBS,
    Chunk,
    Generation,
    Mode,
    Request,
    Result,
    Round,
    SamplingParams,
    ServerInfo,
    SpeculationParams,
)

if TYPE_CHECKING:
    from paceline.config import LocalConfig

_LOCAL_FLAGS = (
    *("local", "target", "draft", "drafter", "head"),
    *("dtype", "compile", "background_compilation", "device", "draft_device"),
    *("tensor_parallel_size", "cpu_threads", "placement", "max_model_len"),
)
_SERVICE_FLAGS = (
    *("timeout", "request_id", "resume"),
    *("tls", "tls_ca", "tls_certificate", "tls_key", "tls_server_name", "api_key"),
)
_GREEN, _YELLOW, _CYAN, _PLAIN = "\x1b[32m", "\x1b[33m", "\x1b[36m", "\x1b[0m"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline generate``."""
    parser.description = "Continue a prompt."
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument("--logprobs", action="store_true", help="with --json: the log probability of every token")
    help_ = f"with --json: the N likeliest tokens in the place of every token, at most {MAX_TOP_LOGPROBS}"
    parser.add_argument("--top-logprobs", type=int, metavar="N", help=help_)
    add_form_flags(parser)
    add_engine_flags(parser, "run both engines on this machine (the default)")
    group = parser.add_argument_group("service")
    group.add_argument("--address", metavar="HOST:PORT", help="ask a running service instead of --local")
    group.add_argument("--timeout", type=float, metavar="SECONDS", help="for the whole request (default: no limit)")
    group.add_argument("--request-id", metavar="ID", help="default: drawn at random")
    group.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="continue a stream whose router or connection is lost (default: on)",
    )
    add_tls_flags(group)
    add_sampling_flags(parser)
    add_speculation_flags(parser)
    parser.set_defaults(run=run_generate)


def add_engine_flags(parser: argparse.ArgumentParser, local: str, target: str = "the embedded one") -> None:
    """Adds what ``local_config`` reads. ``local``: the help of ``--local``; ``target``: the default one, in words."""
    group = add_model_flags(parser, ["none"], target)
    group.add_argument("--local", action="store_true", default=None, help=local)
    group.add_argument(
        "--verbose", action="store_true", help="report how the engines run and what their self-test found"
    )


def run_generate(args: argparse.Namespace) -> int:
    """Runs ``paceline generate``."""
    _check_place(args)
    stop = tuple(args.stop or ())
    if "" in stop:
        raise InvalidRequestError("--stop is empty: it needs at least one character")
    request = Request(
        request_id=args.request_id or "",
        prompt=_read_stdin() if args.prompt == "-" else args.prompt,
        sampling=SamplingParams(**given(args, SamplingParams), **form_of(args)),
        speculation=SpeculationParams(**given(args, SpeculationParams)),
        stop=stop,
    )
    if not request.prompt:
        raise InvalidRequestError("the prompt is empty: at least one character is needed")
    with _run_local(args, request) if args.address is None else _run_remote(args, request) as generation:
        if args.json:
            unicode = (sys.stdout.encoding or "").lower().startswith("utf")
            print(json.dumps(as_json(generation.result, logprobs=args.logprobs), ensure_ascii=not unicode))
        else:
            write_text(generation, sys.stdout)
            narrate(summary(generation.result))
    return 0


def _check_place(args: argparse.Namespace) -> None:
    """Refuses flags of the place that is not chosen."""
    local = args.address is None
    for name in _SERVICE_FLAGS if local else _LOCAL_FLAGS:
        if getattr(args, name) is None:
            continue
        if local:
            raise ConfigError(f"{flag_of(name)} is given without --address: it is for requests to a service")
        raise ConfigError(f"{flag_of(name)} is given with --address {args.address}: it is for engines on this machine")
    check_positive("--timeout", args.timeout)
    if args.logprobs and not args.json:
        raise InvalidRequestError("--logprobs is given without --json: only that shows them")
    if args.top_logprobs and not args.json:
        raise InvalidRequestError(f"--top-logprobs is {args.top_logprobs} without --json: only that shows them")


@contextlib.contextmanager
def _run_local(args: argparse.Namespace, request: Request) -> Iterator[Generation]:
    from paceline.cli.startup import starting
    from paceline.local import LocalPipeline  # a request to a service does without the engines

    pipeline = LocalPipeline(local_config(args, with_draft=request.speculation.mode is not Mode.PLAIN))
    pipeline.load()
    token_ids = pipeline.encode(request.prompt, request.sampling)  # refuses before a model is loaded
    with starting(pipeline, verbose=args.verbose):
        yield pipeline.generate(token_ids, request.sampling, request.speculation, request.stop)
        tell_unfinished(pipeline.server_info())


def tell_unfinished(info: ServerInfo) -> None:
    """Says that a command ends before its models are compiled, which a process of its own finishes."""
    if any(replica.execution == "compiling" for replicas in info.pools.values() for replica in replicas):
        narrate(
            "paceline: the models are still being compiled, in the background, for a minute or two; "
            "starts after that are faster"
        )


@contextlib.contextmanager
def _run_remote(args: argparse.Namespace, request: Request) -> Iterator[Generation]:
    from paceline.client import Client  # an engine on this machine does without gRPC

    with (
        Client(args.address, **connection_of(args)) as client,
        client.generate(
            request.prompt,
            request.sampling,
            request.speculation,
            stop=request.stop,
            timeout_s=args.timeout,
            request_id=args.request_id,
            logprobs=args.logprobs,
            resume=args.resume is not False,
        ) as stream,
    ):
        yield stream


def local_config(args: argparse.Namespace, with_draft: bool = True) -> LocalConfig:
    """The pipeline that the model flags describe. Raises ConfigError."""
    from paceline.checkpoint.files import embedded_paths
    from paceline.cli.drafting import choose, is_embedded
    from paceline.config import DraftModel, LocalConfig, ServiceConfig, TargetModel

    paths = [
        _path_of(flag_of(role), getattr(args, role), str(embedded))
        for role, embedded in zip(("target", "draft"), embedded_paths(), strict=True)
    ]
    if args.background_compilation is None and args.compile is None:
        args.background_compilation = "detached"  # such a command often ends sooner than its models are compiled
    options = given(args, DraftModel)
    for name in ("device", "tensor_parallel_size", "cpu_threads"):  # they are the target's
        options.pop(name, None)
    if args.draft_device is not None:
        options["device"] = args.draft_device
    running = {name: value for name, value in options.items() if name != "placement"}
    heads, modelless = heads_of(args.head), draft_config_of(args.drafter, running)
    without_model = args.drafter == "none" or modelless is not None
    check_placement(args, has_model=with_draft and not without_model)
    at_hand = with_draft and not without_model and args.draft is None and not is_embedded(args.target)
    for flag in ("placement", "draft_device"):
        if at_hand and getattr(args, flag) is not None:
            raise ConfigError(f"{flag_of(flag)} is given without --draft: there is no draft to place")
    if at_hand and not heads:
        chosen = choose(paths[0])
        heads = chosen.heads
        narrate(f"paceline: {chosen.line}")
    if without_model and args.draft is not None:
        raise ConfigError(f"--draft {args.draft} is given with --drafter {args.drafter}, which does not take it")
    target = TargetModel(path=paths[0], heads=heads if with_draft else [], **given(args, TargetModel))
    if not with_draft or at_hand or args.drafter == "none":
        return LocalConfig(target=target)
    if modelless is not None:
        draft = ServiceConfig.parse({"draft_config": modelless}).draft_config
        assert draft is not None
        return LocalConfig(target=target, draft=draft.engine_kwargs)
    return LocalConfig(target=target, draft=DraftModel(path=paths[1], **options))


def _path_of(flag: str, value: str | None, default: str) -> str:
    if value == "":
        raise ConfigError(f"{flag} is empty: a model id or a directory is needed")
    return default if value is None else value


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"standard input is not UTF-8 text: {error}") from error


def write_text(generation: Iterable[Chunk], stream: TextIO) -> None:
    """Writes the text as it is produced; on a terminal accepted tokens have the color of their producer."""
    color = wants_color(stream)
    for chunk in generation:
        tints = iter([tint for round_ in chunk.rounds for tint in _tints(round_)])
        for text, drafted in chunk.segments:
            stream.write(f"{next(tints, _GREEN)}{text}{_PLAIN}" if color and drafted else text)
        stream.flush()
    stream.write("\n")
    stream.flush()


def _tints(round_: Round) -> list[str]:
    """Colors of a round's accepted tokens: the draft's are green, then a head's yellow, then looked-up ones cyan."""
    of_head, looked_up = round_.head_accepted, round_.lookup_accepted
    num_draft = round_.num_accepted - of_head - looked_up
    return [_GREEN] * num_draft + [_YELLOW] * of_head + [_CYAN] * looked_up


def as_json(result: Result, *, logprobs: bool = False) -> dict[str, Any]:
    """Returns the object that ``--json`` prints."""
    stats, timing = result.speculation, result.timing
    tops = [[{"token_id": token_id, "logprob": prob} for token_id, prob in place] for place in result.top_logprobs]
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        **({"logprobs": list(result.logprobs)} if logprobs else {}),
        **({"top_logprobs": tops} if tops else {}),
        "finish_reason": result.finish_reason.value,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
        },
        "speculation": stats.counts(),
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
    if stats.lookup_drafted:
        parts.append(f"{stats.lookup_accepted} of {stats.lookup_drafted} looked-up tokens accepted")
    if stats.head_drafted:
        parts.append(f"{stats.head_accepted} of {stats.head_drafted} tokens of heads accepted")
    if stats.hit_rate is not None:
        parts.append(f"hit rate {stats.hit_rate:.0%}")
    parts.append(f"prefill {result.timing.prefill_s:.3f} s")
    return ", ".join(parts)
