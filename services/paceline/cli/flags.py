"""Flags that several commands share, generated from the pydantic fields that they set. A field's type gives choices and
conversion; its docstring and default give the help. A flag that is not given is None, so the field's default stands.
"""

from __future__ import annotations

import argparse
import enum
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from paceline.config import Device, DraftOptions, HeadOptions, ServiceConfig
from paceline.config.devices import ALLOWED_DEVICES
from paceline.config.methods import DRAFTERS, HEADS
from paceline.config.plugins import plugin_names
from paceline.errors import ConfigError, InvalidRequestError
from paceline.errors.files import read_bytes, read_text
from paceline.errors.refusals import explain, explain_parameter
from paceline.types import SamplingParams, SpeculationParams, StructuredOutput

_ENGINE = "target_config.engine_kwargs"
MODELLESS = tuple(kind for kind, entry in DRAFTERS.items() if entry.named_by_kind)
"""Kinds of drafters that need neither a model nor options."""
_MOST_S = 10_000_000
"""Seconds that a timer of this machine can wait for."""
_CASCADE = "vertical="
"""Beginning of what ``--drafter`` says of a cascade."""
DRAFTER_HELP = (
    "source of draft tokens (default: model). A cascade is vertical=A:N,B: A is a draft model, and B, a draft model, "
    "ngram or suffix, guesses N tokens for each forward of A"
)

_NAMES = {"max_draft_tokens": "--draft-tokens", "path": "--target"}
"""Fields whose flag has another name."""
_METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", Path: "FILE"}


# -- from fields to flags ------------------------------------------------------------------------------------------


def flag_of(name: str) -> str:
    """The flag of a field or of an argparse destination."""
    return _NAMES.get(name, "--" + name.replace("_", "-"))


def field_at(model: type[BaseModel], key: str) -> FieldInfo:
    """The field at a dotted key of a tree of models."""
    *path, name = key.split(".")
    for part in path:
        (inner,) = (kind for kind in _members(model.model_fields[part].annotation) if kind is not type(None))
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel), f"{key}: {part} is not a model"
        model = inner
    return model.model_fields[name]


def add_fields(group: Any, model: type[BaseModel], keys: Sequence[str]) -> None:
    """Adds a flag for each field of ``model`` at these dotted keys, named after the last part of the key."""
    for key in keys:
        name, field = key.rpartition(".")[2], field_at(model, key)
        group.add_argument(flag_of(name), dest=name, default=None, help=help_of(field), **_conversion(field.annotation))


def help_of(field: FieldInfo) -> str:
    """The docstring of a field as the help of its flag, with its default."""
    text = " ".join((field.description or "").replace("``", "").split()).removesuffix(".").replace("%", "%%")
    if text[1:2].islower():
        text = text[0].lower() + text[1:]
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if default is None:  # the docstring's last sentence says what its absence means
        before, separator, meaning = text.rpartition(". None: ")
        return f"{before} (default: {meaning})" if separator else text
    value = {True: "on", False: "off"}[default] if isinstance(default, bool) else f"{default}"
    return f"{text} (default: {value})" if text else f"default: {value}"


