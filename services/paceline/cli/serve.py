"""``paceline serve``: the service on this machine, or on a Ray cluster that runs already, until it is told to stop.

    flags, environment, file ─▶ configuration ─▶ checks ─▶ cluster.launch.Service, or with --local cli.local_service

Exit status: 0 stopped by SIGTERM, 130 by Ctrl-C; the others as in ``exit.py``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.folder import gguf_on_hub
from paceline.cli.drafting import choose, is_embedded
from paceline.cli.exit import EXIT_DONE, EXIT_INTERRUPTED
from paceline.cli.flags import (
    add_fields,
    add_model_argument,
    add_model_flags,
    check_placement,
    draft_config_of,
    field_at,
    flag_of,
    heads_of,
    help_of,
    require_pair,
    take_model_argument,
)
from paceline.cli.startup import StartView, next_steps, tell_ready
from paceline.cli.vllm import add_vllm_flags, speculation_of, vllm_settings, with_rope_flags
from paceline.cluster.encryption import tls_settings
from paceline.cluster.environment import serve_environment, socket_folder
from paceline.cluster.launch import Service
from paceline.config import EMBEDDED_DRAFT, EMBEDDED_TARGET, ModelDraftConfig, ServiceConfig
from paceline.errors import ConfigError
from paceline.logs import narrate
from paceline.preflight.service import require_service
from paceline.security import haproxy

_SERVER_KEYS = [
    "server.host",
    "server.grpc_port",
    "server.http_port",
    "server.tool_call_parser",
    "server.reasoning_parser",
]
_FILE_KEYS = {
    "tls_certificate": "server.tls.certificate",
    "tls_key": "server.tls.key",
    "tls_client_ca": "server.tls.client_ca",
    "api_keys": "server.api_keys",
    "chat_template": "server.chat_template",
}
"""Flags that name files, and the keys that they set."""
_PAGE_KEY = "server.playground"
_LIST_KEYS = ("server.served_model_name", "server.cors_origins", "server.allowed_hosts")
_RUNNING = ("dtype", "compile", "background_compilation")
"""Flags of a target that its draft models share."""
_ENGINE_KEYS = [f"target_config.engine_kwargs.{name}" for name in _RUNNING]
_TARGET_KEYS = [
    *_ENGINE_KEYS,
    *(f"target_config.engine_kwargs.{name}" for name in ("max_model_len", "device")),
    *(f"target_config.engine_kwargs.{name}" for name in ("tensor_parallel_size", "cpu_threads")),
]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``paceline serve``."""
    parser.description = "Runs the service on this machine, or on a Ray cluster, until it is interrupted."
    add_config_flags(parser)
    parser.add_argument(
        "--local", action="store_true", help="both engines behind HTTP and gRPC, without Ray and replicas"
    )
    group = parser.add_argument_group("Ray")
    group.add_argument("--address", metavar="RAY_ADDRESS", help="join this Ray cluster (default: start one here)")
    group.add_argument("--dashboard", action="store_true", help="also start Ray's dashboard")
    group.add_argument(
        "--print-environment",
        action="store_true",
        help="print, for a shell, what the processes of a Ray cluster need for `serve deploy`, and end",
    )
    parser.add_argument("--verbose", action="store_true", help="print what the replicas log")
    parser.set_defaults(run=run_serve)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that ``read_config`` reads."""
    add_model_argument(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML: the configuration, or a Serve config file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of it (repeatable)"
    )
    add_model_flags(parser, ["none"])
    group = parser.add_argument_group("replicas")
    for pool in ("target", "draft", "router"):
        text = f"{pool} replicas, or bounds within which their number follows the load (default 1)"
        group.add_argument(f"--{pool}s", type=_size, metavar="N|MIN:MAX", help=text)
    group = parser.add_argument_group("where")
    add_fields(group, ServiceConfig, [key for key in _SERVER_KEYS if key != "server.http_port"])
    help_ = help_of(field_at(ServiceConfig, "server.http_port"))
    group.add_argument("--http-port", "--port", type=int, metavar="N", help=help_)
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names by which clients ask for the model (default: its id)",
    )
    group.add_argument(
        "--cors-origins",
        "--allowed-origins",
        nargs="+",
        metavar="ORIGIN",
        help="origins of web pages that may call, * for any (default: pages of this machine, none with keys)",
    )
    group.add_argument(
        "--allowed-hosts",
        nargs="+",
        metavar="NAME",
        help="allowed names in the header Host in addition to this machine's, * for any (default: any, except "
        "on the loopback)",
    )
    group.add_argument(
        "--no-playground", dest="playground", action="store_const", const=False, help="serve no page at / of the port"
    )
    group = parser.add_argument_group("files")
    for name, key in _FILE_KEYS.items():
        group.add_argument(flag_of(name), dest=name, metavar="FILE", help=help_of(field_at(ServiceConfig, key)))
    add_vllm_flags(parser)


def _size(text: str) -> int | tuple[int, int]:
    """The size of a pool: a number of replicas, or the fewest and the most. Raises ArgumentTypeError."""
    try:
        least, separator, most = text.partition(":")
        return (int(least), int(most)) if separator else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: a number is needed, or two such as 1:3") from None


def _sized(pool: str, size: int | tuple[int, int] | None) -> dict[str, Any]:
    """Settings of a pool's deployment: a number replaces bounds of the file, and bounds replace a number."""
    if size is None:
        return {}
    key = f"{pool}_config.deployment_config."
    if isinstance(size, int):
        return {key + "autoscaling_config": None, key + "num_replicas": size}
    least, most = size
    bounds = {"min_replicas": least, "max_replicas": most}
    return {key + "num_replicas": None} | {f"{key}autoscaling_config.{name}": value for name, value in bounds.items()}


