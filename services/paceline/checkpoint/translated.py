"""Checkpoints that name a model type or a tokenizer of code of their own, for what transformers has under another name.

A directory is made once for each, in the cache of compiled models. It has links to the files, and the configuration and
the tokenizer in transformers' form. Its code is neither run nor linked. For a model of images and text the directory
holds the text model. If weights are stored under other names, the index lists them by transformers' names, and its
metadata holds the rules.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import tiktoken_model
from paceline.checkpoint.config_values import require_values
from paceline.checkpoint.made_once import made_once
from paceline.config import cache_dir
from paceline.errors import ConfigError

_FORMAT = 4
"""Goes up whenever the directory would be made otherwise of the same files."""
_CONFIG, _SETTINGS = "config.json", "tokenizer_config.json"
INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
Config = Mapping[str, Any]
Names = Sequence[Sequence[str]]
"""Pairs of beginnings of weights' names: as stored, and as transformers has them; ``*`` is a layer's number."""
_OF_TEXT: Names = (("language_model.", ""),)
"""Of the text model within a model of images and text; all others belong to the images."""
_QWEN3_VL: Names = (("model.language_model.", "model."), ("lm_head.", "lm_head."))
_EXAONE: Names = (
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.h.*.ln_1.", "model.layers.*.input_layernorm."),
    ("transformer.h.*.ln_2.", "model.layers.*.post_attention_layernorm."),
    ("transformer.h.*.attn.attention.out_proj.", "model.layers.*.self_attn.o_proj."),
    ("transformer.h.*.attn.attention.", "model.layers.*.self_attn."),
    ("transformer.h.*.mlp.c_fc_0.", "model.layers.*.mlp.gate_proj."),
    ("transformer.h.*.mlp.c_fc_1.", "model.layers.*.mlp.up_proj."),
    ("transformer.h.*.mlp.c_proj.", "model.layers.*.mlp.down_proj."),
    ("transformer.ln_f.", "model.norm."),
    ("lm_head.", "lm_head."),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """What transformers runs in place of a model type that it does not know."""

    model_type: str = ""
    architecture: str = ""
    published: tuple[str, ...] = ()
    """Architectures of the models; drafting heads for them have the same type. (): any."""
    values: Callable[[Config], Config] = lambda config: {}
    """Values that transformers' type has under other names."""
    other: tuple[str, ...] = ()
    """Keys of models of the type that have another layout."""
    part: str = ""
    """Key of the text model's configuration, whose own type says what runs; "": the model is one of text."""
    names: Names = ()
    """(): its weights have the names of transformers."""

    def is_of(self, config: Config) -> bool:
        """True if a configuration of the type has the layout."""
        names = config.get("architectures") or ()
        is_head = bool(self.published) and not any(name in self.published for name in names)
        has_part = not self.part or isinstance(config.get(self.part), Mapping)
        return has_part and not is_head and not any(config.get(key) for key in self.other)


def _of_minicpm(config: Config) -> Config:
    """MiniCPM's scales as Granite has them."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    return {
        "embedding_multiplier": config.get("scale_emb", 1),
        "residual_multiplier": config.get("scale_depth", 1) / math.sqrt(layers),
        "logits_scaling": hidden / config.get("dim_model_base", 1),
        "attention_multiplier": (hidden // config["num_attention_heads"]) ** -0.5,
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }


def _of_exaone4(config: Config) -> Config:
    """The kind of each layer by a pattern of letters, which repeats, or by the distance of layers without a window."""
    num, pattern = config["num_hidden_layers"], config.get("sliding_window_pattern")
    if isinstance(pattern, str) and not {*pattern} <= {*"LG"}:
        raise ValueError(f"sliding_window_pattern is {pattern!r}: L and G are allowed")
    if not pattern or config.get("sliding_window") is None:
        return {"layer_types": ["full_attention"] * num}
    letters = pattern if isinstance(pattern, str) else "L" * (pattern - 1) + "G"
    kinds = [{"L": "sliding_attention", "G": "full_attention"}[letters[i % len(letters)]] for i in range(num)]
    if isinstance(pattern, str):
        kinds[-1:] = ["full_attention"] * min(1, num)
    return {"layer_types": kinds}


def _of_exaone(config: Config) -> Config:
    """EXAONE 3's sizes as Llama has them."""
    return {
        "num_hidden_layers": config["num_layers"],
        "hidden_act": config.get("activation_function", "silu"),
        "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tie_word_embeddings": config.get("tie_word_embeddings", True),
    }


