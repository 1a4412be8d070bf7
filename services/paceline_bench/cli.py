"""``paceline bench``: arguments only. Whatever is wrong with them is said before anything is loaded."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from paceline.checkpoint.files import embedded_paths
from paceline.config import DType
from paceline.errors import ConfigError
from paceline.types import Acceptance, Mode
from paceline_bench import flags, replicas
from paceline_bench.endpoint import APIS, EndpointSettings
from paceline_bench.latency import LIMITED
from paceline_bench.local import BASELINES, Bench, Settings, with_grown_models
from paceline_bench.machine import measure_floor
from paceline_bench.output import write_json
from paceline_bench.report import as_json, model_facts, render
from paceline_bench.tasks import GROUPS
from paceline_bench.units import differing

if TYPE_CHECKING:
    from paceline_bench import serve  # gRPC is for the kinds that need it

_DTYPES = get_args(DType)
_ONE_BASELINES = ("transformers", "assisted", "lookup")
_SEVERAL_BASELINES = ("transformers", "continuous")


def add_parser(subparsers: Any) -> None:
    """Adds ``bench`` to the commands."""
    bench = subparsers.add_parser("bench", help="measure", description="Benchmarks.")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND", parser_class=type(bench))
    local = kinds.add_parser(
        "local",
        help="all modes on this machine, and transformers' generate",
        description="Compares the modes and transformers' generate on the same prompts, in one run.",
    )
    add_local_flags(local)
    local.set_defaults(run=run_local)
    serve = kinds.add_parser(
        "serve",
        help="a service on this machine against the one-process pipeline",
        description="Starts a service and compares it with the one-process pipeline on the same prompts, in one run.",
    )
    add_serve_flags(serve)
    serve.set_defaults(run=run_serve)
    endpoint = kinds.add_parser(
        "endpoint",
        help="any OpenAI-compatible server",
        description="Measures a server that speaks the OpenAI API with the load of `paceline bench serve`.",
    )
    add_endpoint_flags(endpoint)
    endpoint.set_defaults(run=run_endpoint)
    sweep = kinds.add_parser(
        "sweep",
        help="the full run: everything of the above, and its report",
        description="Loads, temperatures, pairs, task groups and the service in one run, and the report on them.",
    )
    add_sweep_flags(sweep)
    sweep.set_defaults(run=run_sweep)
    report = kinds.add_parser(
        "report",
        help="tables and plots from JSON files",
        description="Renders what the other kinds have written with --json: report.html (one page that needs nothing "
        "else), report.md and a plot per file.",
    )
    report.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    report.add_argument("--out", type=Path, required=True, metavar="DIR", help="is made if it does not exist")
    report.add_argument("--title", default="Paceline: measured", metavar="TEXT")
    report.set_defaults(run=run_report)


def add_local_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``paceline bench local``."""
    group = _add_model_flags(parser)
    group.add_argument("--worker", choices=["process", "thread"], default="process")
    group = parser.add_argument_group("what is compared")
    group.add_argument("--modes", type=flags.several(flags.mode), default=tuple(Mode), metavar="MODE,...")
    group.add_argument(
        "--baselines", type=flags.baselines, metavar="NAME,...",
        help=f"{', '.join(BASELINES)}, all or none (default: {','.join(_ONE_BASELINES)}, for several sessions "
        f"{','.join(_SEVERAL_BASELINES)})",
    )  # fmt: skip
    group.add_argument("--draft-tokens", type=flags.several(flags.k), default=(8,), metavar="K,...", help="default 8")
    group.add_argument(
        "--sequential-draft-tokens", type=flags.several(flags.k), default=(2, 3, 4, 6), metavar="K,...",
        help="all are measured, the best counts (default 2,3,4,6)",
    )  # fmt: skip
    group.add_argument("--acceptance", choices=[a.value for a in Acceptance], default=Acceptance.COUPLED.value)
    group.add_argument("--growth", choices=["best_first", "uniform", "geometric"], default="best_first")
    group.add_argument("--tree-step-tokens", type=flags.positive(1024), metavar="N")
    group = parser.add_argument_group("load")
    group.add_argument("--prompts", type=flags.positive(), metavar="N", help="default 8, or all of --prompts-file")
    _add_prompt_flags(group)
    group.add_argument("--max-tokens", type=flags.positive(), default=128, metavar="N", help="default 128")
    group.add_argument("--temperatures", type=flags.several(flags.temperature), default=(0.0, 1.0), metavar="T,...")
    group.add_argument("--repeats", type=flags.positive(), default=1, metavar="R")
    group.add_argument("--sessions", type=flags.positive(1024), default=1, metavar="N", help="prompts at once")
    group.add_argument("--seed", type=flags.natural, default=0, metavar="S", help="of prompts and sampling")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw records and summaries")


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``paceline bench serve``."""
    _add_model_flags(parser)
    parser.add_argument("--draft-tokens", type=flags.k, default=8, metavar="K", help="default 8")
    group = parser.add_argument_group("load")
    group.add_argument(
        "--prompts", type=flags.positive(), metavar="N",
        help="requests of a unit, but at least two per session (default 8); with --prompts-file also how many of it",
    )  # fmt: skip
    _add_prompt_flags(group)
    group.add_argument("--max-tokens", type=flags.positive(), default=128, metavar="N", help="default 128")
    group.add_argument("--temperatures", type=flags.several(flags.temperature), default=(0.0, 1.0), metavar="T,...")
    _add_serve_loads(group)
    group.add_argument(
        "--draft-link-delay-ms", type=flags.several(flags.delay), default=(0.0,), metavar="D,...",
        help="added to each way between router and draft; a service is started for each (default 0)",
    )  # fmt: skip
    group.add_argument("--repeats", type=flags.positive(), default=1, metavar="R")
    group.add_argument("--seed", type=flags.natural, default=0, metavar="S", help="of prompts and sampling")
    group = parser.add_argument_group("another server beside ours")
    group.add_argument("--endpoint", metavar="URL", help="of an OpenAI API, measured with the same load")
    _add_endpoint_flags(group)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw records and summaries")


def add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``paceline bench endpoint``."""
    target, _ = embedded_paths()
    parser.add_argument("endpoint", metavar="URL", help="of an OpenAI API")
    group = parser.add_argument_group("server")
    _add_endpoint_flags(group)
    group = parser.add_argument_group("load")
    group.add_argument("--prompts", type=flags.positive(), metavar="N", help="requests of a unit (default 8)")
    group.add_argument(
        "--tokenizer", default=str(target), metavar="P", help="cuts held-out prompts (default: the embedded one)"
    )
    _add_prompt_flags(group)
    group.add_argument("--max-tokens", type=flags.positive(), default=128, metavar="N", help="default 128")
    group.add_argument("--temperatures", type=flags.several(flags.temperature), default=(0.0,), metavar="T,...")
    _add_serve_loads(group)
    group.add_argument("--repeats", type=flags.positive(), default=1, metavar="R")
    group.add_argument("--seed", type=flags.natural, default=0, metavar="S", help="of prompts and sampling")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write raw records and summaries")


