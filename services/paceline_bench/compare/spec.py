"""The file of ``paceline bench compare``: what is compared, and under which loads.

    variables: {size: 150M}                              what `--set NAME=VALUE` changes; ${size} stands for it below
    configuration: {target_config: ..}                   a service's configuration, which all arms begin with
    requests: {max_draft_tokens: 8}                      speculation parameters of all arms
    baseline: chains
    arms:
      chains: {target_config: {engine_kwargs: {tree_verification: "off"}}}       changes of the configuration
      plain: {requests: {mode: plain}}                                           and of the requests

Other keys are the fields of ``Spec``; the keys of an arm are the fields of ``Arm``. ``made.py`` names the models that
are made for the run.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import Field, ValidationError

from paceline.config.base import Config
from paceline.errors import ConfigError, PacelineError
from paceline.errors.files import read_text
from paceline.errors.refusals import explain
from paceline.types import SamplingParams, SpeculationParams

_Params = TypeVar("_Params", SpeculationParams, SamplingParams)
OTHERS = Literal["transformers", "assisted", "universal", "lookup", "early_exit", "mtp"]


class Methods(Config):
    """Arms for the methods of ``drafters/catalogue.py``, each as docs/methods.md configures it."""

    names: list[str] = Field(default=[])
    """Only these; []: all."""
    draft_tokens: int = Field(default=4, ge=1)
    heads: str | None = None
    """Folder of trained heads, one for each kind. Without it methods that read such a head are left out."""
    training_steps: int = Field(default=0, ge=0)
    """Training steps of heads that are not in ``heads``; 0: they are not made."""
    training_tokens: int = Field(default=2048, ge=1024)
    """Tokens that these heads are trained on."""
    pard_steps: int = Field(default=400, ge=0)


class Spec(Config):
    """What is compared, and under which loads."""

    variables: dict[str, Any] = Field(default={})
    configuration: dict[str, Any] = Field(default={})
    """A service's configuration."""
    requests: dict[str, Any] = Field(default={})
    """Speculation parameters."""
    sampling: dict[str, Any] = Field(default={})
    """Sampling parameters beyond temperature, length and seed, such as ``structured_output``."""
    arms: dict[str, dict[str, Any]] = Field(default={})
    methods: Methods | None = None
    """Further arms."""
    baseline: str
    """The arm whose texts all must have, and to which they are compared."""
    best_of: str | None = None
    """The arm that is also compared with the fastest of all others."""
    service: bool = False
    """Arms but the baseline are real services; else they are engines of this process."""
    worker: Literal["process", "thread"] = "process"
    at_once: int = Field(default=0, ge=0)
    """Number of arms that are up together, with the baseline, and take turns; 0: all."""
    cached: bool = True
    """Prompts are in the KV cache before a unit begins; else they never are."""
    sessions: list[int] = Field(default=[1], min_length=1)
    temperatures: list[float] = Field(default=[0.0, 1.0], min_length=1)
    max_tokens: int = Field(default=64, ge=2)
    prompts: int = Field(default=8, ge=1)
    chats: Path | None = None
    """Prompts are the first questions of this file, as the target's chat template renders them; relative to the file of
    the comparison. None: they are held-out text."""
    repeats: int = Field(default=1, ge=1)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to answer requests."""

    name: str
    tree: Mapping[str, Any]
    """A service's configuration."""
    params: SpeculationParams
    sampling: SamplingParams = field(default_factory=SamplingParams)
    service: bool = False
    transformers: OTHERS | None = None
    """transformers in this mode, with the models of the configuration. Its texts may be others, and it may fail."""
    peer: str | None = None
    """Another engine, ENGINE=PYTHON, with target and cores of the configuration. Its texts may be others, and it may
    fail."""
    equal: bool = True
    """Its texts must be the baseline's; another sharding or compilation of the target rounds otherwise."""
    draft_delay_s: float = 0.0
    """So much longer every tree step of the draft takes; inf: the draft never answers."""
    settle_s: float = 0.0
    """So long it meets a load before the units of that load begin."""

    @property
    def is_ours(self) -> bool:
        """True if it must not fail."""
        return self.transformers is None and self.peer is None