def read_config(args: argparse.Namespace) -> ServiceConfig:
    """The configuration of flags, environment variables and file: the first of them that sets a key wins.

    Raises ConfigError.
    """
    take_model_argument(args)
    settings = vllm_settings(args)
    if args.config is not None and (args.config.is_dir() or not args.config.exists()):
        reason = "it is a directory" if args.config.is_dir() else "there is no such file"
        raise ConfigError(f"--config is {str(args.config)!r}: it cannot be read ({reason}), and a YAML file is needed")
    config = (ServiceConfig() if args.config is None else ServiceConfig.from_file(args.config)).with_environment()
    if config.server.tls is None and not any(override.startswith("server.tls") for override in args.set):
        require_pair("--tls-certificate", args.tls_certificate, "--tls-key", args.tls_key)
    if args.draft is not None and args.drafter not in (None, "model"):
        raise ConfigError(f"--draft {args.draft} is given with --drafter {args.drafter}, which does not take it")
    overrides, draft = list(args.set), config.draft_config
    running = {name: value for name in _RUNNING if (value := getattr(args, name)) is not None}
    modelless = draft_config_of(args.drafter, running)
    if modelless is not None and (draft is None or draft.drafter_name != args.drafter):
        overrides.insert(0, _override("draft_config", modelless))
    elif args.draft is not None and not isinstance(draft, ModelDraftConfig):
        overrides.insert(0, _override("draft_config", {"kind": "model"}))
    if args.target is not None:
        overrides.append(_override("target_config.model_loading_config", _loading("--target", args.target)))
    if args.drafter == "none" or args.drafts == 0:
        overrides.append(_override("draft_config", None))
    elif args.draft is not None:
        overrides.append(_override("draft_config.model_loading_config", _loading("--draft", args.draft)))
    overrides += _speculation(args)
    names_draft = any(override.startswith("draft_config") for override in overrides)
    unnamed = isinstance(draft, ModelDraftConfig) and "model_loading_config" not in draft.model_fields_set
    if not is_embedded(args.target) and unnamed and not names_draft:
        overrides.append(_override("draft_config", None))
        overrides += _drafting_overrides(args, config.with_overrides(overrides))
    config = config.with_overrides(overrides)
    return with_rope_flags(args, config.with_overrides(_further(args, config, settings)))


def _speculation(args: argparse.Namespace) -> list[str]:
    """Overrides of ``--speculative-config``. Raises ConfigError."""
    if (found := speculation_of(args.speculative_config)) is None:
        return []
    for flag in ("draft", "drafter", "head"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"--speculative-config is given with {flag_of(flag)}: one of them is allowed")
    draft, heads = found
    listed = [head.model_dump() for head in heads]
    return [_override("draft_config", draft), _override("target_config.engine_kwargs.heads", listed)]


def _drafting_overrides(args: argparse.Namespace, config: ServiceConfig) -> list[str]:
    """Overrides that select the best available method for a target without a draft; logs the choice. Raises
    ConfigError."""
    for flag in ("placement", "draft_device", "drafts"):
        if getattr(args, flag) is not None:
            raise ConfigError(f"{flag_of(flag)} is given without --draft and --drafter: there is no draft to place")
    if args.head or any(override.startswith("target_config.engine_kwargs.heads") for override in args.set):
        return []
    chosen = choose(args.target, config.target_config.engine_kwargs.trust_remote_code)
    narrate(f"paceline: {chosen.line}")
    return [_override("target_config.engine_kwargs.heads", [head.model_dump() for head in chosen.heads])]


