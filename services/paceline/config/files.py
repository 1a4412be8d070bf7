"""Configuration as text: YAML files, Serve config files whose application carries ours, and dotted keys that change
one value. Returns plain data, which ``service.py`` interprets. Every refusal is a ConfigError in one sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import ConfigError
from paceline.errors.files import read_text
from paceline.errors.refusals import shown


def set_key(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Puts ``value`` at ``path``, making the mappings on the way."""
    for depth, name in enumerate(path[:-1], start=1):
        inner = data.setdefault(name, {})
        if not isinstance(inner, dict):
            key = ".".join(path[:depth])
            raise ConfigError(f"{'.'.join(path)} cannot be set: {key} is {shown(inner)}, so set {key} itself")
        data = inner
    data[path[-1]] = value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping that a file holds; an empty file holds an empty one."""
    try:
        data = yaml.safe_load(read_text(path, repr(str(path))))
    except yaml.YAMLError as error:
        raise ConfigError(f"{str(path)!r} is not valid YAML: {first_line(error)}") from error
    if not isinstance(data, dict | None):
        raise ConfigError(f"{str(path)!r} holds {shown(data)}: a mapping of keys is needed")
    return data or {}


def args_of_application(data: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The arguments of our application, with the ports that the Serve config file itself sets."""
    applications = data["applications"]
    if not isinstance(applications, list) or not applications or not isinstance(applications[0], dict):
        raise ConfigError(f"applications is {shown(applications)} in {str(path)!r}: a list of applications is needed")
    args = applications[0].get("args") or {}
    if not isinstance(args, dict):
        raise ConfigError(f"applications[0].args is {shown(args)} in {str(path)!r}: a mapping of keys is needed")
    server = args.get("server", {})
    for key, outer, inner in (
        ("grpc_port", "grpc_options", "port"),
        ("http_port", "http_options", "port"),
        ("host", "http_options", "host"),
    ):
        options = data.get(outer)
        theirs = options.get(inner) if isinstance(options, dict) else None
        if theirs is None or not isinstance(server, dict):
            continue
        ours = server.get(key, theirs)
        if ours != theirs:
            where = f"{outer}.{inner} of the same file is {shown(theirs)}"
            raise ConfigError(f"server.{key} is {shown(ours)} while {where}: they must be equal")
        server = {**server, key: theirs}
    return {**args, "server": server}


def first_line(error: yaml.YAMLError) -> str:
    """The problem that YAML reports, and its line where that is known."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} in line {mark.line + 1}" if mark is not None else problem