_OF_AN_ARM = ("requests", "sampling", "service", "transformers", "peer", "equal", "draft_delay_s", "settle_s")


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "service": (lambda value: isinstance(value, bool), "use true or false"),
    "equal": (lambda value: isinstance(value, bool), "use true or false"),
    "requests": (lambda value: isinstance(value, Mapping), "it holds speculation parameters by name"),
    "sampling": (lambda value: isinstance(value, Mapping), "it holds sampling parameters by name"),
    "peer": (lambda value: isinstance(value, str) and "=" in value, "it has the form ENGINE=PYTHON"),
    "draft_delay_s": (_is_seconds, "use seconds, at least 0; .inf: the draft never answers"),
    "settle_s": (lambda value: _is_seconds(value) and value <= 3600, "use seconds, 0 to 3600"),
}
"""Checks of an arm's fields, and the words for them."""


def read_spec(path: Path, given: Mapping[str, str], loads: Mapping[str, Any]) -> Spec:
    """Reads a file. ``given``: variables by name, as text. ``loads``: fields that take the place of the file's.

    Raises:
        ConfigError: it cannot be read, a variable is unknown or has no value, or a key is wrong.
    """
    try:
        text = read_text(path, repr(str(path)))
        found = re.search(r"^variables: (\{.*\})$", text, re.MULTILINE)  # on one line
        variables = yaml.safe_load(found[1]) if found else {}
        if unknown := [name for name in given if name not in variables]:
            known = ", ".join(variables) or "none"
            raise ConfigError(f"--set {unknown[0]}={given[unknown[0]]}: {path} has the variables {known}")
        values = {name: given.get(name, "null" if value is None else value) for name, value in variables.items()}
        tree = yaml.safe_load(string.Template(text).substitute(values))
        spec = Spec.model_validate({**tree, "variables": values, **loads})
        if spec.chats is not None:
            spec = spec.model_copy(update={"chats": path.parent / spec.chats})
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no file of paceline bench compare: {type(error).__name__} {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, Spec)}") from error
    if spec.baseline not in spec.arms:
        raise ConfigError(f"{path}: baseline is {spec.baseline!r}: use one of {', '.join(spec.arms)}")
    if spec.best_of is not None and spec.best_of not in spec.arms:
        raise ConfigError(f"{path}: best_of is {spec.best_of!r}: use one of {', '.join(spec.arms)}")
    return spec


def arm_of(spec: Spec, name: str, changes: Mapping[str, Any]) -> Arm:
    """An arm of a file.

    Raises:
        ConfigError: a value of it is wrong; its configuration is checked when it is opened.
    """
    own = {key: value for key, value in changes.items() if key in _OF_AN_ARM}
    if (mode := own.get("transformers")) is not None and mode not in get_args(OTHERS):
        raise ConfigError(f"arms.{name}.transformers is {mode!r}: use one of {', '.join(get_args(OTHERS))}")
    for key, (is_right, allowed) in _VALUES.items():
        if key in own and not is_right(own[key]):
            raise ConfigError(f"arms.{name}.{key} is {own[key]!r}: {allowed}")
    tree = merged(spec.configuration, {key: value for key, value in changes.items() if key not in _OF_AN_ARM})
    params = _made(SpeculationParams, {**spec.requests, **own.pop("requests", {})}, f"arms.{name}.requests")
    sampling = _made(SamplingParams, {**spec.sampling, **own.pop("sampling", {})}, f"arms.{name}.sampling")
    return Arm(name, tree, params, sampling, **{"service": spec.service and name != spec.baseline, **own})


def _made(kind: type[_Params], given: Mapping[str, Any], key: str) -> _Params:
    """Parameters of a request. Raises ConfigError."""
    try:
        return kind(**given)
    except ValidationError as error:
        raise ConfigError(f"{key}: {explain(error, kind)}") from error
    except (TypeError, ValueError, PacelineError) as error:
        raise ConfigError(f"{key}: {error}") from error


def merged(tree: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``tree`` with ``changes``, key by key."""
    result = dict(tree)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
