"""``paceline advise``: lists the methods that can draft for a target here, with the gain expected of each.

Loads nothing unless ``--measure`` is given. Exit status as in ``exit.py``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from paceline.cli.exit import EXIT_DONE
from paceline.cli.flags import add_model_argument, heads_of, take_model_argument
from paceline.cli.numbers import POSITIVE, integer, number
from paceline.cli.table import table, working
from paceline.config import ServiceConfig
from paceline.config.methods import DRAFTERS
from paceline.config.methods.entry import TEXTS, PoolMethod
from paceline.errors import ConfigError
from paceline.errors.files import read_text
from paceline.plan.advice import Candidate, Forecast, Site, forecasts
from paceline.plan.measured import Measurements, read_one
from paceline.plan.times import StepTable

if TYPE_CHECKING:
    from paceline.checkpoint.size import ModelSize
    from paceline.drafters.available import AvailableMethod

_STEP_SIZES = tuple(1 << i for i in range(13))
"""Tokens of the steps of a mixture of experts that are computed; in the largest ones every expert has a token."""
_RIDGE = 295
"""Tokens of a bf16 step whose arithmetic takes as long as reading the weights on an H100, as in ``paceline plan``."""
_BANDWIDTH_GB_S = 3350.0
_LAYER_S = 8e-5
"""Seconds of a layer beyond the reading of its weights on a GPU: launches, attention and sums of ranks. The least that
``benchmarks/results/gpu-predicted.txt`` has for one session."""
_LINK_GB_S = 1.25
"""10 Gbit/s."""
_LOOKUP = StepTable.affine(1e-4, 1e-5)
"""Seconds of a step of a drafter without weights, by its places: Python dictionaries."""
_MOST_TOKENS = 8
_COUNT = integer(1, 100_000)
_ON_HOSTS = "on its target's host"
_EMBEDDED_HEADS = ("mtp", "eagle3", "medusa")


class _Device(NamedTuple):
    """What decides the time of a forward on one device."""

    bytes_per_s: float
    """Weights that it reads in a second."""
    layer_s: float = 0.0
    """Seconds of a layer beyond that; 0: the rate is measured, and includes them."""

    def steps(self, weights_bytes: float, num_layers: int) -> StepTable:
        """Steps that read their weights once, for any number of tokens, and compute ``_RIDGE`` tokens meanwhile."""
        read_s = weights_bytes / self.bytes_per_s
        return StepTable.affine(read_s + num_layers * self.layer_s, read_s / _RIDGE)

    def steps_of_model(self, size: ModelSize, num_devices: int) -> StepTable:
        """Steps as of ``steps``, in which a mixture of experts reads only the experts that its tokens choose."""
        if not size.num_experts:
            return self.steps(size.weights_bytes / num_devices, size.num_layers)
        bytes_per_s, others_s = self.bytes_per_s * num_devices, size.num_layers * self.layer_s
        token_s = size.bytes_read(1) / bytes_per_s / _RIDGE
        return StepTable(
            tuple((n, others_s + size.bytes_read(n) / bytes_per_s + (n - 1) * token_s) for n in _STEP_SIZES)
        )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline advise``."""
    parser.description = (
        "Reports which drafting methods can serve a target with the available checkpoints, the expected speedup of "
        "each over plain decoding on the devices, and the configuration of the best one."
    )
    add_model_argument(parser)
    group = parser.add_argument_group("available")
    group.add_argument("--target", metavar="ID_OR_PATH", help="target model (default: the embedded one, with its own)")
    group.add_argument("--draft", metavar="ID_OR_PATH", help="a smaller model with the target's tokenizer")
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the models")
    group.add_argument(
        "--head", action="append", metavar="METHOD=MODEL", help="a head, as for paceline generate (repeatable)"
    )
    group.add_argument(
        "--measured",
        type=_figures,
        action="append",
        default=[],
        metavar="NAME=A,MS",
        help="a method, or a drafter of your own: its measured acceptance and the milliseconds of one of its forwards "
        "(repeatable)",
    )
    group = parser.add_argument_group("service")
    group.add_argument("--devices", type=_COUNT, default=1, metavar="N", help="of all replicas together (default 1)")
    group.add_argument("--target-devices", type=_COUNT, default=1, metavar="N", help="of one target (default 1)")
    group.add_argument("--sessions", type=_COUNT, default=1, metavar="N", help="requests at once (default 1)")
    group.add_argument(
        "--bandwidth-gb-s",
        type=POSITIVE,
        metavar="GB/S",
        help=f"at which a device reads weights (default {_BANDWIDTH_GB_S:g}: an H100)",
    )
    group.add_argument(
        "--target-step-ms",
        type=POSITIVE,
        metavar="MS",
        help="measured step of one token, from which the bandwidth follows (default: weights over bandwidth, "
        "and 0.08 ms a layer)",
    )
    group.add_argument(
        "--from",
        type=Path,
        dest="source",
        metavar="FILE",
        help="JSON of paceline bench local with this target and draft: times, by --cpu-threads too, and acceptance",
    )
    group.add_argument(
        "--link-gb-s",
        type=POSITIVE,
        default=_LINK_GB_S,
        metavar="GB/S",
        help=f"from a target to the draft pool, for the states that a head there reads (default {_LINK_GB_S:g})",
    )
    group.add_argument(
        "--kept",
        type=number(0, 1, open_low=True),
        metavar="R",
        help="share of the accepted tokens that heads in the draft pool keep where they draft ahead, of paceline "
        "status (default: they draft in turn with the target)",
    )
    group.add_argument(
        "--host-draft-step-ms",
        type=POSITIVE,
        metavar="MS",
        help="measured step of the draft on a core of a target's host: compares that layout, too",
    )
    group.add_argument("--text", choices=TEXTS, default="chat", help="kind of text, for the assumed acceptance")
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--measure", action="store_true", help="load the models and count how many draft tokens are accepted"
    )
    group.add_argument("--prompts-file", type=Path, metavar="FILE", help="prompts of --measure, one a line")
    group.add_argument(
        "--temperature",
        type=number(0, 2),
        metavar="T",
        help="of --measure (default 0), or which of --from (default: its first)",
    )
    parser.add_argument("--method", metavar="NAME", help="print the configuration of this one, not of the best")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_advise)


