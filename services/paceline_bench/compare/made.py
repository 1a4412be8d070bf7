"""Models that a comparison makes for itself, by name, wherever its configuration names a model:

grown:SIZE:MODEL          the same function at the cost of a larger model, e.g. grown:150M:paceline/embedded-target
random:MODEL              the same shapes and tokenizer, random weights
vocabulary:N              the embedded draft with the first N tokens of its vocabulary, in another order
pard:K:STEPS              the embedded draft, adapted to PARD: it predicts K tokens at once
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import paceline
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config.loading import resolve
from paceline.drafters.catalogue import METHODS, Method, Place
from paceline.drafters.training.options import KINDS, HeadForm, Schedule, TrainingOptions
from paceline.drafters.training.run import train_head
from paceline.embedded import DRAFT_DIR, HEAD_DIRS, TARGET_DIR
from paceline.errors import ConfigError
from paceline.types import Mode, SpeculationParams
from paceline_bench.compare.spec import Arm, Spec, merged
from paceline_bench.grow import parse_size
from paceline_bench.models import grown

PARD_TOKEN = 4095
NUM_SHARED = 3000
"""Tokens of the draft of another vocabulary, all of them among the target's 4,096."""
CHAINS = (2, 4, 6)
"""K of the draft in sequential mode; the fastest is its best chain."""
_EMBEDDING = "model.embed_tokens.weight"
_BOUNDARIES = {"early_exit": (6,), "speculative_streaming": (5,)}
"""Of heads that draft with layers of the target."""
_EAGER: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "compile": False}
_PAGE = Path(paceline.__file__).parents[2] / "docs" / "own-drafters.md"


def with_models(tree: Any, folder: Path) -> Any:
    """A configuration whose models are there. ``folder`` keeps the ones made here.

    Raises:
        ConfigError: a model cannot be made.
    """
    if isinstance(tree, Mapping):
        return {key: with_models(value, folder) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_models(value, folder) for value in tree]
    kind, _, rest = tree.partition(":") if isinstance(tree, str) else ("", "", "")
    if not rest or kind not in _MAKERS:
        return tree
    try:
        return _MAKERS[kind](folder / tree.replace("/", "-").replace(":", "-"), *rest.split(":"))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the model {tree!r} cannot be made: {error}") from error


def _grown(folder: Path, size: str, model: str) -> str:
    return grown(resolve(model), parse_size(size), "bfloat16")


def random_weights(folder: Path, model: str) -> str:
    """A model with the shapes and the tokenizer of another one."""
    if not folder.exists():
        source = resolve(model)
        made = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, trust_remote_code=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.05, generator=generator)
        made.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, trust_remote_code=False).save_pretrained(folder)
    return str(folder)