def _add_serve_loads(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sessions", type=flags.several(flags.positive(1024)), metavar="N,...",
        help="closed loads: requests at once (default 1,4,16, or none with --request-rate)",
    )  # fmt: skip
    group.add_argument(
        "--request-rate", type=flags.several(flags.rate), default=(), metavar="R,...",
        help="open loads: arrivals per second; --prompts of them (default 32)",
    )  # fmt: skip
    group.add_argument(
        "--burstiness", type=flags.burstiness, metavar="B",
        help="shape of the gamma distribution of their gaps: 1 is Poisson, less is burstier (default 1)",
    )  # fmt: skip
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS",
        help=f"requests per second that keep all limits: {', '.join(LIMITED)}",
    )  # fmt: skip


def _add_endpoint_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--endpoint-model", metavar="NAME", help="default: the first that it lists")
    group.add_argument("--endpoint-api", choices=APIS, default=APIS[0], help=f"default {APIS[0]}")
    group.add_argument("--endpoint-key-file", type=Path, metavar="FILE", help="holds the bearer token")
    group.add_argument(
        "--endpoint-body", type=flags.json_object, metavar="JSON",
        help='fields added to each request (default {"ignore_eos": true})',
    )  # fmt: skip


def _add_prompt_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help='JSONL with "prompt", "turns" or "conversations" per line'
    )
    group.add_argument(
        "--task-group", type=flags.several(str), default=(), metavar="NAME,...",
        help=f"--prompts of each, each reported on its own: {', '.join(GROUPS)} or all; categories of --prompts-file",
    )  # fmt: skip