def _of_qwen3_vl(config: Config) -> Config:
    """Angles of a text alone: the three positions of a token of Qwen3-VL are one."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    return {"rope_scaling": None, "rope_parameters": {"rope_theta": config.get("rope_theta", 5e6), **kept}}


LAYOUTS: Mapping[str, Layout] = {
    "exaone": Layout("llama", "LlamaForCausalLM", ("ExaoneForCausalLM",), _of_exaone, names=_EXAONE),
    "exaone4": Layout("exaone4", "Exaone4ForCausalLM", ("Exaone4ForCausalLM",), _of_exaone4, ("layer_types",)),
    "kimi_k2": Layout("deepseek_v3", "DeepseekV3ForCausalLM", ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM")),
    "mimo": Layout("qwen2", "Qwen2ForCausalLM", ("MiMoForCausalLM",)),
    "minicpm": Layout(
        "granite", "GraniteForCausalLM", ("MiniCPMForCausalLM",), _of_minicpm, ("sparse_config", "num_experts")
    ),
    **dict.fromkeys(("kimi_k25", "kimi_vl", "mistral3"), Layout(part="text_config", names=_OF_TEXT)),
    "internvl_chat": Layout(part="llm_config", names=_OF_TEXT),
    "qwen3_vl": Layout(part="text_config", names=_QWEN3_VL),
    "qwen3_vl_text": Layout("qwen3", "Qwen3ForCausalLM", values=_of_qwen3_vl),
}
"""Model types whose published configurations transformers does not read, by the name in their config.json."""


_SHARED = ("quantization_config", "eos_token_id", "bos_token_id", "pad_token_id", "torch_dtype", "dtype",
           "tie_word_embeddings")  # fmt: skip
"""Keys of a whole model's configuration that hold for its text model if that has none of its own."""


def translated(folder: Path) -> Path:
    """A directory of the same model as transformers reads it: ``folder`` itself where it does.

    Raises:
        ConfigError: its configuration or its tokenizer is damaged, or the cache cannot be written.
    """
    config, settings = _read(folder / _CONFIG), _read(folder / _SETTINGS)
    require_values(config, folder)
    layout, has_ranks = LAYOUTS.get(str(config.get("model_type"))), tiktoken_model.is_known(folder, settings)
    if layout is not None and not layout.is_of(config):
        layout = None
    if layout is None and not has_ranks:
        return folder
    names = sorted(one.name for one in folder.iterdir() if one.suffix != ".py" and one.exists())
    stats = [(name, (found := (folder / name).stat()).st_size, found.st_mtime_ns) for name in names]
    content = json.dumps([_FORMAT, str(folder.resolve()), stats])
    made = cache_dir() / "checkpoints" / hashlib.sha256(content.encode()).hexdigest()[:24] / folder.resolve().name

    def write(draft: Path) -> None:
        (inner := draft / made.name).mkdir()
        found = {} if layout is None else _renamed(folder, layout.names)
        files = {} if layout is None else {_CONFIG: json.dumps(_known(config, layout) | _tied(found), indent=2)}
        if has_ranks:
            files["tokenizer.json"], values = tiktoken_model.converted(folder, settings)
            files[_SETTINGS] = json.dumps(values, indent=2, ensure_ascii=False)
        if layout is not None and found:
            files[INDEX] = json.dumps({"metadata": {"names": layout.names}, "weight_map": found})
        for name in names:
            if name not in files and not (has_ranks and name == tiktoken_model.FILE):
                (inner / name).symlink_to((folder / name).absolute())
        for name, text in files.items():
            (inner / name).write_text(text, encoding="utf-8")

    try:
        made_once(made.parent, write)
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        what = f"config.json or the weights' index of {str(folder)!r} is no {config.get('model_type')} model's"
        raise ConfigError(f"{what} ({type(error).__name__}: {error})") from error
    return made


def _known(config: Config, layout: Layout) -> dict[str, Any]:
    """A configuration as transformers has it."""
    kept = {key: value for key, value in config.items() if key != "auto_map"}
    if not layout.part:
        names = {"model_type": layout.model_type, "architectures": [layout.architecture]}
        return {**kept, **names, **layout.values(config)}
    own = dict(config[layout.part])
    text = own | {key: kept[key] for key in _SHARED if key in kept and own.get(key) is None}
    inner = LAYOUTS.get(str(text.get("model_type")))
    return _known(text, inner) if inner is not None else {key: text[key] for key in text if key != "auto_map"}


def _tied(names: Collection[str]) -> dict[str, bool]:
    """What the names of a text model's weights say of its output layer: without one it is the embedding."""
    has_head = any(name.startswith("lm_head.") for name in names)
    return {} if has_head or not names else {"tie_word_embeddings": True}


def renamed(name: str, names: Names) -> str | None:
    """A weight's name with the other beginning of the first of ``names`` that it has; None: it has none of them."""
    for old, new in names:
        if match := re.match(re.escape(old).replace(r"\*", r"(\d+)"), name):
            return new.replace("*", "".join(match.groups())) + name[match.end() :]
    return None


def _renamed(folder: Path, names: Names) -> dict[str, str]:
    """The file of each weight by its new name; {} if there are no files of weights, or ``names`` is empty.

    Raises:
        ValueError: all weights have other names.
    """
    if not names:
        return {}
    stored = _read(folder / INDEX).get("weight_map")
    if stored is None and (single := folder / _SINGLE).is_file():
        with single.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        stored = dict.fromkeys(json.loads(header), single.name)
    found = {new: file for name, file in (stored or {}).items() if (new := renamed(name, names)) is not None}
    if stored and not found:
        raise ValueError(f"no weight has a name that begins with {names[0][0]!r}")
    return found


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; {} if the file is missing or malformed, which its users report."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
