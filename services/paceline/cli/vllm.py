"""Flags of ``vllm serve`` in its own spelling: what each sets here, and why some are refused."""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from pydantic import ValidationError

from paceline.checkpoint.overrides import with_rope
from paceline.cli.flags import field_at, flag_of, help_of
from paceline.config import HeadOptions, ServiceConfig, cache_dir
from paceline.config.methods import DRAFTERS
from paceline.errors import ConfigError
from paceline.errors.refusals import explain, shown
from paceline.logs import narrate

_ENGINE = "target_config.engine_kwargs"
_VALUES = {
    "max_num_seqs": (int, "max_sessions"),
    "max_num_batched_tokens": (int, "max_step_tokens"),
    "gpu_memory_utilization": (float, "kv_fraction"),
    "kv_cache_dtype": (str, "kv_cache_dtype"),
}
"""Flags, with the types and keys of the values that they set."""
_METAVARS = {int: "N", float: "X", str: "TEXT"}
_MTP = ("deepseek_mtp", "glm4_moe_mtp", "ernie_mtp", "qwen3_next_mtp", "mimo_mtp", "longcat_flash_mtp")
"""Older names of vLLM for method ``mtp``."""
_OVERRIDES = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
"""Keys of a checkpoint's config.json that ``--hf-overrides`` may replace."""


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that ``vllm_settings`` reads."""
    group = parser.add_argument_group("as vLLM spells them")
    for name, (kind, key) in _VALUES.items():
        help_ = f"sets {key}: {help_of(field_at(ServiceConfig, f'{_ENGINE}.{key}'))}"
        group.add_argument(flag_of(name), type=kind, metavar=_METAVARS[kind], help=help_)
    help_ = "keys that clients must send; --api-keys FILE keeps them off the command line, with limits"
    group.add_argument("--api-key", nargs="+", metavar="KEY", help=help_)
    help_ = "prefixes are always cached; the negation is refused"
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, help=help_)
    help_ = "sets server.force_include_usage: streams tell their token counts without being asked"
    group.add_argument("--enable-force-include-usage", action="store_true", help=help_)
    help_ = "JSON with method, model, num_speculative_tokens, prompt_lookup_max, prompt_lookup_min"
    group.add_argument("--speculative-config", metavar="JSON", help=help_)
    help_ = 'rotary embeddings in place of the checkpoint\'s, JSON such as {"rope_type": "yarn", "factor": 4.0}'
    group.add_argument("--rope-scaling", metavar="JSON", help=help_)
    group.add_argument("--rope-theta", type=float, metavar="X", help="base of the rotary embeddings")
    help_ = f"JSON with keys of config.json: {', '.join(_OVERRIDES)} are taken"
    group.add_argument("--hf-overrides", metavar="JSON", help=help_)
    for name in ("revision", "trust_remote_code"):
        more: dict[str, Any] = {"action": "store_true", "default": None} if name == "trust_remote_code" else {}
        group.add_argument(flag_of(name), help="refused, with what to do instead", **more)


def vllm_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The keys that vLLM's flags set, and their values. Raises ConfigError for a flag that is refused."""
    if args.revision is not None:
        how = f"hf download MODEL --revision {args.revision}"
        raise ConfigError(f"--revision is {args.revision!r}: fetch it by `{how}`, and name the directory")
    if args.trust_remote_code:
        key = f"{_ENGINE}.trust_remote_code"
        raise ConfigError(f"--trust-remote-code is given: code of a checkpoint runs only with --set {key}=true")
    if args.enable_prefix_caching is False:
        why = "prefixes are always cached; a request with a cache_salt of its own shares none"
        raise ConfigError(f"--no-enable-prefix-caching is given: {why}")
    found = {
        f"{_ENGINE}.{key}": value for name, (_, key) in _VALUES.items() if (value := getattr(args, name)) is not None
    }
    if args.enable_force_include_usage:
        found["server.force_include_usage"] = True
    if args.api_key is not None:
        if args.api_keys is not None:
            raise ConfigError("--api-key is given with --api-keys: one of them is allowed")
        if getattr(args, "address", None) is not None:
            raise ConfigError("--api-key is given with --address: replicas on other machines read --api-keys FILE")
        found["server.api_keys"] = _keys_file(args.api_key)
    return found