@dataclass(frozen=True, slots=True)
class Figures:
    """Measurements of a method, or of a drafter of the user's own."""

    name: str
    acceptance: float
    step_s: float


def _figures(text: str) -> Figures:
    name, _, figures = text.partition("=")
    try:
        acceptance, step_ms = map(float, figures.split(","))
    except ValueError:
        acceptance = step_ms = math.nan
    if not (name and 0 <= acceptance < 1 and 0 < step_ms < math.inf):
        raise argparse.ArgumentTypeError(
            f"{text!r}: NAME=A,MS is needed, A from 0 and below 1, MS above 0, such as MTP=0.4,0.1"
        )
    return Figures(name, acceptance, step_ms / 1e3)


def _own_drafter(measured: Sequence[Figures]) -> str | None:
    """The name in ``--measured`` that is no method: a drafter of the user's own. Raises ConfigError for two of them."""
    from paceline.drafters.catalogue import METHODS

    own = [each.name for each in measured if each.name not in {method.name for method in METHODS}]
    if len(own) > 1:
        raise ConfigError(
            f"--measured names {' and '.join(own)}, which are no methods: one drafter of your own is allowed"
        )
    return next(iter(own), None)


def _given(args: argparse.Namespace, each: AvailableMethod) -> Figures | None:
    """The figures that ``--measured`` gives of a method; None: none."""
    name = each.method.options["drafter"] if each.method.kind == "plugin" else each.method.name
    return next((figures for figures in args.measured if figures.name == name), None)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of a method's tokens, and where it is from."""

    value: float
    source: str