def add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of ``paceline bench sweep``."""
    group = _add_model_flags(parser)
    group.set_defaults(grow_target=150_000_000, grow_draft=15_000_000)
    group = parser.add_argument_group("load")
    group.add_argument(
        "--parts", type=flags.several(str), metavar="NAME,...", help="light, heavy, groups, service (default: all)"
    )
    group.add_argument(
        "--sessions", type=flags.several(flags.positive(1024)), default=(1, 4, 16), metavar="N,...",
        help="requests at once (default 1,4,16)",
    )  # fmt: skip
    group.add_argument(
        "--request-rate", type=flags.several(flags.rate), default=(1.0, 2.0), metavar="R,...",
        help="open loads of the service, arrivals per second (default 1,2)",
    )  # fmt: skip
    group.add_argument("--prompts", type=flags.positive(), default=4, metavar="N", help="at one session (default 4)")
    group.add_argument("--max-tokens", type=flags.positive(), default=64, metavar="N", help="default 64")
    group.add_argument(
        "--temperatures", type=flags.several(flags.temperature), default=(0.0, 0.6, 1.0), metavar="T,...",
        help="at one session; several sessions have the first and the last (default 0,0.6,1)",
    )  # fmt: skip
    group.add_argument("--repeats", type=flags.positive(), default=1, metavar="R")
    group.add_argument("--seed", type=flags.natural, default=0, metavar="S", help="of prompts and sampling")
    group = parser.add_argument_group("result")
    group.add_argument("--out", type=Path, required=True, metavar="DIR", help="JSON files and the report")
    group.add_argument("--title", default="Paceline: measured", metavar="TEXT")


def _add_model_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """What both kinds share."""
    target, draft = embedded_paths()
    group = parser.add_argument_group("models")
    group.add_argument("--target", default=str(target), metavar="P", help="default: the embedded target")
    group.add_argument("--draft", default=str(draft), metavar="P", help="default: the embedded draft")
    group.add_argument("--grow-target", type=flags.size, metavar="SIZE", help="cost of a larger target, e.g. 150M")
    group.add_argument(
        "--grow-draft", type=flags.draft_size, metavar="SIZE", help='likewise; "fifth": a fifth of the target\'s size'
    )
    group.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    group.add_argument("--no-compile", dest="compile", action="store_false", help="run the engines eagerly")
    return group


def settings_of(args: argparse.Namespace) -> Settings:
    """What the flags say. Raises ConfigError where they contradict each other."""
    baselines = args.baselines
    if baselines is None:
        baselines = _ONE_BASELINES if args.sessions == 1 else _SEVERAL_BASELINES
    _check_common(args)
    prompts = args.prompts if args.prompts is not None else None if args.prompts_file else 8
    if prompts is not None and prompts % args.sessions:
        raise ConfigError(f"--prompts is {prompts}: it must be a multiple of --sessions ({args.sessions})")
    return Settings(
        target=args.target, draft=args.draft, grow_target=args.grow_target, grow_draft=args.grow_draft,
        modes=args.modes, baselines=baselines, num_prompts=prompts, prompts_file=args.prompts_file,
        max_tokens=args.max_tokens, temperatures=args.temperatures, repeats=args.repeats,
        draft_tokens=args.draft_tokens, sequential_draft_tokens=args.sequential_draft_tokens,
        sessions=args.sessions, task_groups=task_groups(args), seed=args.seed,
        dtype=args.dtype, acceptance=Acceptance(args.acceptance),
        growth=args.growth, tree_step_tokens=args.tree_step_tokens, compile=args.compile, worker=args.worker,
    )  # fmt: skip


def task_groups(args: argparse.Namespace) -> tuple[str, ...]:
    """``--task-group``: of the held-out text, or categories of the file. Raises ConfigError for an unknown one."""
    given: tuple[str, ...] = args.task_group
    if args.prompts_file is not None:
        return given
    if given == ("all",):
        return GROUPS
    for group in given:
        if group not in GROUPS:
            raise ConfigError(
                f"--task-group {group!r} is no group of the held-out text: {', '.join(GROUPS)} or all are"
            )
    return given


def _check_common(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    if args.max_tokens < 2:
        raise ConfigError("--max-tokens is 1: at least 2 are needed, the first belongs to prefill")
    if args.task_group and args.prompts_file is None:
        task_groups(args)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {str(args.json)!r}: its directory does not exist")


def run_local(args: argparse.Namespace) -> int:
    """``paceline bench local``. Returns 1 if a text differs that is claimed to be plain decoding's."""
    given = settings_of(args)
    settings = with_grown_models(given)
    facts = {"target": model_facts(settings.target), "draft": model_facts(settings.draft)}
    floor = measure_floor(settings.target, settings.draft, settings.dtype)
    with Bench(settings) as bench:
        records, timelines = bench.run(), bench.timelines
    title = (
        f"{len({r.prompt for r in records})} prompts x {settings.repeats}, {settings.max_tokens} tokens each, "
        f"{settings.sessions} at once; {settings.acceptance.value} acceptance, {settings.growth} growth, "
        f"{settings.tree_step_tokens or 'as many as cost little more than one'} nodes per draft step"
    )
    print(render(facts, settings.dtype, records, title, floor))
    if args.json is not None:
        named = asdict(given) | {"target": facts["target"].path, "draft": facts["draft"].path}
        data = as_json(named, facts, records, floor=floor, timelines=timelines)
        write_json(args.json, data)
    own = {*(mode.value for mode in Mode), *replicas.MODES}
    return 1 if any(r.identical is False for r in records if r.mode in own) else 0