def _conversion(annotation: Any) -> dict[str, Any]:
    """The arguments of ``add_argument`` that a type stands for."""
    members = [kind for kind in _members(annotation) if kind is not type(None)]
    if bool in members:
        # With further values (``bool | Literal["auto"]``) off has to be said, too: they are the default.
        return {"action": "store_true" if len(members) == 1 else argparse.BooleanOptionalAction}
    (kind,) = members
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if issubclass(kind, enum.Enum):
        return {"choices": [member.value for member in kind]}
    return {"type": kind, "metavar": _METAVARS[kind]}


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def given(args: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """The fields of ``model`` that flags have set."""
    return {name: value for name in model.model_fields if (value := getattr(args, name, None)) is not None}


def describe(error: ValidationError) -> str:
    """Returns one sentence about the first mistake in flags: the flag, its value and the allowed values."""
    kinds: dict[str, type[BaseModel]] = {kind.__name__: kind for kind in (SamplingParams, SpeculationParams)}
    text = explain_parameter(error, kinds.get(error.title, BaseModel))
    name = str(next(iter(error.errors()[0]["loc"]), ""))
    return flag_of(name) + text.removeprefix(name) if name and text.startswith(name) else text


def add_quiet_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--quiet``, which every command has."""
    help_ = "print only results, warnings and errors: no stages of a start, no progress, no summary"
    parser.add_argument("-q", "--quiet", action="store_true", help=help_)


# -- groups --------------------------------------------------------------------------------------------------------


def add_model_flags(
    parser: argparse.ArgumentParser, more_drafters: Sequence[str] = (), target: str = "the embedded one"
) -> Any:
    """Adds the models and how they run; returns the group. ``target``: the default one, in words."""
    group = parser.add_argument_group("models")
    group.add_argument("--target", "--model", metavar="ID_OR_PATH", help=f"target model (default: {target})")
    help_ = (
        "draft model (default: with the embedded target the embedded one, else none: the best available method drafts)"
    )
    group.add_argument("--draft", metavar="ID_OR_PATH", help=help_)
    group.add_argument(
        "--drafter",
        choices=drafters(*more_drafters),
        metavar="NAME",
        help=DRAFTER_HELP,
    )
    group.add_argument(
        "--head",
        action="append",
        metavar="METHOD=MODEL[,TOKENS]",
        help="a drafter inside the target, such as draft_model=DIRECTORY, early_exit=BOUNDARY or suffix, and the most "
        "tokens that it proposes at once (repeatable; with --drafter, or alone with --drafter none)",
    )
    names = (
        "dtype",
        "max_model_len",
        "compile",
        "background_compilation",
        "device",
        "tensor_parallel_size",
        "cpu_threads",
    )
    add_fields(group, ServiceConfig, [f"{_ENGINE}.{name}" for name in names])
    help_ = "device of the draft model (default: auto, with GPUs the first one that the target leaves free)"
    group.add_argument("--draft-device", type=device, metavar="TEXT", help=help_)
    add_fields(group, DraftOptions, ["placement"])
    return group


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the target as the first argument, as ``vllm serve`` takes it."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the same as --target")


def take_model_argument(args: argparse.Namespace) -> None:
    """Makes the first argument the target. Raises ConfigError if there is another one."""
    if args.model is None:
        return
    if args.target not in (None, args.model):
        raise ConfigError(f"{args.model} is given with --target {args.target}: one of them is allowed")
    args.target, args.model = args.model, None


def check_placement(args: argparse.Namespace, *, has_model: bool) -> None:
    """Raises ConfigError for ``--placement`` or ``--draft-device`` without a draft model that could be placed."""
    for flag, value in (("--placement", args.placement), ("--draft-device", args.draft_device)):
        if value is not None and not has_model:
            why = "without a draft" if args.drafter in (None, "none") else f"with --drafter {args.drafter}"
            raise ConfigError(f"{flag} {value} is given {why}: it places a draft model")


def device(text: str) -> str:
    """The setting of a device. Raises ArgumentTypeError."""
    try:
        return TypeAdapter[str](Device).validate_python(text)
    except ValidationError:
        raise argparse.ArgumentTypeError(f"is {text!r}: it must be {ALLOWED_DEVICES}") from None


def heads_of(texts: Sequence[str] | None) -> list[HeadOptions]:
    """The values of ``--head``. Raises ConfigError in one sentence."""
    heads = []
    for text in texts or ():
        body, comma, tokens = text.rpartition(",")
        if not comma or not tokens.strip().isdigit():
            body, tokens = text, ""
        method, _, model = body.partition("=")
        values: dict[str, Any] = {"method": method.strip()}
        entry = HEADS.get(values["method"])
        if entry is not None and entry.boundaries == "one" and model.strip().isdigit():
            values["boundaries"] = [int(model)]
        elif model.strip():
            values["model"] = model.strip()
        if tokens:
            values["num_speculative_tokens"] = int(tokens)
        try:
            heads.append(HeadOptions(**values))
        except ValidationError as error:
            raise ConfigError(f"--head {text}: {explain(error, HeadOptions)}") from None
    return heads


class _Drafters(tuple[str, ...]):
    """Choices of ``--drafter``: names, and the beginnings of cascades."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return super().__contains__(value) or str(value).startswith(_CASCADE)


def drafters(*more: str) -> Sequence[str]:
    """The names that ``--drafter`` accepts; ``more``: names in addition to drafters, such as ``none``."""
    return _Drafters(("model", *MODELLESS, *plugin_names(), _CASCADE, *more))


def draft_config_of(name: str | None, running: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """``draft_config`` for what ``--drafter`` names; None: a draft model alone, or nothing.

    Args:
        name: the value of the flag.
        running: how the draft models of a cascade run: their options.

    Raises:
        ConfigError: the last drafter of a cascade has a length.
    """
    if name in MODELLESS:
        return {"kind": name}
    if name is not None and name.startswith(_CASCADE):
        return {"kind": "cascade", "engine_kwargs": _cascade(name, running or {})}
    return None if name in (None, "model", "none") else {"kind": "plugin", "engine_kwargs": {"drafter": name}}


def _cascade(name: str, running: Mapping[str, Any]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    lengths: list[int] = []
    *others, last = (text.strip() for text in name.removeprefix(_CASCADE).split(","))
    for text in others:
        body, colon, length = text.rpartition(":")
        has_length = bool(colon) and length.isdigit()
        lengths += [int(length)] if has_length else []
        parts.append(_part(body if has_length else text, running))
    if last.rpartition(":")[2].isdigit() and ":" in last:
        raise ConfigError(f"--drafter {name}: {last} is the last drafter, which drafts the rest: it has no length")
    found = {"drafters": [*parts, _part(last, running)]}
    return found | ({"lengths": lengths} if lengths else {})


def _part(text: str, running: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": text} if text in MODELLESS else {"model": text, "options": dict(running)}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the fields of SamplingParams that have a flag, and ``--stop``."""
    group = parser.add_argument_group("sampling")
    names = ["max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p"]
    names += [
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "include_stop_str_in_output",
        "ignore_eos",
        "seed",
        "seed_scope",
        "logprobs_mode",
    ]
    add_fields(group, SamplingParams, names)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (repeatable)")


def add_form_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``form_of``, of which one may be given."""
    group = parser.add_argument_group("structured output (one of these)").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="the output is JSON that this JSON Schema allows")
    group.add_argument("--json-object", action="store_true", help="the output is a JSON object")
    group.add_argument("--regex", metavar="REGEX", help="the output is text that this matches as a whole")
    group.add_argument("--grammar", metavar="FILE", help="the output is text that this grammar derives (GBNF or Lark)")
    group.add_argument("--choice", action="append", metavar="TEXT", help="the output is one of these (repeatable)")
    help_ = "the output has tagged parts, such as tool calls, by this structural tag of xgrammar or vLLM (JSON)"
    group.add_argument("--structural-tag", metavar="FILE", help=help_)


def form_of(args: argparse.Namespace) -> dict[str, Any]:
    """``structured_output`` as the flags describe it, or nothing. Raises ConfigError and InvalidRequestError."""
    fields: dict[str, Any] = {
        name: read_text(path, f"--{name.replace('_', '-')} is {path!r}")
        for name in ("json_schema", "grammar", "structural_tag")
        if (path := getattr(args, name)) is not None
    }
    fields |= {name: value for name in ("json_object", "regex", "choice") if (value := getattr(args, name))}
    if args.regex is not None:
        fields["regex"] = args.regex
    try:
        return {"structured_output": StructuredOutput(**fields)} if fields else {}
    except ValidationError as error:
        raise InvalidRequestError(explain_parameter(error, StructuredOutput)) from None


def add_speculation_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the fields of SpeculationParams that have a flag."""
    group = parser.add_argument_group("speculation")
    add_fields(group, SpeculationParams, ["mode", "acceptance", "max_draft_tokens"])


def add_tls_flags(group: Any) -> None:
    """Adds how the connection to a service is encrypted and who asks (``connection_of``)."""
    group.add_argument("--tls", action="store_true", default=None, help="encrypt, and check the service's certificate")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="--tls, with the authorities of this PEM file")
    group.add_argument(
        "--tls-certificate", type=Path, metavar="FILE", help="--tls, with this certificate of the client"
    )
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="the key of --tls-certificate")
    group.add_argument("--tls-server-name", metavar="NAME", help="--tls, with this name in the service's certificate")
    group.add_argument("--api-key", metavar="KEY", help="default: the environment variable PACELINE_API_KEY")


def connection_of(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of a client: TLS and the API key that the flags of ``add_tls_flags`` describe."""
    from paceline.client import Tls  # an engine on this machine does without gRPC

    files = {
        "ca_file": args.tls_ca,
        "certificate_file": args.tls_certificate,
        "key_file": args.tls_key,
        "server_name": args.tls_server_name,
    }
    for name in ("tls_ca", "tls_certificate", "tls_key"):
        if (path := getattr(args, name)) is not None:
            read_bytes(path, f"{flag_of(name)} is {str(path)!r}")
    require_pair("--tls-certificate", args.tls_certificate, "--tls-key", args.tls_key)
    if args.tls_server_name == "":
        raise InvalidRequestError("--tls-server-name is empty: the name in the service's certificate is needed")
    wanted = args.tls or any(value is not None for value in files.values())
    return {"tls": Tls(**files) if wanted else None, "api_key": args.api_key}


def require_pair(one: str, value: object, other: str, other_value: object) -> None:
    """Raises ConfigError if one of two flags that go together is missing."""
    if (value is None) != (other_value is None):
        given, missing = (one, other) if other_value is None else (other, one)
        raise ConfigError(f"{given} is given without {missing}: both are needed")


def check_positive(flag: str, value: float | None) -> None:
    """Raises InvalidRequestError unless the value of ``flag`` is absent, or seconds that can be waited for."""
    if value is not None and not 0 < value <= _MOST_S:
        raise InvalidRequestError(f"{flag} is {value:g}: it must be more than 0 and at most {_MOST_S} seconds")
