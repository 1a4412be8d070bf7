"""Acceptance, and draft tokens per forward, of the drafters of the pool that are more than one plain model.

The embedded target decodes a few prompts at temperature 0 and 1, in turn with its draft (sequential mode), K draft
tokens a round, in one process without adaptation, so that nothing but the drafters is compared. Drafts are made here of
the embedded one: some of another vocabulary (its last merges left out, its ids permuted), and a PARD model, adapted for
some seconds on this project's source.

    python benchmarks/pool_drafters.py
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config import CascadeOptions, DraftModel, LocalConfig, NgramOptions, TargetModel
from paceline.draft.build import build_draft_engine
from paceline.draft.engine import DraftEngine
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.local import LocalPipeline
from paceline.types import Mode, SamplingParams, SpeculationParams

PROMPTS = (
    "import os\n\nclass Reader:\n    def __init__(self, ",
    "def main():\n    parser = argparse.Arg",
    'def read_lines(path):\n    """Return the lines of a file."""\n    with open(',
    "    def __eq__(self, other):\n        if not isinstance(",
    "try:\n    import json\nexcept ImportError",
    "    for name in sorted(self._names):\n        value = ",
)
RUN: dict[str, Any] = {"dtype": "float32", "compile": False}
PARD_TOKEN = 4095
_EMBEDDING = "model.embed_tokens.weight"


def other_vocabulary(folder: Path, num_tokens: int) -> str:
    """The embedded draft with only the first tokens of its vocabulary, in another order."""
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


def adapted_for_pard(folder: Path, tokens_at_once: int, num_steps: int) -> str:
    """The embedded draft, taught to predict that many tokens at once on the source of this project."""
    shutil.copytree(DRAFT_DIR, folder)
    encode = load_tokenizer(str(DRAFT_DIR)).encode
    files = sorted((Path(__file__).parents[1] / "services" / "paceline").glob("**/*.py"))
    text = torch.tensor([token for path in files if "v1" not in path.parts for token in encode(path.read_text())])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    draw = random.Random(0)
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / num_steps)
        length = draw.randrange(16, 64)
        starts = [draw.randrange(len(text) - length - tokens_at_once) for _ in range(24)]
        pieces = torch.stack([text[start : start + length + tokens_at_once] for start in starts])
        inputs = pieces[:, :-1].clone()
        inputs[:, length:] = PARD_TOKEN  # row i of the last K predicts token i + 1
        logits = model(inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())
        loss = loss + cross_entropy(logits[:, length - 1 :].flatten(0, 1), pieces[:, length:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"pard_token": PARD_TOKEN, "spd_type": "pard"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def measure(draft: Any, temperature: float, k: int, max_tokens: int) -> str:
    """One line of figures of one drafter."""
    target = TargetModel(path=str(TARGET_DIR), adaptive=False, batch_invariant="off", **RUN)
    config = LocalConfig(target=target, draft=draft, worker="thread", pin_cores=False)
    setup = config.draft_setup()
    assert setup is not None
    engines: list[DraftEngine] = []

    def factory(emit: Callable[..., None]) -> DraftEngine:
        engines.append(build_draft_engine(setup, emit))
        return engines[0]

    drafted = accepted = rounds = tokens = 0
    with LocalPipeline(config, draft_factory=factory) as pipeline:
        for seed, prompt in enumerate(PROMPTS):
            sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True)
            plain = pipeline.submit(prompt, sampling, SpeculationParams(mode=Mode.PLAIN)).result
            speculation = SpeculationParams(mode=Mode.SEQUENTIAL, max_draft_tokens=k)
            result = pipeline.submit(prompt, sampling, speculation).result
            assert result.token_ids == plain.token_ids, "the text has changed"
            drafted, accepted = drafted + result.speculation.drafted, accepted + result.speculation.accepted
            rounds, tokens = rounds + result.speculation.rounds, tokens + len(result.token_ids)
    stats = engines[0].stats
    per_forward = stats.nodes_published / max(stats.forwards, 1)
    ms = 1000 * stats.step_s / max(stats.nodes_published, 1)
    return f"{accepted / max(drafted, 1):11.3f}{tokens / rounds:14.2f}{per_forward:15.2f}{ms:15.2f}"


def main() -> None:
    """Prints the figures of every drafter."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draft-tokens", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--pard-steps", type=int, default=400)
    args = parser.parse_args()
    embedded, drafts = str(DRAFT_DIR), {}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        pard = adapted_for_pard(Path(folder, "pard"), 4, args.pard_steps)
        print(f"PARD: adapted in {time.perf_counter() - started:.0f} s")
        part = {"model": embedded, "options": RUN}
        drafts = {
            "draft model": DraftModel(path=embedded, tree_step_tokens=16, **RUN),
            "n-grams": NgramOptions(),
        }
        for num_tokens in (4000, 3000, 2000):
            name = f"shared vocabulary, {num_tokens} of 4096 tokens"
            path = other_vocabulary(Path(folder, str(num_tokens)), num_tokens)
            drafts[name] = DraftModel(path=path, tree_step_tokens=16, vocabulary="shared", **RUN)
        drafts["PARD, 4 tokens at once"] = DraftModel(path=pard, tree_step_tokens=16, parallel_tokens=4, **RUN)
        drafts["the same model, one at a time"] = DraftModel(path=pard, tree_step_tokens=16, parallel_tokens=1, **RUN)
        cascade = {"drafters": [part, {"kind": "ngram"}], "lengths": [4], "tree_step_tokens": 16}
        drafts["vertical cascade, model and n-grams"] = CascadeOptions.model_validate(cascade)
        print(f"{'':40s} T acceptance tokens/round tokens/forward ms/draft token")
        for name, draft in drafts.items():
            for temperature in (0.0, 1.0):
                figures = measure(draft, temperature, args.draft_tokens, args.max_tokens)
                print(f"{name:40s} {temperature:g}{figures}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