def run_serve(args: argparse.Namespace) -> int:
    """``paceline bench serve``. Returns 1 if any request's tokens differ from plain decoding's in one process."""
    from paceline_bench import serve

    _check_common(args)
    given = serve.Settings(
        target=args.target, draft=args.draft, grow_target=args.grow_target, grow_draft=args.grow_draft,
        draft_tokens=args.draft_tokens, delays_ms=args.draft_link_delay_ms, dtype=args.dtype, compile=args.compile,
        endpoint=None if args.endpoint is None else endpoint_settings(args), **_serve_load(args),
    )  # fmt: skip
    settings = serve.grown_settings(given)
    return _run_serve(given, settings, args.json)


def run_endpoint(args: argparse.Namespace) -> int:
    """``paceline bench endpoint``. Returns 1 if any request failed."""
    from paceline_bench import serve

    _check_common(args)
    settings = serve.Settings(
        target=args.tokenizer, draft="", places=(), endpoint=endpoint_settings(args), **_serve_load(args)
    )
    return _run_serve(settings, settings, args.json)


def _serve_load(args: argparse.Namespace) -> dict[str, Any]:
    """What ``serve`` and ``endpoint`` share. Raises ConfigError."""
    if args.burstiness is not None and not args.request_rate:
        raise ConfigError(f"--burstiness is {args.burstiness:g}: it is for arrivals, give --request-rate")
    try:
        goodput = flags.goodput(args.goodput)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--goodput: {error}") from error
    sessions = args.sessions if args.sessions is not None else () if args.request_rate else (1, 4, 16)
    return {
        "num_prompts": args.prompts, "prompts_file": args.prompts_file, "task_groups": task_groups(args),
        "max_tokens": args.max_tokens, "temperatures": args.temperatures, "sessions": sessions,
        "rates": args.request_rate, "burstiness": args.burstiness or 1.0, "goodput": goodput,
        "repeats": args.repeats, "seed": args.seed,
    }  # fmt: skip


def endpoint_settings(args: argparse.Namespace) -> EndpointSettings:
    """Raises ConfigError for a URL that is none, or a key that cannot be read."""
    key = None
    if args.endpoint_key_file is not None:
        try:
            key = args.endpoint_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--endpoint-key-file {str(args.endpoint_key_file)!r} cannot be read: {error}") from error
    settings = EndpointSettings(args.endpoint, args.endpoint_model, args.endpoint_api, key)
    settings.check()
    return settings if args.endpoint_body is None else replace(settings, extra=args.endpoint_body)


def _run_serve(given: serve.Settings, settings: serve.Settings, json_file: Path | None) -> int:
    from paceline_bench import serve, serve_report

    places = {"target": settings.target, "draft": settings.draft} if settings.places else {}
    facts = {role: model_facts(path) for role, path in places.items()}
    outcome = serve.measure(settings)
    print(serve_report.render(facts, settings, outcome))
    if json_file is not None:
        write_json(json_file, serve_report.as_json(serve.public(given, facts), facts, outcome))
    failed = not settings.places and any(unit.failed for unit in outcome.units)
    return 1 if failed or differing(outcome.units) else 0


def run_sweep(args: argparse.Namespace) -> int:
    """``paceline bench sweep``. Returns 1 if a text differs that is claimed to be plain decoding's."""
    from paceline_bench import plots, sweep

    plots.require_matplotlib()  # before a run of many minutes
    if args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out {str(args.out)!r} is a file: a directory is needed")
    parts = sweep.PARTS if args.parts is None else args.parts
    for part in parts:
        if part not in sweep.PARTS:
            raise ConfigError(f"--parts: {part!r} is none, {', '.join(sweep.PARTS)} are")
    if args.max_tokens < 2:
        raise ConfigError("--max-tokens is 1: at least 2 are needed, the first belongs to prefill")
    settings = sweep.Settings(
        target=args.target, draft=args.draft, grow_target=args.grow_target, grow_draft=args.grow_draft,
        dtype=args.dtype, compile=args.compile, parts=parts, sessions=args.sessions, rates=args.request_rate,
        temperatures=args.temperatures, prompts=args.prompts, max_tokens=args.max_tokens, repeats=args.repeats,
        seed=args.seed,
    )  # fmt: skip
    return sweep.run(settings, args.out, args.title)


def run_report(args: argparse.Namespace) -> int:
    """``paceline bench report``."""
    from paceline_bench import documents, page, plots, sections

    plots.require_matplotlib()
    if args.out.exists() and not args.out.is_dir():
        raise ConfigError(f"--out {str(args.out)!r} is a file: a directory is needed")
    for file in page.write(args.out, args.title, sections.all_sections(documents.read_runs(args.files))):
        print(file)
    return 0
