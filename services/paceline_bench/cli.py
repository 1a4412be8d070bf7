"""``paceline bench``: its flags, and what each kind of run prints and returns."""

from __future__ import annotations

import argparse
import importlib
import shutil
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.files import embedded_paths
from paceline.cli.flags import add_quiet_flag
from paceline.errors import ConfigError
from paceline.errors.files import read_text
from paceline.types import Acceptance
from paceline_bench import cores, flags
from paceline_bench.compare import command
from paceline_bench.drafting import Drafting
from paceline_bench.endpoint import EndpointSettings
from paceline_bench.local import LocalBench, differs
from paceline_bench.machine import measure_floor
from paceline_bench.models import ModelLabel, model_labels, with_grown_models
from paceline_bench.peer_worker import DTYPES as PEER_DTYPES
from paceline_bench.records import differing
from paceline_bench.report import documents
from paceline_bench.report.text import identity, text_of
from paceline_bench.settings import PARTS, LocalSettings, Peer, RunSettings, ServeSettings, SweepSettings
from paceline_bench.tasks import GROUPS

_ONE_BASELINES = ("transformers", "assisted", "lookup")
_SEVERAL_BASELINES = ("transformers", "continuous")
PARTS_OF_A_STEP = (
    *("attention", "linear", "gated-delta", "sampling", "batch-invariance"),
    *("head-cost", "host-time", "overlap", "stream"),
)
_Settings = TypeVar("_Settings", bound=RunSettings)


def add_parser(subparsers: Any) -> None:
    """Adds ``bench`` to the commands."""
    bench = subparsers.add_parser("bench", help="measure", description="Benchmarks.")
    kinds = bench.add_subparsers(dest="bench", required=True, metavar="KIND", parser_class=type(bench))
    local = kinds.add_parser(
        "local",
        help="all modes on this machine, and transformers' generate",
        description="Compares the modes and transformers' generate on the same prompts, in one run.",
    )
    flags.add_local_flags(local, _ONE_BASELINES, _SEVERAL_BASELINES)
    local.set_defaults(run=run_local)
    serve = kinds.add_parser(
        "serve",
        help="a service on this machine against the one-process pipeline",
        description="Starts a service and compares it with the one-process pipeline on the same prompts, in one run.",
    )
    flags.add_serve_flags(serve)
    serve.set_defaults(run=run_serve)
    endpoint = kinds.add_parser(
        "endpoint",
        help="any OpenAI-compatible server",
        description="Measures a server that speaks the OpenAI API with the load of `paceline bench serve`.",
    )
    flags.add_endpoint_flags(endpoint)
    endpoint.set_defaults(run=run_endpoint)
    sweep = kinds.add_parser(
        "sweep",
        help="the full run: everything of the above, and its report",
        description="Loads, temperatures, pairs, task groups and the service in one run, and the report on them.",
    )
    flags.add_sweep_flags(sweep)
    sweep.set_defaults(run=run_sweep)
    compare = kinds.add_parser(
        "compare",
        help="configurations of your own in turn, as a file says",
        description="Compares arms, which are changes of one configuration, on the same requests in turn: tokens/s, "
        "their ratio to a baseline with its interval, acceptance, and whether all texts are the baseline's.",
    )
    command.add_flags(compare)
    compare.set_defaults(run=command.run)
    virtual = kinds.add_parser(
        "virtual",
        help="what a method can win, on a virtual clock",
        description="Runs the embedded pair on a virtual clock: tokens per unit of time and per target step.",
    )
    flags.add_virtual_flags(virtual)
    virtual.set_defaults(run=run_virtual)
    parts = kinds.add_parser(
        "parts",
        help="what single parts of a step cost",
        description="Measures one part of a step and an alternative to it. NAME --help shows its flags.",
    )
    parts.add_argument("name", choices=PARTS_OF_A_STEP, help=", ".join(PARTS_OF_A_STEP))
    parts.add_argument("arguments", nargs=argparse.REMAINDER, help="its own flags")
    parts.set_defaults(run=run_parts)
    report = kinds.add_parser(
        "report",
        help="tables and plots from JSON files",
        description="Renders what the other kinds have written with --json: report.html (one page that needs nothing "
        "else), report.md and a plot per file.",
    )
    report.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    flags.add_report_flags(report, "made if it does not exist")
    report.set_defaults(run=run_report)
    for kind in kinds.choices.values():
        add_quiet_flag(kind)