def with_rope_flags(args: argparse.Namespace, config: ServiceConfig) -> ServiceConfig:
    """The configuration with the rotary embeddings that flags give its target. Raises ConfigError."""
    given = _json_object("--hf-overrides", args.hf_overrides)
    for key, value in given.items():
        if key not in _OVERRIDES:
            raise ConfigError(f"--hf-overrides: {key} is {shown(value)}: {', '.join(_OVERRIDES)} are allowed")
    rope = {**_object("rope_scaling", given), **_object("rope_parameters", given)}
    rope |= _json_object("--rope-scaling", args.rope_scaling)
    if args.rope_theta is not None and not 0 < args.rope_theta < math.inf:
        raise ConfigError(f"--rope-theta is {args.rope_theta:g}: a number above 0 is needed")
    theta = given.get("rope_theta") if args.rope_theta is None else args.rope_theta
    rope |= {} if theta is None else {"rope_theta": theta}
    longest = given.get("max_position_embeddings")
    if not rope and longest is None:
        return config
    if getattr(args, "address", None) is not None:
        raise ConfigError(
            "rotary embeddings are given with --address: replicas on other machines read them from the model's "
            "config.json"
        )
    if longest is not None and (not isinstance(longest, int) or longest < 1):
        raise ConfigError(f"--hf-overrides: max_position_embeddings is {shown(longest)}: at least 1 is needed")
    loading = config.target_config.model_loading_config
    changed = with_rope(loading.source, rope, longest, cache_dir() / "checkpoints")
    narrate(f"paceline: the target's rotary embeddings are {shown(rope)}")
    return config.with_overrides([f"target_config.model_loading_config.model_source={json.dumps(str(changed))}"])


def _object(key: str, given: dict[str, Any]) -> dict[str, Any]:
    value = given.get(key)
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"--hf-overrides: {key} is {shown(value)}: an object is needed")
    return value or {}


def _json_object(flag: str, text: str | None) -> dict[str, Any]:
    """The object that a flag holds; {} without one. Raises ConfigError."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}: it is no JSON ({error})") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{flag} is {text!r}: a JSON object is needed")
    return given


def speculation_of(text: str | None) -> tuple[dict[str, Any] | None, list[HeadOptions]] | None:
    """``draft_config`` and heads for the JSON of ``--speculative-config``; None: there is none. Raises ConfigError."""
    if text is None:
        return None
    given = {key: value for key, value in _json_object("--speculative-config", text).items() if value is not None}
    method = given.pop("method", "draft_model" if "model" in given else None)
    method = "mtp" if method in _MTP else method
    if (drafter := DRAFTERS.get(method or "")) is not None and drafter.vllm_keys is not None:
        return _of_text(drafter.kind, drafter.vllm_keys, given), []
    try:
        return None, [HeadOptions.model_validate({"method": method, **given})]
    except ValidationError as error:
        raise ConfigError(f"--speculative-config: {explain(error, HeadOptions)}") from None


def _of_text(method: str, keys: Mapping[str, str], given: dict[str, Any]) -> dict[str, Any]:
    """``draft_config`` of a method that copies text."""
    if given.pop("num_speculative_tokens", None) is not None:
        narrate("paceline: num_speculative_tokens is said by each request here (max_draft_tokens)")
    for key in given:
        if key not in keys:
            allowed = ", ".join(["method", "num_speculative_tokens", *keys])
            raise ConfigError(
                f"--speculative-config: {key} is {shown(given[key])} with method {method!r}: {allowed} are read"
            )
    return {"kind": method, "engine_kwargs": {keys[key]: value for key, value in given.items()}}


def _keys_file(keys: Sequence[str]) -> str:
    """A file of the digests of these keys, which is removed when this process ends. Raises ConfigError."""
    if not all(keys):
        raise ConfigError("--api-key is empty: a key needs at least one character")
    entries = [
        {"name": f"key-{i}", "sha256": hashlib.sha256(key.encode()).hexdigest()} for i, key in enumerate(keys, 1)
    ]
    handle, path = tempfile.mkstemp(prefix="paceline-keys-", suffix=".yaml")  # readable by this user alone
    atexit.register(_remove, path)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        yaml.safe_dump({"keys": entries}, file)
    return path


def _remove(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)
