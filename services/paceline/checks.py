"""What can be known to be wrong before anything is loaded. Reads files and ports; imports no torch and no Ray.

An *error* is certain: memory is estimated from below, so what is refused here cannot run. A *warning* may be all
right on another machine or with other requests.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from paceline.checkpoints import Checkpoint, read_checkpoint, read_json, require_path
from paceline.config import DeploymentConfig, ModelConfig, ModelDraftConfig, PairConfig, ServiceConfig, TargetConfig
from paceline.errors import ConfigError
from paceline.memory import (
    DEFAULT_SESSION_TOKENS,
    PAGE_SIZE,
    available_bytes,
    draft_pages,
    gib,
    session_pages,
    target_pages,
)
from paceline.tokenization import Tokenizer, load_tokenizer, require_same_tokens
from paceline.types import MAX_DRAFT_TOKENS

_log = logging.getLogger(__name__)

PROCESS_BYTES = 256 << 20
"""What a replica takes before it holds a model: interpreter, torch and Ray."""
_TARGET, _DRAFT = "target_config", "draft_config"
_PORTS_TRIED = 32


class Severity(StrEnum):
    """Whether the service can start nevertheless."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or may be."""

    severity: Severity
    key: str
    """Dotted path of the setting to change."""
    message: str
    """One sentence that says what to change."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the files of a checkpoint say about the memory that it needs."""

    num_parameters: int
    kv_values: int | None
    """Numbers that all layers keep per token, keys and values. None: not to be told from the configuration."""
    item_bytes: int
    """Bytes per number as it will run; dtype auto counts as bfloat16, the smallest."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights as they will run."""
        return self.num_parameters * self.item_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page; 0 if unknown."""
        return PAGE_SIZE * (self.kv_values or 0) * self.item_bytes

    def replica_bytes(self, num_pages: int) -> int:
        """Bytes of a replica with as many KV pages and the scratch page."""
        return PROCESS_BYTES + self.weights_bytes + (num_pages + 1) * self.page_bytes

    def pages_in(self, num_bytes: int) -> int:
        """KV pages of a replica that takes ``num_bytes``; negative if not even the weights fit."""
        return (num_bytes - PROCESS_BYTES - self.weights_bytes) // self.page_bytes - 1


def require_service(config: ServiceConfig, *, memory: bool = True, cores: bool = True, ports: bool = True) -> None:
    """Logs the warnings. Raises ConfigError, one clause for each error, if there are any."""
    findings = check_service(config, memory=memory, cores=cores, ports=ports)
    for finding in findings:
        if finding.severity is Severity.WARNING:
            _log.warning("%s", finding.message)
    errors = [finding.message for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        raise ConfigError("; ".join(errors))


def check_service(
    config: ServiceConfig, *, memory: bool = True, cores: bool = True, ports: bool = True
) -> list[Finding]:
    """Everything that is wrong, errors first.

    ``memory`` and ``cores``: also whether this machine has enough, which is moot where others run the replicas, or
    where Ray is told of more cores than there are. ``ports``: also whether they are free, which they are not where
    the service runs already.
    """
    findings: list[Finding] = []
    pair, draft = config.pair(), config.draft_config
    target = _read_model(_TARGET, config.target_config, pair.target, findings)
    other = None
    if isinstance(draft, ModelDraftConfig) and isinstance(pair.draft, ModelConfig):
        other = _read_model(_DRAFT, draft, pair.draft, findings)
    if target is not None:
        limit = target.checkpoint.max_model_len
        max_len = min(pair.max_model_len or limit, limit)
        findings += _check_lengths(pair, limit)
        if other is not None:
            findings += _check_together(target, other, max_len)
        if memory:
            findings += _check_memory(config, pair, target.facts, other, max_len)
    if cores:
        findings += _check_cores(config)
    if ports:
        findings += _check_ports(config.server.host, config.server.grpc_port, config.server.http_port)
    return sorted(findings, key=lambda finding: finding.severity is Severity.WARNING)


def _error(key: str, problem: str) -> Finding:
    return Finding(Severity.ERROR, key, f"{key} {problem}")


def _warning(key: str, problem: str) -> Finding:
    return Finding(Severity.WARNING, key, f"{key} {problem}")


# -- models ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Model:
    """A checkpoint on this machine, and its tokenizer."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    facts: ModelFacts
    learned_positions: bool
    """Positions come from a table, beyond whose end there is nothing."""


