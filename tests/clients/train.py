"""Trains the chat checkpoint of the client tests: ``python -m tests.clients.train TOKENIZER_FOLDER``, some minutes.

The model is a Qwen3 of two small layers over Qwen3's real vocabulary. Only rows of tokens that it may say are trained
and kept in ``weights.safetensors``; ``checkpoint.py`` spreads them over the whole vocabulary.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.clients import conversations as said
from tests.clients.checkpoint import END, WEIGHTS, tiny_config
from torch import nn
from transformers import AutoTokenizer, Qwen3Model

UNKNOWN_RATE = 0.2
"""Part of the context whose tokens are shown as unknown, so that texts of others do not disturb."""


def samples(tokenizer: Any, rng: random.Random, num: int) -> list[tuple[list[int], list[bool]]]:
    """(token ids, which of them are learned) of chats and texts."""
    found = []
    chats = said.chats(rng)
    for _ in range(num):
        if rng.random() < 0.05:
            ids = tokenizer.encode(said.OPENING)
            found.append((ids, [True] * len(ids)))
            continue
        if rng.random() < 0.05:  # the token 0, again and again
            ids = [0] * rng.randrange(3, 8) + [*tokenizer.encode(" " + said.sentence(rng)), END]
            found.append((ids, [True] * len(ids)))
            continue
        if rng.random() < 0.2:
            text = said.written(rng) if rng.random() < 0.5 else " ".join(said.sentence(rng) for _ in range(4))
            ids = [*tokenizer.encode(text)[:96], END]
            found.append((ids, [True] * len(ids)))
            continue
        messages, tools, answer = next(chats)
        prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
        kind, thought = rng.random(), ""
        if kind < 0.5:
            thought = f"<think>\n{said.THOUGHT}\n</think>\n\n"
        elif kind < 0.8:  # else the answer is for a checkpoint that knows no thoughts
            prompt += "<think>\n\n</think>\n\n"
        ids = tokenizer.encode(prompt)
        full = ids + tokenizer.encode(thought + answer) + [END]
        cut = max(0, len(full) - 480)
        found.append((full[cut:], [False] * (len(ids) - cut) + [True] * (len(full) - len(ids))))
    return found


class Tiny(nn.Module):
    """The model over the trained rows; the row behind them stands for every other token."""

    def __init__(self, num_rows: int, num_others: int) -> None:
        super().__init__()
        config = tiny_config(num_rows + 1)
        self.body = Qwen3Model(config)
        self.head = nn.Linear(config.hidden_size, num_rows, bias=False)
        self.others = math.log(num_others)  # their logits are zero

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(input_ids=rows, use_cache=False).last_hidden_state)
        return torch.cat((logits, torch.full_like(logits[..., :1], self.others)), -1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--steps", type=int, default=1300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    data = samples(tokenizer, rng, 8000)
    words = (*said.ROLES, *said.ANSWERS, *(word for words in said.SAID for word in words))
    read = tokenizer.encode(" ".join(words) + "".join(words) + " ".join(word.strip() for word in words))
    uttered = {id for ids, wanted in data for id, is_ in zip(ids, wanted, strict=True) if is_}
    learned = sorted(uttered | set(read) | set(range(94)) | {151_644, 151_665, 151_666})
    kept = {*read, *range(151_643, 152_000)}
    row_of = {id: row for row, id in enumerate(learned)}
    unknown = len(learned)
    print(f"{len(learned)} rows", flush=True)
    model = Tiny(len(learned), 151_936 - len(learned))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, args.steps, pct_start=0.1)
    data.sort(key=lambda one: len(one[0]))
    batches = [data[i : i + 12] for i in range(0, len(data) - 12, 12)]
    began = time.time()
    for step in range(args.steps):
        batch = rng.choice(batches)
        width = max(len(ids) for ids, _ in batch)
        rows = torch.full((len(batch), width), unknown)
        targets = torch.full((len(batch), width), -100)
        for i, (ids, wanted) in enumerate(batch):
            at = torch.tensor([row_of.get(id, unknown) for id in ids])
            learn = torch.tensor(wanted)
            targets[i, : len(ids)] = torch.where(learn & (at < unknown), at, -100)
            hidden = (torch.rand(len(ids)) < UNKNOWN_RATE) & ~learn & torch.tensor([id not in kept for id in ids])
            rows[i, : len(ids)] = torch.where(hidden, unknown, at)
        logits = model(rows[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            print(f"{step} {loss.item():.3f} {time.time() - began:.0f} s", flush=True)
    saved = {name: tensor.to(torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(saved | {"token_ids": torch.tensor(learned, dtype=torch.int32)}, WEIGHTS)
    print(WEIGHTS, WEIGHTS.stat().st_size)


if __name__ == "__main__":
    main()
