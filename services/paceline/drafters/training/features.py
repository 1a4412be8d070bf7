"""Features of a target on disk: rows of its own text and its states there, made once and read by every training.

A cache directory holds ``cache.json`` (its sources), a folder for token ids, and one for each boundary. Each folder has
one safetensors file per batch of rows. Whatever is interrupted goes on with the first file that is missing, and a head
that needs other boundaries adds their folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from paceline.drafters.training.data import windows
from paceline.errors import ConfigError

OUT = -1
_ROWS_PER_FILE = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """Identity of the rows that a cache holds; two caches of equal rows and equal target hold the same text."""

    target: str
    """Path of the target."""
    data: str
    """Digest of the documents."""
    num_rows: int
    length: int
    """Tokens of a row at most: the prompt and what the target continued."""
    prompt_tokens: int
    temperatures: tuple[float, ...]
    """A batch of rows is continued at one of them, in turn; 0: greedy. Empty: the data are taken as they are."""
    seed: int

    @property
    def per_file(self) -> int:
        """Rows of a file: there is at least one file for each temperature."""
        return max(1, min(_ROWS_PER_FILE, self.num_rows // max(1, len(self.temperatures))))

    def temperature(self, row: int) -> float | None:
        """Temperature at which the row was continued; None: it was not."""
        return self.temperatures[row // self.per_file % len(self.temperatures)] if self.temperatures else None


class Row(NamedTuple):
    """One row of a cache."""

    token_ids: Tensor
    """[length] int64."""
    states: Tensor
    """[length, len(boundaries) * hidden] bfloat16."""
    num_prompt: int
    num_tokens: int


def boundary_name(boundary: int) -> str:
    """Folder of a boundary."""
    return "out" if boundary == OUT else f"boundary{boundary}"


class FeatureCache:
    """Token ids and states of rows.

    Raises:
        ConfigError: the directory holds other rows.
    """

    def __init__(self, folder: Path, rows: Rows) -> None:
        self.folder, self.rows = folder, rows
        self._handles: dict[tuple[str, int], Any] = {}
        self.num_files = -(-rows.num_rows // rows.per_file)
        wanted = json.loads(json.dumps(asdict(rows)))
        path = folder / "cache.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            for key, value in wanted.items():
                if found.get(key) != value:
                    raise ConfigError(
                        f"the features in {folder} were made with {key} {found.get(key)}, not {value}: "
                        "name another directory, or delete this one"
                    )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(wanted, indent=1) + "\n", encoding="utf-8")

    def missing(self, boundaries: Sequence[int]) -> int:
        """Files that ``fill`` has to write."""
        names = ["tokens", *map(boundary_name, boundaries)]
        return sum(not self._path(name, index).exists() for name in names for index in range(self.num_files))

    def fill(
        self,
        model: PreTrainedModel,
        documents: Sequence[Sequence[int]],
        boundaries: Sequence[int],
        done: Callable[[int], None] = lambda files: None,
    ) -> None:
        """Writes what is missing; ``done(1)`` after each file."""
        prompts = windows(documents, self.rows.num_rows, self.rows.prompt_tokens, self.rows.seed)
        for index in range(self.num_files):
            if not self._path("tokens", index).exists():
                batch = prompts[index * self.rows.per_file : (index + 1) * self.rows.per_file]
                self._write("tokens", index, continued(model, batch, self.rows, index))
                done(1)
            wanted = [b for b in boundaries if not self._path(boundary_name(b), index).exists()]
            if wanted:
                token_ids = self._open("tokens", index).get_tensor("token_ids")
                for boundary, found in zip(wanted, states(model, token_ids, wanted), strict=True):
                    self._write(boundary_name(boundary), index, {"states": found})
                    done(1)

    def read(self, row: int, boundaries: Sequence[int]) -> Row:
        """One row."""
        index, inner = divmod(row, self.rows.per_file)
        parts = [self._open(boundary_name(b), index).get_slice("states")[inner] for b in boundaries]
        token_ids, num_prompt, num_tokens = self.text(row)
        return Row(token_ids, torch.cat(parts, -1), num_prompt, num_tokens)

    def text(self, row: int) -> tuple[Tensor, int, int]:
        """The token ids of one row, [length] int64, and the lengths of its prompt, and of prompt and continuation."""
        index, inner = divmod(row, self.rows.per_file)
        tokens = self._open("tokens", index)
        num_prompt, num_tokens = (int(tokens.get_tensor(name)[inner]) for name in ("num_prompt", "num_tokens"))
        return tokens.get_slice("token_ids")[inner].long(), num_prompt, num_tokens

    def counts(self, vocab_size: int) -> Tensor:
        """[vocab_size] int64: how often each token stands in the rows."""
        found = torch.zeros(vocab_size, dtype=torch.int64)
        for index in range(self.num_files):
            tokens = self._open("tokens", index)
            ids, ends = tokens.get_tensor("token_ids"), tokens.get_tensor("num_tokens")
            inside = torch.arange(ids.shape[1]) < ends[:, None]
            found += torch.bincount(ids[inside].long(), minlength=vocab_size)
        return found

    def _path(self, name: str, index: int) -> Path:
        return self.folder / name / f"{index:05}.safetensors"

    def _open(self, name: str, index: int) -> Any:
        key = (name, index)
        if key not in self._handles:
            self._handles[key] = safe_open(self._path(name, index), "pt")
        return self._handles[key]

    def _write(self, name: str, index: int, tensors: dict[str, Tensor]) -> None:
        path = self._path(name, index)
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)


@torch.no_grad()
def continued(model: PreTrainedModel, prompts: Sequence[Sequence[int]], rows: Rows, index: int) -> dict[str, Tensor]:
    """``token_ids`` [n, length], the prompts and their continuations, ``num_tokens`` and ``num_prompt`` [n], all int32.

    A batch has one temperature, by its ``index``, and a seed of its own.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):  # padded on the left
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    if rows.temperatures:
        temperature = rows.temperatures[index % len(rows.temperatures)]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(rows.seed + index)
        ids = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=rows.length - width,
            pad_token_id=0,
            **(sampling if temperature > 0 else {"do_sample": False}),
        ).cpu()
    end = model.generation_config.eos_token_id
    end_ids = torch.tensor([] if end is None else end, dtype=torch.long).flatten()
    found = torch.zeros(len(prompts), rows.length, dtype=torch.int32)
    num_tokens = torch.zeros(len(prompts), dtype=torch.int32)
    for i, prompt in enumerate(prompts):
        own = ids[i, width - len(prompt) :]
        ends = torch.isin(own[len(prompt) :], end_ids).nonzero()  # what follows the end is padding
        own = own[: len(prompt) + int(ends[0]) + 1] if len(ends) else own
        found[i, : len(own)] = own
        num_tokens[i] = len(own)
    num_prompt = torch.tensor([*map(len, prompts)], dtype=torch.int32)
    return {"token_ids": found, "num_tokens": num_tokens, "num_prompt": num_prompt}


@torch.no_grad()
def states(model: PreTrainedModel, token_ids: Tensor, boundaries: Sequence[int], batch: int = 16) -> list[Tensor]:
    """States of each boundary, bfloat16 [n, length, hidden]; row n, position P: the state of P given tokens 0..P."""
    parts: list[list[Tensor]] = [[] for _ in boundaries]
    for chunk in torch.split(token_ids.long(), batch):
        output = model(chunk.to(model.device), use_cache=False, output_hidden_states=True, logits_to_keep=1)
        for part, boundary in zip(parts, boundaries, strict=True):
            part.append(output.hidden_states[boundary].to(torch.bfloat16).cpu())  # OUT is the last one
    return [torch.cat(part) for part in parts]