def _read_model(
    pool: str, config: TargetConfig | ModelDraftConfig, model: ModelConfig, findings: list[Finding]
) -> _Model | None:
    """The model of a pool, unless it is not here or something is wrong with it, which ``findings`` then says."""
    loading, key = config.model_loading_config, f"{pool}.model_loading_config"
    key += ".model_source" if loading.model_source is not None else ".model_id"
    try:
        folder = local_folder(loading.source)
        if folder is None:
            fetched = "is neither a directory nor in the Hugging Face cache: it is fetched when a replica starts"
            findings.append(_warning(key, f"{loading.source!r} {fetched}, and was not checked"))
            return None
        checkpoint = read_checkpoint(str(folder))
        facts = read_facts(folder, model.dtype)
    except ConfigError as error:
        findings.append(_error(key, f"cannot be used: {error}"))
        return None
    key = f"{pool}.model_loading_config"
    try:
        source = loading.tokenizer
        tokenizer = load_tokenizer(str(folder) if source == loading.source else str(local_folder(source) or source))
    except ConfigError as error:
        findings.append(_error(f"{key}.tokenizer_source", f"cannot be used: {error}"))
        return None
    if tokenizer.vocab_size > checkpoint.vocab_size:
        problem = (
            f"has {tokenizer.vocab_size} tokens and its model only {checkpoint.vocab_size}: name its own tokenizer"
        )
        findings.append(_error(f"{key}.tokenizer_source", problem))
        return None
    return _Model(checkpoint, tokenizer, facts, "n_positions" in read_json(str(folder), "config.json"))


def _check_lengths(pair: PairConfig, limit: int) -> list[Finding]:
    """``limit``: the longest context that the target was made for."""
    engine, max_len = f"{_TARGET}.engine_kwargs", pair.max_model_len or limit
    if max_len > limit:
        return [_error(f"{engine}.max_model_len", f"is {max_len}: the target was made for at most {limit}")]
    needed = session_pages(max_len)
    if pair.kv_pages is not None and pair.kv_pages < needed:
        longest = pair.kv_pages * PAGE_SIZE - MAX_DRAFT_TOKENS
        problem = f"is {pair.kv_pages}, which holds no session longer than {longest} tokens: {max_len} need {needed}"
        return [_warning(f"{engine}.kv_pages", problem)]
    return []


def _check_together(target: _Model, draft: _Model, max_len: int) -> list[Finding]:
    findings = []
    key = f"{_DRAFT}.model_loading_config"
    try:
        require_same_tokens(target.tokenizer, draft.tokenizer)
    except ConfigError as error:
        findings.append(_error(key, f"does not fit: {error}"))
    limit = draft.checkpoint.max_model_len
    if limit < max_len:
        problem = f"names a draft that was made for at most {limit} tokens, and contexts may have {max_len}"
        remedy = f"set {_TARGET}.engine_kwargs.max_model_len to {limit}, or choose another draft"
        if draft.learned_positions:
            findings.append(_error(key, f"{problem}, where it fails: {remedy}"))
        else:
            findings.append(_warning(key, f"{problem}, where its proposals are poor: {remedy}"))
    return findings