def _further(args: argparse.Namespace, config: ServiceConfig, settings: Mapping[str, Any]) -> list[str]:
    """Overrides that depend on the configuration. ``settings``: of vLLM's flags."""
    keys, draft = [*_TARGET_KEYS, *_SERVER_KEYS, *_LIST_KEYS, _PAGE_KEY], config.draft_config
    if isinstance(draft, ModelDraftConfig):
        keys += [key.replace("target_config", "draft_config") for key in _ENGINE_KEYS]
        keys.append("draft_config.engine_kwargs.placement")
    check_placement(args, has_model=isinstance(draft, ModelDraftConfig))
    values = {key: getattr(args, key.rpartition(".")[2]) for key in keys}
    values |= {key: getattr(args, name) for name, key in _FILE_KEYS.items()}
    given = {key: value for key, value in values.items() if value is not None}
    given |= {} if args.draft_device is None else {"draft_config.engine_kwargs.device": args.draft_device}
    given |= settings
    given |= _sized("target", args.targets) | _sized("router", args.routers)
    given |= {} if draft is None else _sized("draft", args.drafts)
    if args.head:
        given["target_config.engine_kwargs.heads"] = [head.model_dump() for head in heads_of(args.head)]
    if any(key.startswith("draft_config.") for key in given) and "draft_config" not in config.model_fields_set:
        given = {"draft_config.model_loading_config": {"model_id": EMBEDDED_DRAFT}} | given
    return [_override(key, value) for key, value in given.items()]


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"


def _loading(flag: str, value: str) -> dict[str, str]:
    """``model_loading_config`` of a flag's value; clients know a path by its last part. Raises ConfigError."""
    if not value:
        raise ConfigError(f"{flag} is empty: a model id or a directory is needed")
    folder = Path(value).expanduser()
    if folder.is_dir():
        return {"model_id": folder.resolve().name, "model_source": str(folder)}
    if value.endswith(".gguf"):
        return {"model_id": folder.stem, "model_source": value if gguf_on_hub(value) else str(folder)}
    return {"model_id": value}


_NOT_LOCAL = ("targets", "drafts", "routers", "address", "dashboard")


def _run_local(args: argparse.Namespace) -> int:
    """Runs ``paceline serve --local``. Raises ConfigError for flags of replicas, routers and Ray."""
    for name in _NOT_LOCAL:
        if getattr(args, name):
            raise ConfigError(f"{flag_of(name)} is given with --local, which has neither replicas nor routers")
    if args.print_environment:
        raise ConfigError("--print-environment is given with --local, which runs no Ray cluster")
    from paceline.cli.local_service import local_of, serve_local

    config = read_config(args)
    model_id = config.target_config.model_loading_config.model_id
    serve_local(local_of(config), config.server, model_id, config.tracing, config.router_config)
    return EXIT_DONE


def served_name(target: str | None) -> str:
    """The name of the model that ``--target`` names, for clients. Raises ConfigError for an empty one."""
    return EMBEDDED_TARGET if target is None else _loading("--target", target)["model_id"]


def _ready(view: StartView, config: ServiceConfig) -> None:
    """Says how long the start took and what to type next."""
    view.close()
    server, target = config.server, config.target_config.model_loading_config.source
    https = server.tls is not None and server.tls.http
    chats = server.chat_template is not None or not is_embedded(target)  # which has no template
    tell_ready(view, next_steps(server, https=https, chats=chats))


def run_serve(args: argparse.Namespace) -> int:
    """Runs ``paceline serve``."""
    if args.local:
        return _run_local(args)
    if args.print_environment:
        folder = socket_folder()
        variables = serve_environment(folder)
        variables |= haproxy.tls_environment(*tls_settings(read_config(args)))
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
        return EXIT_DONE
    config = read_config(args)
    local = args.address is None
    # Our own Ray is told of all the cores that it needs, and its processes end with this command.
    require_service(config, memory=local, cores=False, ports=local, surge=not local)
    with StartView(live=not args.verbose) as view:
        how = {"address": args.address, "dashboard": args.dashboard, "verbose": args.verbose}
        show = view.note if view.is_live else None
        with Service(config, **how, show=show, on_ready=lambda: _ready(view, config)) as service:
            return EXIT_INTERRUPTED if service.run() == signal.SIGINT else EXIT_DONE