def run_local(args: argparse.Namespace) -> int:
    """Runs ``paceline bench local``. Returns 1 if a text differs that is claimed to be plain decoding's."""
    _check_common(args)
    drafting = Drafting(args.drafter, tuple(args.head or ()))
    modes = drafting.modes(args.modes)
    baselines = drafting.baselines(args.baselines, _ONE_BASELINES if args.sessions == 1 else _SEVERAL_BASELINES)
    prompts = args.num_prompts if args.num_prompts is not None else None if args.prompts_file else 8
    if prompts is not None and prompts % args.sessions:
        raise ConfigError(f"--prompts is {prompts}: it must be a multiple of --sessions ({args.sessions})")
    acceptance = Acceptance(args.acceptance)
    of_model = {"--draft": args.draft, "--grow-draft": args.grow_draft, "--tree-step-tokens": args.tree_step_tokens}
    of_model["--cpu-threads"] = ",".join(map(str, args.cpu_threads)) or None
    of_model["--draft-device"] = None if args.draft_device == "auto" else args.draft_device
    drafting.check(modes, of_model)
    if args.cpu_threads and of_model["--draft-device"]:
        given_threads = of_model["--cpu-threads"]
        raise ConfigError(f"--draft-device {args.draft_device} with --cpu-threads {given_threads}: these run on CPUs")
    draft = (args.draft or str(embedded_paths()[1])) if drafting.has_model else ""
    given = _settings(
        LocalSettings,
        args,
        num_prompts=prompts,
        modes=modes,
        baselines=baselines,
        acceptance=acceptance,
        draft=draft,
        heads=drafting.heads,
        peers=_peers(args),
    )
    settings = with_grown_models(given)
    labels = model_labels(settings)
    if settings.cpu_threads:
        cores.configs(settings)  # refuses before a run of many minutes
    floor = measure_floor(settings.target, settings.draft, settings.dtype)
    with LocalBench(settings) as bench:
        records, timelines = bench.run(), bench.timelines
    shared = cores.records(settings, records, bench.shared) if bench.shared else []
    title = (
        f"{len({r.prompt for r in records})} prompts x {settings.repeats}, {settings.max_tokens} tokens each, "
        f"{settings.sessions} at once; {settings.acceptance.value} acceptance, "
        f"{settings.tree_step_tokens or 'the number that costs little more than one'} nodes per draft step; "
        f"drafter {settings.drafter}" + "".join(f", head {head}" for head in settings.heads)
    )
    named = asdict(given) | {role: label.path for role, label in labels.items()}
    named["peers"] = [peer.engine for peer in given.peers]
    document = documents.of_local(named, labels, records, floor=floor, timelines=timelines)
    print(text_of(title, documents.run_of(document)))
    if shared:
        print(f"\n{cores.text(shared)}")
        document["cores"] = [cores.as_json(record) for record in shared]
    if args.json is not None:
        documents.write(args.json, document)
    return int(differs(records))


def _peers(args: argparse.Namespace) -> tuple[Peer, ...]:
    """The other engines, of which each is given once, with models and numbers that they read."""
    given: list[Peer] = args.peers
    for peer in given:
        named = f"--peer {peer.engine}={peer.python}"
        if [other.engine for other in given].count(peer.engine) > 1:
            raise ConfigError(f"{named}: {peer.engine} is given twice")
        if shutil.which(peer.python) is None:
            raise ConfigError(f"{named}: the Python of the environment that has {peer.engine} is needed")
        if args.dtype not in PEER_DTYPES:
            raise ConfigError(f"{named} with --dtype {args.dtype}: use {_or(PEER_DTYPES)}")
        if not (Path(args.target).expanduser() / "config.json").is_file():
            raise ConfigError(f"{named} with --target {args.target!r}: a directory with a checkpoint is needed")
    return tuple(given)


def run_serve(args: argparse.Namespace) -> int:
    """Runs ``paceline bench serve``. Returns 1 if any text differs from plain decoding's in one process."""
    _check_common(args)
    endpoint = None if args.endpoint is None else _endpoint(args)
    given = _settings(ServeSettings, args, endpoint=endpoint, **_loads(args))
    settings = with_grown_models(given)
    return _run_serve(given, settings, model_labels(settings), args.json)


def run_endpoint(args: argparse.Namespace) -> int:
    """Runs ``paceline bench endpoint``. Returns 1 if any request failed."""
    _check_common(args)
    settings = _settings(ServeSettings, args, draft="", places=(), endpoint=_endpoint(args), **_loads(args))
    return _run_serve(settings, settings, {}, args.json)