def run_advise(args: argparse.Namespace) -> int:
    """Runs ``paceline advise``."""
    from paceline.checkpoint.files import Checkpoint
    from paceline.config.loading import EMBEDDED_DRAFT, EMBEDDED_TARGET, resolve
    from paceline.drafters.available import available_methods

    take_model_argument(args)
    _check(args)
    target, draft, heads = args.target, args.draft, heads_of(args.head)
    if target is None:
        target, draft = EMBEDDED_TARGET, draft or EMBEDDED_DRAFT
        given = {head.method for head in heads}
        heads += heads_of([f"{kind}=paceline/embedded-{kind}" for kind in _EMBEDDED_HEADS if kind not in given])
    checkpoint = Checkpoint.open(resolve(target), args.trust_remote_code)
    if not checkpoint.has_weights and not args.measure:
        from paceline.preflight.service import counted

        checkpoint = counted(checkpoint)
    size = checkpoint.size(on_gpu=args.source is None)  # FP8 weights stay 8 bits there
    if size is None:
        raise ConfigError(f"--target is {target!r}: its weights are not on this machine, fetch it first")
    found = available_methods(checkpoint, draft and resolve(draft), heads, _own_drafter(args.measured))
    found += _on_hosts(args, draft, found)
    found = [_if_served(each, target, args.target_devices) for each in found]
    run = None if args.source is None else read_one(args.source, args.temperature, "--temperature")
    site, device = _site(args, size, run)
    with working("measuring"):
        found, acceptances = _weighed(args, target, found, run)
    possible = [each for each in found if not each.refusal]
    candidates = [_candidate(args, each, acceptances[each.method.name], device, run) for each in possible]
    ranked = forecasts(site, candidates)
    chosen = _chosen(args.method, ranked, found)
    tree = configuration(site, target, chosen, {each.method.name: each for each in possible})
    if args.trust_remote_code:
        _trust(tree)
    if args.json:
        print(json.dumps(as_json(site, ranked, acceptances, found, tree), indent=2))
    else:
        if run is None and args.target_step_ms is None and args.bandwidth_gb_s is None:
            device_name = f"an H100, {_BANDWIDTH_GB_S:,.0f} GB/s and {1e3 * _LAYER_S:g} ms a layer"
            print(f"assumed: {device_name}; name yours by --bandwidth-gb-s, or better --target-step-ms")
        print("\n".join(report(site, ranked, acceptances, found, args.kept)))
        if run is not None and site.devices > 1 and site.devices not in site.shared:
            print(
                f"not forecast: targets of {site.devices} cores. Their steps were not measured: paceline bench local "
                f"--cpu-threads {site.devices} --json FILE measures them on such a machine, and --from FILE reads them."
            )
        print(f"\n# {chosen.name}, of a service (--config); each request: --draft-tokens {chosen.predicted.k}")
        most = tree["target_config"]["engine_kwargs"]["max_sessions"]
        print(f"# max_sessions {most}: --sessions {site.sessions} over --devices {site.devices}; further requests wait")
        print(yaml.safe_dump(tree, sort_keys=False), end="")
    return EXIT_DONE


def _on_hosts(
    args: argparse.Namespace, draft: str | None, found: Sequence[AvailableMethod]
) -> Iterator[AvailableMethod]:
    """The draft model in the pool, on a core of each target's host, if its step there is given."""
    if args.host_draft_step_ms is None:
        return
    if draft is None:
        raise ConfigError(f"--host-draft-step-ms is {args.host_draft_step_ms:g} without --draft: name the model")
    for each in found:
        if each.method.kind == "model" and not each.method.options:
            method = replace(each.method, name=f"{each.method.name} {_ON_HOSTS}", options={"device": "cpu"})
            yield replace(each, method=method)


