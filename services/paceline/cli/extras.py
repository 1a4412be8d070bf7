"""Extras of the package: the ones that a command line needs, and how to install missing ones.

Without an extra the package is a client: it asks services, prints configurations and plans. ``embedded`` runs engines
in this process, ``serve`` the service on Ray, ``endpoint`` measures any server, ``bench`` measures and draws, ``quant``
quantizes, ``tracing`` sends traces.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from paceline.errors import ConfigError

MODULES = {
    "embedded": (
        *("torch", "transformers", "tokenizers", "safetensors", "gguf", "numpy"),
        *("prometheus_client", "fastapi", "uvicorn", "httptools", "jinja2", "llguidance", "regex"),
    ),
    "serve": ("ray", "grpc_reflection", "cryptography"),
    "quant": ("torchao",),
    "endpoint": ("tokenizers", "numpy", "prometheus_client", "aiohttp"),
    "bench": ("matplotlib",),
}
"""Extra -> the modules that it installs by itself, as they are imported. Of ``tracing`` no command line knows, but the
configuration: ``preflight/tracing.py``."""

_WITH = {"serve": ("embedded",), "bench": ("embedded", "endpoint")}
"""Extra -> further extras that it installs. (``local`` is another name of ``embedded``.)"""


def extras_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The extras that a parsed command line needs, none where a client is enough."""
    match args.command:
        case "generate" | "chat" | "batch":
            return () if args.address is not None else ("embedded",)
        case "serve" | "demo":
            return ("embedded",) if args.local else ("serve",)
        case "check":  # as the service that it examines
            return ("serve",)
        case "advise" | "train-head" | "train-draft" | "write-corpus" | "convert":
            return ("embedded",)
        case "bench":
            kinds = {
                "local": ("embedded",),
                **dict.fromkeys(("compare", "virtual", "parts"), ("embedded",)),
                "sweep": ("serve", "bench"),
                "report": ("bench",),
            }
            return kinds.get(args.bench, (args.bench,))
    return ()


def require_extras(args: argparse.Namespace) -> None:
    """Raises ConfigError in one sentence, before anything is loaded, if a package that the command needs is missing."""
    extras = extras_of(args)
    wanted = dict.fromkeys(inner for extra in extras for inner in (*_WITH.get(extra, ()), extra))
    for module in (module for extra in wanted for module in MODULES[extra]):
        if not _is_installed(module):
            raise ConfigError(f"{args.command} needs {module}, which is not installed{_remedy(extras)}")


def explain_missing(words: Sequence[str], module: str) -> str:
    """The sentence for a module that a command failed to import. ``words``: arguments of the command line that are no
    flags, the command first."""
    command = words[0]
    if command == "bench":  # its kinds import much of each other
        extras = ["endpoint" if words[1:2] == ["endpoint"] else "bench"]
    else:
        extras = [extra for extra, modules in MODULES.items() if module.partition(".")[0] in modules]
    return f"{command} needs {module}, which is not installed{_remedy(extras[:1])}"


def _remedy(extras: Sequence[str]) -> str:
    return f": pip install 'paceline[{','.join(extras)}]'" if extras else ""


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # an import hook refuses it
        return False
