"""The source of a head: its configuration, the names of its tensors, and what its target says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.size import size_of
from paceline.checkpoint.weights import WeightFiles
from paceline.drafters.heads.layers import eagle_config
from paceline.drafters.heads.module import Function, HeadModule
from paceline.errors import ConfigError, named
from paceline.model.local_config import BUILDING, read_config

COMMON_KEYS = {
    *("architectures", "model_type", "auto_map", "_name_or_path", "transformers_version", "dtype", "torch_dtype"),
    *("base_model_name_or_path", "speculators_version", "use_cache", "tokenizer_class"),
}
"""Keys of a config.json that change nothing in what a head computes."""
_IGNORED = re.compile(r"(^|\.)(t2d|rotary_emb\.inv_freq)$|^verifier_")
"""Tensors that a head does not need: their values are known from elsewhere."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts of the target that a head's files are judged by."""

    checkpoint: Checkpoint
    num_layers: int
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TargetFacts:
        """The sizes of a target by its configuration."""
        size = size_of(checkpoint.config, 0, 1)
        return cls(checkpoint, size.num_layers, size.hidden_size, checkpoint.vocab_size)


@dataclass(frozen=True)
class HeadForm:
    """A head as its configuration describes it: the module without weights, and which tensors they are."""

    module: HeadModule
    boundaries: tuple[int, ...]
    names: Mapping[str, str]
    """Name of the module -> name in the files."""
    experts: Mapping[str, tuple[tuple[str, ...], ...]]
    """Name of the module -> of each expert the names in the files that are stacked for it."""


@dataclass(frozen=True)
class Reading:
    """Source that a format is read from."""

    what: str
    config: Mapping[str, Any]
    files: WeightFiles
    facts: TargetFacts
    num_tokens: int
    boundaries: tuple[int, ...] | None

    @property
    def keys(self) -> list[str]:
        """Names in the files that may be weights."""
        return [name for name in self.files.shapes if not _IGNORED.search(name)]

    def require_config(self, known: Iterable[str]) -> None:
        """Raises ConfigError for a key that is neither in ``known`` nor harmless."""
        if unknown := sorted(set(self.config) - set(known) - COMMON_KEYS):
            raise ConfigError(
                f"config.json of {self.what} has {named(map(repr, unknown))}: an unknown key could change its result"
            )

    def require_form(self, model_type: str, keys: Collection[str]) -> None:
        """Raises ConfigError unless config.json is of this model type and has all of these keys, and no others but
        harmless ones: a format of ours."""
        self.require_config(keys)
        if self.config.get("model_type") != model_type:
            raise ConfigError(
                f"model_type is {self.config.get('model_type')!r} in {self.what}: {model_type!r} is allowed"
            )
        if missing := [key for key in keys if self.config.get(key) is None]:
            raise ConfigError(f"config.json of {self.what} lacks {named(map(repr, missing))}")

    def nested(self, key: str, values: Mapping[str, Any]) -> Reading:
        """The source with the configuration under one of its keys in the place of all of it."""
        return replace(self, what=f"{self.what}, {key}", config=values)

    def integer(self, *names: str) -> int | None:
        """The whole number under the first of these keys that is there."""
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise ConfigError(f"{name} is {value!r} in config.json of {self.what}: a whole number is needed")
                return value
        return None

    def require_equal(self, name: str, value: int | None, wanted: int) -> None:
        """Raises ConfigError if a size of the head is given and is not the target's."""
        if value is not None and value != wanted:
            raise ConfigError(f"{name} is {value} in {self.what}: the target {self.target!r} has {wanted}")

    @property
    def target(self) -> str:
        return self.facts.checkpoint.path