def _if_served(each: AvailableMethod, target: str, target_devices: int) -> AvailableMethod:
    """Returns the method, refused if a service with ``target_devices`` ranks refuses its configuration."""
    if each.refusal:
        return each
    tree = each.method.configuration(target, each.model)
    tree["target_config"].setdefault("engine_kwargs", {})["tensor_parallel_size"] = target_devices
    try:
        ServiceConfig.parse(tree)
    except ConfigError as error:
        return replace(each, refusal=str(error))
    return each


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that contradict each other."""
    if args.devices < args.target_devices:
        raise ConfigError(
            f"--devices is {args.devices} while --target-devices is {args.target_devices}: no target fits"
        )
    if args.prompts_file is not None and not args.measure:
        raise ConfigError(f"--prompts-file is {args.prompts_file} without --measure: only that runs the models")
    if args.temperature is not None and not args.measure and args.source is None:
        raise ConfigError(f"--temperature is {args.temperature:g} without --measure: only that runs the models")
    if args.source is not None:
        for flag, value in (("--target-step-ms", args.target_step_ms), ("--bandwidth-gb-s", args.bandwidth_gb_s)):
            if value is not None:
                raise ConfigError(f"{flag} is {value:g} with --from {args.source}, which has the times: give one")
        if args.target_devices > 1:
            raise ConfigError(
                f"--target-devices is {args.target_devices} with --from {args.source}: a run of one machine knows "
                "targets of one device, or of CPU cores that share its products"
            )
    if args.target_step_ms is not None and args.bandwidth_gb_s is not None:
        raise ConfigError(
            f"--target-step-ms is {args.target_step_ms:g} while --bandwidth-gb-s is {args.bandwidth_gb_s:g}: give one"
        )
    if args.measure:
        _prompts(args.prompts_file)


def _trust(tree: dict[str, Any]) -> None:
    """Lets the models of a configuration run code of their own."""
    tree["target_config"].setdefault("engine_kwargs", {})["trust_remote_code"] = True
    if "model_loading_config" in (tree["draft_config"] or {}):
        tree["draft_config"].setdefault("engine_kwargs", {})["trust_remote_code"] = True


def _site(args: argparse.Namespace, size: ModelSize, run: Measurements | None) -> tuple[Site, _Device]:
    """Finds the available devices, and how fast one of them is."""
    if run is not None:
        periods = {cores: times.period for cores, times in run.cores.items()}
        target = periods.pop(1, run.system.target)
        rate = args.link_gb_s * 1e9
        site = Site(target, args.devices, 1, args.sessions, run.system.link_s, rate, shared=periods)
        return site, _Device(size.bytes_read(1) / target.seconds(1))
    device = _Device((args.bandwidth_gb_s or _BANDWIDTH_GB_S) * 1e9, _LAYER_S)
    if args.target_step_ms is not None:
        device = _Device(size.bytes_read(1) / args.target_devices / (args.target_step_ms / 1e3))
    steps = device.steps_of_model(size, args.target_devices)
    site = Site(steps, args.devices, args.target_devices, args.sessions)
    return replace(site, link_bytes_per_s=args.link_gb_s * 1e9), device


def _candidate(
    args: argparse.Namespace, each: AvailableMethod, acceptance: Acceptance, device: _Device, run: Measurements | None
) -> Candidate:
    """The device in numbers: a forward reads its weights once, on one device."""
    from paceline.drafters.catalogue import Place

    in_pool = each.method.place is Place.POOL
    step = device.steps(each.forward_bytes, each.num_layers) if each.forward_bytes else _LOOKUP
    devices, most = int(in_pool and each.forward_bytes > 0), min(_MOST_TOKENS, each.most_tokens)
    found = Candidate(each.method.name, acceptance.value, step, in_pool, devices, each.one_pass, most)
    if each.method.name.endswith(_ON_HOSTS):
        step_s = args.host_draft_step_ms / 1e3
        return replace(found, step=StepTable.affine(step_s, step_s / 8), devices=0, on_target_nodes=True)
    if run is not None and _is_of_run(each):
        shared = {cores: times.draft for cores, times in run.cores.items()}
        return replace(found, step=run.system.draft, shared=shared, path=run.system.path, has_siblings=True)
    if (given := _given(args, each)) is not None:
        row_s = given.step_s / _RIDGE if each.forward_bytes else 0.0
        found = replace(found, step=StepTable.affine(given.step_s, row_s))
    found = replace(found, state_bytes=each.state_bytes, riding_rows=each.riding_rows)
    if each.state_bytes:
        found = replace(found, kept=args.kept)
    if each.guesses is not None:
        num, kind = each.guesses
        found = replace(found, guesses=(num, DRAFTERS[kind].assumed(args.text)[0]))
    return found


def _is_of_run(each: AvailableMethod) -> bool:
    """True for what ``paceline bench local`` measures without flags of its own: a draft model, in either place."""
    return each.method.entry.of_draft and each.guesses is None


def _weighed(
    args: argparse.Namespace, target: str, found: Sequence[AvailableMethod], run: Measurements | None
) -> tuple[list[AvailableMethod], dict[str, Acceptance]]:
    """Returns the methods, also refused where measuring fails, and the acceptance of every possible one."""
    examined, acceptances = [], {}
    for each in found:
        if not each.refusal:
            try:
                acceptances[each.method.name] = _acceptance(args, target, each, run)
            except ConfigError as error:
                each = replace(each, refusal=" ".join(str(error).split()))
        examined.append(each)
    return examined, acceptances


def _acceptance(args: argparse.Namespace, target: str, each: AvailableMethod, run: Measurements | None) -> Acceptance:
    if not args.measure:
        if (given := _given(args, each)) is not None:
            return Acceptance(given.acceptance, f"given, --measured {given.name}")
        if run is not None and _is_of_run(each):
            source = f"measured, {args.source} at temperature {run.temperature:g}"
            return Acceptance(run.system.outcomes.acceptance, source)
        return Acceptance(*each.method.drafting.assumed(args.text))
    from paceline.cli.measure import acceptance_of

    return Acceptance(*acceptance_of(target, each, _prompts(args.prompts_file), args.temperature or 0.0))


def _prompts(path: Path | None) -> Sequence[str]:
    """Returns the lines of a file; None: the start-up probe's. Raises ConfigError."""
    from paceline.drafters.heads.probe import TEXTS as PROBE_TEXTS

    if path is None:
        return PROBE_TEXTS
    text = read_text(path, f"--prompts-file is {str(path)!r}")
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts-file is {str(path)!r}: it has no prompt")
    return lines