def _run_serve(given: ServeSettings, settings: ServeSettings, labels: dict[str, ModelLabel], file: Path | None) -> int:
    from paceline_bench import serve  # gRPC is for the kinds that need it

    outcome = serve.measure(settings)
    document = documents.of_service(given.public({role: label.path for role, label in labels.items()}), labels, outcome)
    print("\n".join([text_of(_title(settings), documents.run_of(document)), *identity(outcome.units)]))
    if file is not None:
        documents.write(file, document)
    failed = not settings.places and any(unit.failed for unit in outcome.units)
    return int(failed or bool(differing(outcome.units)))


def _title(settings: ServeSettings) -> str:
    loads = f"repeats {settings.repeats}; loads: {'; '.join(load.name for load in settings.loads)}"
    if not settings.places:
        assert settings.endpoint is not None, "there is something to measure"
        return f"{settings.endpoint.url}\n{settings.max_tokens} tokens per request; {loads}"
    return f"{settings.max_tokens} tokens per request, K={settings.draft_tokens}, coupled acceptance; {loads}"


def run_sweep(args: argparse.Namespace) -> int:
    """Runs ``paceline bench sweep``. Returns 1 if a text differs that is claimed to be plain decoding's."""
    from paceline_bench import sweep

    _check_out(args.out)  # before a run of many minutes
    _check_max_tokens(args)
    for part in args.parts:
        if part not in PARTS:
            raise ConfigError(f"unknown part {part!r} in --parts: use {_or(PARTS)}")
    return sweep.run(_settings(SweepSettings, args), args.out, args.title)


def run_virtual(args: argparse.Namespace) -> int:
    """Runs ``paceline bench virtual``. Returns 1 if two ways wrote different texts."""
    from paceline_bench import virtual  # torch is for the kinds that run a model

    return virtual.run(args)


def run_parts(args: argparse.Namespace) -> int:
    """Runs ``paceline bench parts``."""
    module = importlib.import_module(f"paceline_bench.parts.{args.name.replace('-', '_')}")
    module.main(args.arguments)
    return 0


def run_report(args: argparse.Namespace) -> int:
    """Runs ``paceline bench report``."""
    from paceline_bench.report import page, sections

    _check_out(args.out)
    runs = [documents.read_run(file) for file in args.files]
    for file in page.write(args.out, args.title, sections.all_sections(runs)):
        print(file)
    return 0


def _settings(kind: type[_Settings], args: argparse.Namespace, **changes: Any) -> _Settings:
    """Settings of a kind: its fields from the flags of the same names, but for ``changes``."""
    given = {field.name: getattr(args, field.name) for field in fields(kind) if field.name in args}
    return kind(**{**given, "task_groups": _task_groups(args), **changes})


def _loads(args: argparse.Namespace) -> dict[str, Any]:
    if args.burstiness is not None and not args.rates:
        raise ConfigError(f"--burstiness is {args.burstiness:g}: it is for arrivals, give --request-rate")
    try:
        goodput = flags.goodput(args.goodput)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--goodput: {error}") from error
    sessions = args.sessions if args.sessions is not None else () if args.rates else (1, 4, 16)
    return {"sessions": sessions, "burstiness": args.burstiness or 1.0, "goodput": goodput}


def _endpoint(args: argparse.Namespace) -> EndpointSettings:
    key = None
    if args.endpoint_key_file is not None:
        key = read_text(args.endpoint_key_file, f"--endpoint-key-file is {str(args.endpoint_key_file)!r}").strip()
    settings = EndpointSettings(args.endpoint, args.endpoint_model, args.endpoint_api, key)
    settings.check()
    return settings if args.endpoint_body is None else replace(settings, extra=args.endpoint_body)


def _task_groups(args: argparse.Namespace) -> tuple[str, ...]:
    """Groups of ``--task-group``: of the held-out text, or categories of the file."""
    given: tuple[str, ...] = getattr(args, "task_groups", ())
    if getattr(args, "prompts_file", None) is not None:
        return given
    if given == ("all",):
        return GROUPS
    for group in given:
        if group not in GROUPS:
            raise ConfigError(f"unknown --task-group {group!r}: use {_or((*GROUPS, 'all'))}")
    return given


def _check_common(args: argparse.Namespace) -> None:
    _check_max_tokens(args)
    _task_groups(args)
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {str(args.json)!r}: its directory does not exist")


def _check_max_tokens(args: argparse.Namespace) -> None:
    if args.max_tokens < 2:
        raise ConfigError("--max-tokens is 1: at least 2 are needed, the first belongs to prefill")


def _check_out(out: Path) -> None:
    from paceline_bench.report import plots

    plots.require_matplotlib()
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {str(out)!r} is a file: a directory is needed")


def _or(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