def matched_tensors(
    reading: Reading,
    module: HeadModule,
    rename: Callable[[str], str | None],
    publish: Callable[[str], str] = str,
) -> tuple[dict[str, str], dict[str, tuple[tuple[str, ...], ...]]]:
    """The file's name of each tensor of the module, and the parts of its stacked experts.

    Args:
        reading: the files.
        module: the head, without weights.
        rename: a name in the files -> a name of the module; None: no part of this head.
        publish: a name of the module -> the name that it would have in the files.

    Raises:
        ConfigError: a name of the files is unknown, or one of the module is missing.
    """
    own = dict(module.state_dict())
    names: dict[str, str] = {}
    parts: dict[str, dict[int, dict[str, str]]] = {}
    unknown = []
    for published in reading.keys:
        name = rename(published)
        if name is None:
            continue
        if name in own:
            names[name] = published
        elif (found := _EXPERT.fullmatch(name)) and (stacked := _stacked(found, own)) in own:
            parts.setdefault(stacked, {}).setdefault(int(found["expert"]), {})[found["part"]] = published
        else:
            unknown.append(published)
    if unknown:
        raise ConfigError(f"{reading.what} holds {named(map(repr, sorted(unknown)))}, which its format does not have")
    experts = {}
    for name, by_expert in parts.items():
        wanted = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else (name.rpartition(".")[2],)
        count = own[name].shape[0]
        before = publish(name).rpartition(".")[0]
        missing = [
            f"{before}.{i}.{part}.weight" for i in range(count) for part in wanted if part not in by_expert.get(i, {})
        ]
        if missing:
            raise ConfigError(f"{reading.what} is not whole: of {count} experts it lacks {named(map(repr, missing))}")
        if len(by_expert) > count:
            raise ConfigError(f"{reading.what} has {len(by_expert)} experts: by config.json it must have {count}")
        experts[name] = tuple(tuple(by_expert[i][part] for part in wanted) for i in range(count))
    if missing := sorted(map(publish, own.keys() - names.keys() - experts.keys())):
        raise ConfigError(f"{reading.what} is not whole: no weight file holds {named(map(repr, missing))}")
    return names, experts


_EXPERT = re.compile(r"(?P<before>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")


def _stacked(found: re.Match[str], own: Mapping[str, Tensor]) -> str:
    """The module's tensor that holds a matrix of an expert: of experts without a gate, each has its own."""
    alone = f"{found['before']}.{found['part']}"
    return alone if alone in own else f"{found['before']}.gate_up_proj"


def borrowed_embedding(reading: Reading, names: set[str], config: PretrainedConfig) -> Function | None:
    """Returns None if the head has an embedding of its own; else the target's, whose width must be the head's."""
    if "embed_tokens.weight" in names:
        reading.require_equal("vocab_size", int(config.vocab_size), reading.facts.vocab_size)
        return None
    reading.require_equal("hidden_size (it has no embed_tokens)", int(config.hidden_size), reading.facts.hidden_size)
    return later


def layers_config(reading: Reading, values: Mapping[str, Any], kind: str) -> PretrainedConfig:
    """The configuration of a head's layers of a family, with the biases that the files hold. Raises ConfigError."""
    biased = any(key.endswith("self_attn.q_proj.bias") for key in reading.keys)  # Qwen 2's does not say so
    own = {**values, "model_type": kind, **({"attention_bias": True} if biased else {})}
    return valid(reading, lambda: eagle_config(own))


def valid(reading: Reading, make: Callable[[], PretrainedConfig]) -> PretrainedConfig:
    """A configuration that transformers makes. Raises ConfigError with its reason not to."""
    try:
        with torch.device("cpu"):
            return make()
    except Exception as error:  # whatever the configuration classes of transformers raise
        reason = str(error).strip().splitlines()[-1].strip()
        raise ConfigError(f"config.json of {reading.what} is not valid: {reason}") from error


def drop_output_bias(module: Any, names: Iterable[str]) -> None:
    """Attention of Qwen 2 has biases, but for its output."""
    held = set(names)
    for index, layer in enumerate(module.layers):
        if f"layers.{index}.self_attn.q_proj.bias" in held and f"layers.{index}.self_attn.o_proj.bias" not in held:
            layer.self_attn.o_proj.bias = None


def later(x: Tensor) -> Tensor:
    """Stands for the target's embedding or LM head until the weights are loaded."""
    raise AssertionError("the head has not been given the target's tables")


def renaming(model: Any) -> Callable[[str], str]:
    """Maps names in the files of a target to the names that transformers gives them; experts stay apart."""
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    return lambda name: rename_source_key(name, renamings, [])[0]


def meta_model(checkpoint: Checkpoint) -> Any:
    """The target's model without weights."""
    with BUILDING, torch.device("meta"):  # the other engine's model may be built in this process, too
        config = read_config(checkpoint)
        return AutoModelForCausalLM.from_config(config, trust_remote_code=checkpoint.trust_remote_code)