def _chosen(name: str | None, ranked: Sequence[Forecast], found: Sequence[AvailableMethod]) -> Forecast:
    """The forecast whose configuration is printed. Raises ConfigError."""
    if name is None:
        return ranked[0]
    for forecast in ranked:
        if forecast.name == name:
            return forecast
    refusal = next((each.refusal for each in found if each.method.name == name), "")
    there = ", ".join(forecast.name for forecast in ranked)
    raise ConfigError(f"--method is {name!r}: {refusal or f'possible on these devices are {there}'}")


def configuration(site: Site, target: str, chosen: Forecast, found: dict[str, AvailableMethod]) -> dict[str, Any]:
    """The service's configuration for a forecast, as ``ServiceConfig.parse`` takes it."""
    k, per_target = max(1, chosen.predicted.k), math.ceil(site.sessions / chosen.targets)
    tree: dict[str, Any] = {"target_config": {"model_loading_config": {"model_id": target}}, "draft_config": None}
    if (each := found.get(chosen.name)) is not None:
        method = each.method
        if "num_speculative_tokens" in method.options:
            method = replace(method, options={**method.options, "num_speculative_tokens": k})
        tree = method.configuration(target, each.model)
    rows = per_target * (1 + k + (0 if each is None else each.riding_rows))
    engine = tree["target_config"].setdefault("engine_kwargs", {})
    engine |= {"max_sessions": min(1024, per_target)}
    key = "cpu_threads" if chosen.target_devices in site.shared else "tensor_parallel_size"
    engine[key] = chosen.target_devices
    if rows > 256:
        engine["max_step_tokens"] = min(65536, rows)
    tree["target_config"]["deployment_config"] = {"num_replicas": chosen.targets}
    if tree["draft_config"] is not None and chosen.drafts:
        tree["draft_config"]["deployment_config"] = {"num_replicas": chosen.drafts}
        if chosen.name.endswith(_ON_HOSTS):
            tree["draft_config"]["deployment_config"]["on_target_nodes"] = True
            labels = {"label_selector": {"paceline/pool": "target"}}
            tree["target_config"]["deployment_config"]["ray_actor_options"] = labels
        entry = None if each is None else each.method.entry
        if isinstance(entry, PoolMethod) and "max_sessions" in entry.options.model_fields:
            most = min(16384, math.ceil(site.sessions / chosen.drafts))
            tree["draft_config"].setdefault("engine_kwargs", {})["max_sessions"] = most
    return tree


