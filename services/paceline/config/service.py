"""The tree of the whole service: the pools, the ports and the log. Read from plain data, files and overrides, written
back as YAML, and cut into the slices that the monitor and the engine builders are given.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_serializer, field_validator, model_validator

from paceline.config.base import Strict
from paceline.config.deployments import DeploymentConfig
from paceline.config.devices import gpu_number
from paceline.config.environment import settings, variable_of
from paceline.config.files import args_of_application, first_line, read_yaml, set_key
from paceline.config.loading import EMBEDDED_TARGET, resolve
from paceline.config.methods.model import ModelDraftConfig
from paceline.config.options import DraftSetup, TargetSetup, require_placement
from paceline.config.policies import DraftPolicy
from paceline.config.pools import DraftConfig, RouterConfig, TargetConfig
from paceline.config.security import InternalTls, ServerTls
from paceline.config.tracing import TracingConfig
from paceline.errors import ConfigError
from paceline.errors.refusals import Fault, explain, keys_of

ToolCallParser = Literal[
    "hermes",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "pythonic",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "openai",
    "glm45",
    "glm47",
    "kimi_k2",
    "minimax",
    "minimax_m2",
    "granite",
    "granite4",
    "qwen3_xml",
    "qwen3_coder",
    "mimo",
    "seed_oss",
    "ernie45",
    "jamba",
    "hunyuan_a13b",
    "internlm",
    "phi4_mini_json",
    "gemma4",
    "none",
]
"""Names of ``checkpoint/answer_formats.py``."""
ReasoningParser = Literal[
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "qwen3",
    "glm45",
    "glm47",
    "kimi_k2",
    "minimax",
    "minimax_m2",
    "granite",
    "mistral",
    "openai_gptoss",
    "hunyuan_a13b",
    "ernie45",
    "mimo",
    "olmo3",
    "nemotron_v3",
    "seed_oss",
    "step3",
    "gemma4",
    "none",
]
"""Names of ``checkpoint/answer_formats.py``."""


class ServerConfig(Strict):
    """The address at which clients reach the service."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """The address of the two public ports; 0.0.0.0: all addresses of the machine."""
    grpc_port: int = Field(default=9000, ge=1, le=65535)
    http_port: int = Field(default=8000, ge=1, le=65535)
    """The OpenAI-compatible API, metrics and health."""
    max_message_bytes: int = Field(default=16 << 20, ge=1 << 16, lt=2**31)
    """Longest gRPC message and body over HTTP, in bytes; a longer message is refused with RESOURCE_EXHAUSTED before it
    is read. It must hold the longest prompt. ``paceline serve`` sets it for gRPC; elsewhere
    RAY_SERVE_GRPC_MAX_MESSAGE_SIZE of every process does."""
    drain_timeout_s: float = Field(default=20.0, ge=0)
    """Time that requests in progress have to end once ``paceline serve`` is told to stop (SIGTERM, Ctrl-C); later
    ones end with an error. New requests are refused meanwhile, and health checks fail. A second signal does not
    wait."""
    grpc_max_connection_age_s: float = Field(default=30.0, ge=0.1)
    """Age at which a gRPC connection is told to take no new calls; its streams go on. Clients, which are balanced by
    connection, so find routers that were added, and leave one that is stopped."""
    tls: ServerTls | None = None
    """None: traffic with clients is not encrypted."""
    api_keys: str | None = Field(default=None, min_length=1)
    """YAML file of the API keys and their limits. None: any caller may call."""
    share_cache_between_keys: bool = False
    """Share cached prompts, and texts that drafts learn from, among all API keys. A caller can then find out, by
    ``cached_tokens`` and by time, what others have asked."""
    chat_template: str | None = Field(default=None, min_length=1)
    """File of a Jinja template that makes a prompt of a chat. None: that of the target's tokenizer, if it has one."""
    tool_call_parser: ToolCallParser | None = None
    """Form of the model's tool calls, by the name of vLLM's parser; ``none``: calls stay in the content. By default the
    marks of chat template and tokenizer tell it."""
    reasoning_parser: ReasoningParser | None = None
    """Form of the model's reasoning, by the name of vLLM's parser; ``none``: it stays in the content. By default the
    marks of chat template and tokenizer tell it."""
    served_model_name: tuple[str, ...] = ()
    """Names by which clients ask for the model, in place of its id; one, or a list. The first is that of answers to
    requests without one."""
    cors_origins: tuple[str, ...] | None = None
    """Origins of web pages that may call, such as ``https://chat.example.com``; ``*``: any. null: pages of this machine
    (localhost) while there are no keys, else none."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names by which clients may call the service in the header ``Host``, besides addresses and names without
    a dot. ``*.example.com``: all below it; ``*``: any. null: no more while ``host`` is the loopback, so that no web
    page can call it by a name of its own; else any."""
    force_include_usage: bool = False
    """Every event of a stream holds the token counts so far, and a last event the request's counts, unless
    ``stream_options`` say otherwise."""
    strict_fields: bool = False
    """Refuse a body over HTTP that holds an unknown field. Else it is ignored, logged once, and named in the header
    ``x-paceline-ignored-fields`` of the answer."""
    responses_store_bytes: int | None = Field(default=None, ge=0)
    """Bytes of the last responses of ``/v1/responses`` that are kept in memory for each API key, for
    ``previous_response_id``; 0: none. None: 64 MiB with ``--local``, and 0 in a service. A router keeps its own, so a
    service with several allows 0 alone."""
    playground: bool = True
    """Serve a page at ``/`` of the HTTP port that shows speculation at work. It asks for a key where there are keys."""

    @field_validator("served_model_name", "cors_origins", "allowed_hosts", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_serializer("served_model_name", "cors_origins", "allowed_hosts")
    def _as_list(self, value: tuple[str, ...] | None) -> list[str] | None:
        return None if value is None else [*value]

    @field_validator("served_model_name")
    @classmethod
    def _names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise Fault("", "holds '': a name has at least one character")
        return value

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """``allowed_hosts`` with its default. None: any."""
        if self.allowed_hosts is not None:
            return None if "*" in self.allowed_hosts else tuple(name.lower() for name in self.allowed_hosts)
        return () if _is_loopback(self.host) else None

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.grpc_port == self.http_port:
            raise Fault("http_port", f"is {self.http_port}, which is grpc_port too: they must differ")
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class LogConfig(Strict):
    """Level and format of the log."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    as_json: bool = Field(default=False, alias="json")
    """One JSON object per line."""


class ServiceConfig(Strict):
    """The whole service. ``ServiceConfig()`` is the embedded pair with one replica each."""

    target_config: TargetConfig = TargetConfig()
    draft_config: DraftConfig | None = ModelDraftConfig()
    """None: plain decoding."""
    router_config: RouterConfig = RouterConfig()
    server: ServerConfig = ServerConfig()
    internal_tls: InternalTls | None = None
    """None: traffic between the service's processes is not encrypted."""
    log: LogConfig = LogConfig()
    tracing: TracingConfig | None = None
    """None: requests leave no traces for OpenTelemetry."""

    @model_validator(mode="after")
    def _draft_of_this_target(self) -> Self:
        target, draft = self.target_config.model_loading_config, self.draft_config
        unnamed = isinstance(draft, ModelDraftConfig) and "model_loading_config" not in draft.model_fields_set
        if unnamed and target.source != resolve(EMBEDDED_TARGET):
            raise Fault(
                "draft_config",
                f"names no model while target_config names {target.model_id!r}: "
                "name a draft model, or set draft_config to {kind: ngram}, to {kind: suffix}, or to null for plain "
                "decoding",
            )
        return self

    @model_validator(mode="after")
    def _one_router_keeps_responses(self) -> Self:
        deployment, kept = self.router_config.deployment_config, self.server.responses_store_bytes
        if kept and (deployment.num_replicas == "auto" or deployment.most_replicas > 1):
            raise Fault("server.responses_store_bytes", f"is {kept} with several routers: only 0 is allowed")
        return self

    @model_validator(mode="after")
    def _hints_reach_a_draft(self) -> Self:
        if self.target_config.engine_kwargs.hints is not None and self.draft_config is None:
            raise Fault(
                "target_config.engine_kwargs.hints", "is set while draft_config is null: hints need a draft pool"
            )
        return self

    @model_validator(mode="after")
    def _draft_has_a_place(self) -> Self:
        if self.draft_config is not None:
            options = self.draft_config.engine_kwargs
            require_placement(self.target_config.engine_kwargs, options, "draft_config.engine_kwargs.placement")
        return self

    @model_validator(mode="after")
    def _draft_beside_targets(self) -> Self:
        draft, key = self.draft_config, "draft_config.deployment_config.on_target_nodes"
        if draft is None or not draft.deployment_config.on_target_nodes:
            return self
        placed, others = draft.deployment_config, self.target_config.deployment_config
        if not self._target_labels:
            raise Fault(
                key,
                "is true while target_config names no nodes: give it an accelerator_type, or a label_selector in "
                "deployment_config.ray_actor_options",
            )
        if placed.ray_actor_options.label_selector:
            raise Fault(key, "is true with a label_selector of the draft's own: give one of them")
        device = getattr(draft.engine_kwargs, "device", "cpu")
        if device != "cpu" or draft.deployment_options()["ray_actor_options"].get("num_gpus"):
            where = "num_gpus is set" if device == "cpu" else f"engine_kwargs.device is {device!r}"
            raise Fault(key, f"is true while {where}: a draft on its target's node runs on 'cpu', without a GPU")
        for name, mine, most in (
            ("least", placed.least_replicas, others.least_replicas),
            ("most", placed.most_replicas, others.most_replicas),
        ):
            if mine > most:
                raise Fault(
                    key,
                    f"is true with {mine} drafts at {name} for {most} targets at {name}: at most one for each target "
                    "is allowed, as another one would ask for a node of its own",
                )
        if placed.num_replicas == "auto":
            raise Fault(key, "is true with num_replicas 'auto': a number or an autoscaling_config is allowed")
        if placed.autoscaling_config is not None:
            scaling = placed.autoscaling_config
            ratio = getattr(scaling.policy, "drafts_per_target", None)
            if not scaling.is_ours or (isinstance(ratio, float) and ratio > 1):
                what = f"drafts_per_target {ratio:g}" if scaling.is_ours else "a policy that counts requests"
                raise Fault(key, f"is true with {what}: only Paceline's policy is allowed, with at most 1 per target")
        return self

    @property
    def _target_labels(self) -> dict[str, str]:
        """Labels of the nodes of targets."""
        target = self.target_config
        kind = {} if target.accelerator_type is None else {"ray.io/accelerator-type": target.accelerator_type}
        return kind | (target.deployment_config.ray_actor_options.label_selector or {})

    def draft_options(self) -> dict[str, Any]:
        """Keyword arguments of ``serve.deployment`` for the drafts, which may follow the targets."""
        assert self.draft_config is not None
        options = self.draft_config.deployment_options()
        if self.draft_config.deployment_config.on_target_nodes:
            if "placement_group_bundles" in options:
                options["placement_group_bundle_label_selector"] = [self._target_labels]
            else:
                options["ray_actor_options"]["label_selector"] = self._target_labels
        return options

    @property
    def most_sequences(self) -> int | None:
        """Sequences that run at all targets that there may be, or wait at one router. None: Serve chooses how many."""
        target = self.target_config
        if target.deployment_config.num_replicas == "auto":
            return None
        running = target.deployment_config.most_replicas * target.engine_kwargs.max_sessions
        return running + self.router_config.max_queued_requests

    @classmethod
    def parse(cls, args: Mapping[str, Any]) -> Self:
        """Reads the configuration from plain data, such as the ``args`` of a Serve application. Raises ConfigError."""
        try:
            return cls.model_validate(dict(args))
        except ValidationError as error:
            raise ConfigError(explain(error, cls, _ELSEWHERE)) from None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Reads the configuration from YAML: itself, or a Serve config file, whose application's ``args`` it is.

        Raises:
            ConfigError: the file cannot be read, or what it says is refused.
        """
        data = read_yaml(path)
        return cls.parse(args_of_application(data, path) if "applications" in data else data)

    def with_environment(self) -> Self:
        """This configuration with the keys changed that environment variables set, such as
        ``PACELINE_SERVER__GRPC_PORT=9100``, with values in YAML.

        Raises:
            ConfigError: a variable names no key, or what it says is refused.
        """
        given = settings(list(keys_of(type(self))))
        try:
            return self.with_overrides([f"{key}={text}" for key, text in given.items()]) if given else self
        except ConfigError as error:
            at_fault = max((key for key in given if str(error).startswith(key)), key=len, default=None)
            names = [variable_of(key) for key in (given if at_fault is None else [at_fault])]
            raise ConfigError(f"{error} (set by {', '.join(names)})") from None

    def with_overrides(self, overrides: Sequence[str]) -> Self:
        """This configuration with some keys changed, each ``dotted.key=VALUE`` with the value in YAML.

        Raises:
            ConfigError: an override is malformed, or what it says is refused.
        """
        data = self.model_dump(by_alias=True, exclude_unset=True)  # what was left open follows what is set now
        if self.draft_config is not None and "draft_config" in data:
            data["draft_config"].setdefault("kind", self.draft_config.kind)
        for override in overrides:
            key, separator, text = override.partition("=")
            if not separator or not key.strip():
                raise ConfigError(f"{override!r} is not a setting: it must be KEY=VALUE with a dotted key")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"{key} is {text!r}, which is not valid YAML: {first_line(error)}") from error
            set_key(data, key.strip().split("."), value)
        return self.parse(data)

    def to_dict(self) -> dict[str, Any]:
        """Plain data that ``parse`` takes: every key, defaults included."""
        return self.model_dump(by_alias=True)

    def to_yaml(self) -> str:
        """YAML that ``from_file`` takes: every key, defaults included."""
        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False)
        return text

    def scaling(self) -> dict[str, Any]:
        """Plain data for the monitor: the pools whose sizes it decides, how many sessions a target serves, and how it
        logs."""
        parts = {"target": self.target_config, "draft": self.draft_config, "router": self.router_config}
        pools = {}
        for kind, part in parts.items():
            scaling = None if part is None else part.deployment_config.autoscaling_config
            if scaling is not None and scaling.is_ours:
                pools[kind] = scaling.model_dump()
        if "draft" in pools and self.draft_config is not None and self.draft_config.deployment_config.on_target_nodes:
            policy = pools["draft"]["policy"] or DraftPolicy().model_dump()
            one = policy["drafts_per_target"] if isinstance(policy["drafts_per_target"], float) else 1.0
            pools["draft"]["policy"] = policy | {"drafts_per_target": one}
        max_sessions = self.target_config.engine_kwargs.max_sessions
        return {"pools": pools, "max_sessions": max_sessions, "log": self.log.model_dump(by_alias=True)}

    def reserved_cpus(self, num_replicas: Callable[[DeploymentConfig], int]) -> float:
        """Cores that Ray reserves for all pools; ``num_replicas`` returns the replicas of each."""
        reserved = 0.0
        for pool in (self.target_config, self.router_config, self.draft_config):
            if pool is not None:
                options = pool.deployment_options()
                bundles = options.get("placement_group_bundles")
                cpus = sum(b.get("CPU", 0.0) for b in bundles) if bundles else options["ray_actor_options"]["num_cpus"]
                reserved += cpus * num_replicas(pool.deployment_config)
        return reserved

    def numbered_gpus(self) -> Iterator[tuple[str, str]]:
        """Keys with a value of ``cuda:N``, and the problem of each: Ray Serve numbers the GPUs itself."""
        for pool in ("target_config", "draft_config"):
            options = getattr(getattr(self, pool), "engine_kwargs", None)
            found = {f"{pool}.engine_kwargs.device": getattr(options, "device", "auto")}
            for i, drafter in enumerate(getattr(options, "drafters", ())):
                found[f"{pool}.engine_kwargs.drafters[{i}].options.device"] = drafter.options.get("device", "auto")
            for key, device in found.items():
                if gpu_number(device) is not None:
                    allowed = "'auto', 'cpu' and 'cuda' are allowed"
                    yield key, f"is {device!r}: Ray Serve chooses the GPUs of each replica, so {allowed}"

    def target_setup(self) -> TargetSetup:
        """The slice that a target replica builds its engine from."""
        target, draft = self.target_config, self.draft_config
        source, options = target.model_loading_config.source, None if draft is None else draft.engine_kwargs
        draft_source = draft.model_loading_config.source if isinstance(draft, ModelDraftConfig) else None
        return TargetSetup.with_draft(source, target.engine_kwargs, options, draft_source)

    def draft_setup(self) -> DraftSetup | None:
        """The slice that a draft replica builds its engine from. None: plain decoding."""
        draft = self.draft_config
        if draft is None:
            return None
        if not isinstance(draft, ModelDraftConfig):
            return DraftSetup.for_target(self.target_setup(), None, draft.engine_kwargs)
        target, loading = self.target_config.model_loading_config, draft.model_loading_config
        setup = DraftSetup.for_target(self.target_setup(), loading.source, draft.engine_kwargs)
        if draft.engine_kwargs.vocabulary == "same":
            return setup
        return replace(setup, tokenizers=(target.tokenizer, loading.tokenizer))


_ELSEWHERE = {
    "placement_group_bundles": "placement_group_config.bundles",
    "placement_group_strategy": "placement_group_config.strategy",
    "placement_group_bundle_label_selector": "accelerator_type with placement_group_config",
    "gang_scheduling_config": "placement_group_config: the processes of one replica are no gang",
}
"""Options of Ray Serve that have another name here."""
