"""The embedded draft with other token ids and fewer tokens: a draft of another vocabulary that still drafts well."""

import json
import random
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paceline.embedded import DRAFT_DIR

_EMBEDDING = "model.embed_tokens.weight"


def other_vocabulary(folder: Path, *, num_tokens: int = 3000, seed: int = 0) -> Path:
    """A checkpoint in ``folder``: the embedded draft without the tokens that were merged last, the others permuted."""
    shutil.copytree(DRAFT_DIR, folder, dirs_exist_ok=True)
    order = list(range(num_tokens))
    random.Random(seed).shuffle(order)  # new id by old id
    tokenizer = json.loads((DRAFT_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = {token: order[i] for token, i in tokenizer["model"]["vocab"].items() if i < num_tokens}
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in tokenizer["model"]["merges"]]
    tokenizer["model"]["vocab"] = vocab
    tokenizer["model"]["merges"] = [list(m) for m in merges if "".join(m) in vocab]
    for token in tokenizer["added_tokens"]:
        token["id"] = order[token["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    weights = load_file(DRAFT_DIR / "model.safetensors")
    table = torch.zeros_like(weights[_EMBEDDING])[:num_tokens]
    table[torch.tensor(order)] = weights[_EMBEDDING][:num_tokens]
    save_file(weights | {_EMBEDDING: table}, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        config = json.loads((DRAFT_DIR / name).read_text())
        config |= {key: order[config[key]] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
        config |= {"vocab_size": num_tokens} if "vocab_size" in config else {}
        (folder / name).write_text(json.dumps(config))
    return folder