def as_json(
    site: Site,
    ranked: Sequence[Forecast],
    acceptances: dict[str, Acceptance],
    found: Sequence[AvailableMethod],
    tree: dict[str, Any],
) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {
        "site": asdict(site),
        "forecasts": [asdict(forecast) for forecast in ranked],
        "acceptance": {name: asdict(acceptance) for name, acceptance in acceptances.items()},
        "refused": {each.method.name: each.refusal for each in found if each.refusal},
        "configuration": tree,
    }


def report(
    site: Site,
    ranked: Sequence[Forecast],
    acceptances: dict[str, Acceptance],
    found: Sequence[AvailableMethod],
    kept: float | None,
) -> Iterator[str]:
    """The lines that are printed before the configuration."""
    devices, sessions = (
        f"{n} {what}" + "s" * (n > 1) for n, what in ((site.devices, "device"), (site.sessions, "session"))
    )
    yield (
        f"{devices}, {site.target_devices} for a target, {sessions} at once; "
        f"a target's step of one token takes {site.target.seconds(1) * 1e3:.3g} ms"
    )
    yield ""
    header = ("", "where", "targets", "of", "drafts", "K", "acceptance", "tok/round", "ms/token", "tokens/s", "x plain")
    places = {each.method.name: each.method.place.value for each in found}
    yield from table([header, *(_row(forecast, places, acceptances) for forecast in ranked)], sys.stdout)
    yield ""
    by_source: dict[str, list[str]] = {}
    for name, acceptance in acceptances.items():
        by_source.setdefault(acceptance.source, []).append(name)
    yield from (f"acceptance of {'; '.join(names)}: {source}" for source, names in by_source.items())
    if any(each.state_bytes and not each.refusal for each in found) and kept is None:
        yield (
            "heads in the draft pool take turns with the target; --kept R is the measured acceptance that is left when "
            "they draft ahead"
        )
    yield "prompt lookup is always on in addition to these, where its tokens are likely to be accepted"
    from paceline.drafters.available import NO_CHECKPOINT

    shown = {forecast.name for forecast in ranked}
    by_reason: dict[str, list[str]] = {}
    lacking = []
    for each in found:
        if each.refusal.startswith(NO_CHECKPOINT):
            lacking.append(each)
        elif each.refusal:
            by_reason.setdefault(each.refusal, []).append(each.method.name)
        elif each.method.name not in shown:
            reason = f"--devices {site.devices} leaves no device for a draft"
            by_reason.setdefault(reason, []).append(each.method.name)
    yield from (f"not {'; '.join(names)}: {reason}" for reason, names in by_reason.items())
    if lacking:
        flags = dict.fromkeys(each.refusal.removeprefix(NO_CHECKPOINT) for each in lacking)
        yield f"not, as no checkpoint was found: {'; '.join(each.method.name for each in lacking)}"
        yield f"a checkpoint is named with {', '.join(flags)}"


def _row(forecast: Forecast, places: dict[str, str], acceptances: dict[str, Acceptance]) -> tuple[str, ...]:
    predicted, acceptance = forecast.predicted, acceptances.get(forecast.name)
    return (
        forecast.name,
        places.get(forecast.name, "-"),
        str(forecast.targets),
        str(forecast.target_devices),
        str(forecast.drafts or "-"),
        str(predicted.k or "-"),
        "-" if acceptance is None else f"{acceptance.value:.2f}",
        f"{predicted.tokens_per_round:.2f}",
        f"{predicted.itl_s * 1e3:.3g}",
        f"{predicted.tokens_per_s:,.0f}",
        f"{forecast.times_plain:.2f}",
    )