def other_vocabulary(folder: Path, num_tokens: str | int) -> str:
    """The embedded draft with only the first tokens of its vocabulary, in another order."""
    if folder.exists():
        return str(folder)
    num_tokens = int(num_tokens)
    shutil.copytree(DRAFT_DIR, folder)
    order = random.Random(0).sample(range(num_tokens), num_tokens)  # new id by old id
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {token: order[i] for token, i in model["vocab"].items() if i < num_tokens}
    model["merges"] = [
        m for m in model["merges"] if "".join(m if isinstance(m, list) else m.split(" ")) in model["vocab"]
    ]
    for token in tokenizer["added_tokens"]:
        token["id"] = order[token["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    weights = load_file(folder / "model.safetensors")
    table = torch.zeros_like(weights[_EMBEDDING])[:num_tokens]
    table[torch.tensor(order)] = weights[_EMBEDDING][:num_tokens]
    save_file(weights | {_EMBEDDING: table}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    eos = order[config["eos_token_id"]]
    config |= {"vocab_size": num_tokens, "eos_token_id": eos, "bos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return str(folder)


def adapted_for_pard(folder: Path, tokens_at_once: str | int, num_steps: str | int) -> str:
    """The embedded draft, taught to predict that many tokens at once on the source of this project."""
    if folder.exists():
        return str(folder)
    at_once, steps = int(tokens_at_once), int(num_steps)
    shutil.copytree(DRAFT_DIR, folder)
    encode = load_tokenizer(str(DRAFT_DIR)).encode
    files = sorted(Path(paceline.__file__).parent.glob("**/*.py"))
    text = torch.tensor([token for path in files if "v1" not in path.parts for token in encode(path.read_text())])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    draw = random.Random(0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / steps)
        length = draw.randrange(16, 64)
        starts = [draw.randrange(len(text) - length - at_once) for _ in range(24)]
        pieces = torch.stack([text[start : start + length + at_once] for start in starts])
        inputs = pieces[:, :-1].clone()
        inputs[:, length:] = PARD_TOKEN  # row i of the last K predicts token i + 1
        logits = model(inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        loss = loss + cross_entropy(logits[:, length - 1 :].flatten(0, 1), pieces[:, length:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"pard_token": PARD_TOKEN, "spd_type": "pard"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


_MAKERS: dict[str, Callable[..., str]] = {
    "grown": _grown,
    "random": random_weights,
    "vocabulary": other_vocabulary,
    "pard": adapted_for_pard,
}


def made_head(kind: str, folder: Path, num_steps: int, num_tokens: int) -> str:
    """A head of the embedded target, trained on this project's source; one that is there already is taken."""
    if not (folder / "report.json").exists():
        options = TrainingOptions(
            HeadForm(kind, boundaries=_BOUNDARIES.get(kind, ())),
            str(TARGET_DIR),
            [Path(paceline.__file__).parent / "core"],
            folder,
            Schedule(num_steps),
            num_tokens=num_tokens,
            temperatures=(),
            held_out_rows=2,
        )
        train_head(options, lambda *told: None)
    return str(folder.resolve())


def install_example(folder: Path) -> None:
    """The package of docs/own-drafters.md, installed for this process and its children."""
    page = _PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (entry,) = re.findall(r"^bigrams = \"(.*)\"$", page, re.MULTILINE)
    info = folder / "my_drafters-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "my_drafters.py").write_text(code, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-drafters\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[paceline.drafters]\nbigrams = {entry}\n", encoding="utf-8")
    sys.path.insert(0, str(folder))


def model_of(method: Method, spec: Spec, folder: Path) -> str | None:
    """The checkpoint that a method reads: of the package, trained, or one that is made; None: none is there.

    Raises:
        ConfigError: the folder of heads lacks one, and none is to be made.
    """
    assert spec.methods is not None
    kind = str(method.options.get("method", method.kind))
    if kind in HEAD_DIRS:
        return f"paceline/embedded-{kind}"
    if method.options.get("vocabulary") == "shared":
        return f"vocabulary:{NUM_SHARED}"
    if isinstance(tokens_at_once := method.options.get("parallel_tokens"), int):
        return f"pard:{tokens_at_once}:{spec.methods.pard_steps}"
    if kind in ("model", "draft_model", "cascade"):
        return "paceline/embedded-draft"
    if not method.needs_model or kind not in KINDS:
        return None
    if spec.methods.training_steps:
        own = spec.methods
        return made_head(kind, Path(own.heads or folder) / kind, own.training_steps, own.training_tokens)
    if spec.methods.heads is None:
        return None
    head = Path(spec.methods.heads) / kind
    if not (head / "report.json").is_file():
        raise ConfigError(f"heads is {spec.methods.heads}: it holds no trained {kind}: training_steps makes it")
    return str(head.resolve())


def method_arms(spec: Spec, folder: Path) -> list[Arm]:
    """An arm for each method that can draft for the embedded target: every token is asked for and verified, and heads
    are taken as they are, however little they were trained. A head in the pool drafts in both modes, since its states
    have come in sequential mode and are late in the other.

    Raises:
        ConfigError: a name is unknown, or as ``model_of``.
    """
    if spec.methods is None:
        return []
    known = [method.name for method in METHODS]
    if unknown := [name for name in spec.methods.names if name not in known]:
        raise ConfigError(f"methods.names holds {unknown[0]!r}: use some of {', '.join(known)}")
    arms = []
    for method in METHODS:
        if spec.methods.names and method.name not in spec.methods.names:
            continue
        if method.kind == "plugin":
            if spec.service or not _PAGE.is_file():  # a service installs no package
                continue
            install_example(folder / "plugin")
        model = model_of(method, spec, folder)
        if model is None and method.reads:
            continue
        chain = method.place is Place.POOL and method.mode is Mode.SEQUENTIAL and method.kind == "model"
        modes = (Mode.SEQUENTIAL, Mode.OVERLAPPED) if method.kind == "head" else (method.mode,)
        tree = configuration(method, model, spec)
        for mode in modes:
            name = f"{method.name}, {mode.value}" if len(modes) > 1 else method.name
            for k in CHAINS if chain else (spec.methods.draft_tokens,):
                params = SpeculationParams(mode=mode, max_draft_tokens=k)
                arms.append(Arm(f"{name} K={k}" if chain else name, tree, params, service=spec.service))
    return arms


def configuration(method: Method, model: str | None, spec: Spec) -> dict[str, Any]:
    """That of docs/methods.md, eager in float32. All but prompt lookup ask for all their tokens in every step."""
    assert spec.methods is not None
    tree = merged(spec.configuration, method.configuration("paceline/embedded-target", model))
    engine = tree["target_config"].setdefault("engine_kwargs", {})
    engine |= {**_EAGER, "adaptive": not method.kind}
    given = {"num_speculative_tokens": spec.methods.draft_tokens, "probe": False}
    engine["heads"] = [{**head, **given} for head in engine.get("heads", ())]
    if method.place is Place.POOL:
        draft = tree["draft_config"].setdefault("engine_kwargs", {})
        if method.kind == "model":
            draft |= _EAGER
        if method.kind == "head":
            draft |= {"dtype": _EAGER["dtype"], "device": _EAGER["device"], "ahead": True}
        if method.kind == "cascade":
            draft["drafters"][0]["options"] = dict(_EAGER)
    return tree