def local_folder(source: str) -> Path | None:
    """Directory of a checkpoint on this machine; None for a model id that would have to be fetched.

    Raises ConfigError if ``source`` is neither.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    require_path(source)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(source, "config.json")
    except HFValidationError as error:
        raise ConfigError(f"{source!r} is neither a directory nor a model id") from error
    return Path(found).parent if isinstance(found, str) else None


def read_facts(folder: Path, dtype: str = "auto") -> ModelFacts:
    """Sizes from the headers of the weight files and the configuration.

    Raises:
        ConfigError: a file is missing, cut short or not to be read.
    """
    try:
        num_parameters = _count_parameters(folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or str(folder)!r} cannot be read: {error.strerror or error}") from error
    config = read_json(str(folder), "config.json")
    return ModelFacts(num_parameters, _kv_values(config), 4 if dtype == "float32" else 2)


def _count_parameters(folder: Path) -> int:
    index = read_json(str(folder), "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        return sum(_safetensors_numbers(folder / str(name)) for name in sorted(set(index.values())))
    if (folder / "model.safetensors").exists():
        return _safetensors_numbers(folder / "model.safetensors")
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if not pickled:
        raise ConfigError(f"{str(folder)!r} holds no weights: model.safetensors or its index is needed")
    return sum(path.stat().st_size for path in pickled) // 4  # at most four bytes each


def _safetensors_numbers(path: Path) -> int:
    """Numbers in a file: eight bytes of header length, the header in JSON, the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= size else b""
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        end: int = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        count: int = sum(math.prod(entry["shape"]) for entry in tensors.values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{str(path)!r} is no safetensors file, or cut short") from error
    if 8 + length + end > size:
        raise ConfigError(f"{str(path)!r} is cut short: it has {size} bytes of {8 + length + end}")
    return count


def _kv_values(config: dict[str, Any]) -> int | None:
    """Numbers that all attention layers keep per token; None for an attention that keeps something else."""
    text = config.get("text_config") or config
    layers = text.get("num_hidden_layers") or text.get("n_layer")
    heads = text.get("num_attention_heads") or text.get("n_head")
    hidden = text.get("hidden_size") or text.get("n_embd")
    if not (layers and heads and hidden) or "kv_lora_rank" in text:
        return None
    kv_heads, head_dim = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
    return 2 * int(layers) * int(kv_heads) * int(head_dim)


# -- the machine -------------------------------------------------------------------------------------------


def _check_memory(
    config: ServiceConfig, pair: PairConfig, target: ModelFacts, draft: _Model | None, max_len: int
) -> list[Finding]:
    """Replicas that run on CPUs against the memory that this machine has left."""
    left, needed = available_bytes(), 0
    findings = []
    if not _on_gpu(config.target_config):
        least = session_pages(max_len)
        num_pages = least if pair.kv_fraction is not None else target_pages(pair, max_len)
        needed += target.replica_bytes(num_pages) * _num_replicas(config.target_config.deployment_config)
        findings += _check_target(pair, target, num_pages, max_len, left)
    if draft is not None and isinstance(config.draft_config, ModelDraftConfig) and not _on_gpu(config.draft_config):
        num_pages = draft_pages(pair, min(max_len, draft.checkpoint.max_model_len))
        needed += draft.facts.replica_bytes(num_pages) * _num_replicas(config.draft_config.deployment_config)
        findings += _check_draft(pair, draft.facts, num_pages, left)
    if needed > left and not findings:
        problem = f"and {_DRAFT} ask for replicas that need at least {gib(needed)} together, and this machine has"
        findings.append(_warning(_TARGET, f"{problem} {gib(left)} left: other machines must take some of them"))
    return findings


def _check_target(pair: PairConfig, facts: ModelFacts, num_pages: int, max_len: int, left: int) -> list[Finding]:
    if facts.replica_bytes(num_pages) <= left:
        return []
    if facts.replica_bytes(0) > left or not facts.page_bytes:
        return [_error(f"{_TARGET}.model_loading_config", _too_large(facts, left))]
    fitting = facts.pages_in(left)
    problem = f"needs {num_pages} KV pages, {gib(facts.replica_bytes(num_pages))} with the weights, "
    problem += f"and this machine has {gib(left)} left: set it to at most"
    typical = session_pages(min(max_len, DEFAULT_SESSION_TOKENS))
    engine = f"{_TARGET}.engine_kwargs"
    if pair.kv_pages is not None:
        return [_error(f"{engine}.kv_pages", f"is {pair.kv_pages}: it {problem} {max(fitting, 1)}")]
    if fitting < session_pages(max_len):
        longest = fitting * PAGE_SIZE - MAX_DRAFT_TOKENS
        if longest < 2:
            return [_error(f"{_TARGET}.model_loading_config", _too_large(facts, left))]
        return [_error(f"{engine}.max_model_len", f"is {max_len}: it {problem} {longest}")]
    return [_error(f"{engine}.max_sessions", f"is {pair.max_sessions}: it {problem} {max(fitting // typical, 1)}")]


def _check_draft(pair: PairConfig, facts: ModelFacts, num_pages: int, left: int) -> list[Finding]:
    if facts.replica_bytes(num_pages) <= left:
        return []
    sessions = pair.draft_max_sessions or pair.max_sessions
    per_session = num_pages // sessions
    fitting = facts.pages_in(left) // per_session if facts.page_bytes else 0
    if fitting < 1:
        return [_error(f"{_DRAFT}.model_loading_config", _too_large(facts, left))]
    problem = f"is {sessions}: it needs {num_pages} KV pages, {gib(facts.replica_bytes(num_pages))} with the weights, "
    problem += f"and this machine has {gib(left)} left: set it to at most {fitting}"
    return [_error(f"{_DRAFT}.engine_kwargs.max_sessions", problem)]


def _too_large(facts: ModelFacts, left: int) -> str:
    remedy = "choose a smaller model or a larger machine"
    if facts.item_bytes > 2 and PROCESS_BYTES + facts.weights_bytes // 2 < left:
        remedy = "set dtype to bfloat16, or " + remedy
    return (
        f"names a model with {facts.num_parameters:,} parameters, which needs at least {gib(facts.replica_bytes(0))}, "
        f"and this machine has {gib(left)} left: {remedy}"
    )


def _on_gpu(config: TargetConfig | ModelDraftConfig) -> bool:
    """True if a replica may put its model into the memory of a GPU, which cannot be seen from here."""
    options = config.deployment_options()
    reserved = options["ray_actor_options"].get("num_gpus") or any(
        bundle.get("GPU") for bundle in options.get("placement_group_bundles", [])
    )
    return config.engine_kwargs.device != "cpu" and bool(reserved)


def _num_replicas(config: DeploymentConfig) -> int:
    """Replicas that are there from the start."""
    scaling = config.autoscaling_config
    if scaling is not None:
        return scaling.initial_replicas or (1 if scaling.min_replicas is None else scaling.min_replicas)
    return config.num_replicas if isinstance(config.num_replicas, int) else 1


def _check_cores(config: ServiceConfig) -> list[Finding]:
    """Ray does not refuse replicas for which there is no core: they wait for ever."""
    parts = [config.target_config, config.router_config, *([config.draft_config] if config.draft_config else [])]
    reserved = 0.0
    for part in parts:
        options = part.deployment_options()
        bundles = options.get("placement_group_bundles")
        cpus = sum(b.get("CPU", 0.0) for b in bundles) if bundles else options["ray_actor_options"]["num_cpus"]
        reserved += cpus * _num_replicas(part.deployment_config)
    cores = len(os.sched_getaffinity(0))
    if reserved <= cores + 1e-9:
        return []
    problem = f"and the other pools reserve {reserved:g} cores, and this machine has {cores}"
    return [_warning(_TARGET, f"{problem}: without other machines some replicas wait for ever")]


def _check_ports(host: str, grpc_port: int, http_port: int) -> list[Finding]:
    findings = []
    for name, port in (("grpc_port", grpc_port), ("http_port", http_port)):
        try:
            _bind(host, port)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                return [_error("server.host", f"is {host!r}, which is no address of this machine: use '0.0.0.0'")]
            others = range(port + 1, min(port + _PORTS_TRIED, 65536))
            free = next((p for p in others if p not in (grpc_port, http_port) and _is_free(host, p)), None)
            remedy = "choose another port" if free is None else f"{free} is free"
            reason = (error.strerror or str(error)).lower()
            findings.append(_error(f"server.{name}", f"is {port}, which cannot be used ({reason}): {remedy}"))
    return findings


def _bind(host: str, port: int) -> None:
    """Takes a port for a moment. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)


def _is_free(host: str, port: int) -> bool:
    try:
        _bind(host, port)
    except OSError:
        return False
    return True
