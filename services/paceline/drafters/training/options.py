"""Options of ``paceline train-head``: values that know what is allowed, and need no tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config.methods import HEADS
from paceline.errors import ConfigError

DRAFT_MODEL = "draft_model"
"""Kind that ``paceline train-draft`` trains."""
CORPUS = "suffix"
"""Kind of ``paceline write-corpus``: texts for suffix decoding, which has no weights."""
KINDS = tuple(method for method, entry in HEADS.items() if entry.make)
"""Kinds that ``paceline train-head`` trains."""
SMALLER: tuple[str, ...] = ("mtp", "eagle3", "peagle")
"""Kinds whose vocabulary may be smaller than the target's."""
BLOCKS: tuple[str, ...] = ("dflash", "dspark", "jetspec")
"""Kinds that draft a block of masks in one pass."""

_WARM_UP = 0.03
_LEAST_PROMPT = 2


@dataclass(frozen=True, slots=True)
class HeadForm:
    """Free choices in a head's form."""

    kind: str
    """One of ``KINDS``, ``DRAFT_MODEL`` or ``CORPUS``."""
    depths: int = 4
    """Consecutive tokens that the head learns to draft. Medusa, MLP, P-EAGLE, block heads and streams: the maximum;
    an exit and a draft model: tokens in the report."""
    boundaries: tuple[int, ...] = ()
    """Boundaries of EAGLE-3 and P-EAGLE, (): 2, L // 2 and L - 3 of L layers; of block heads, (): up to five between 2
    and L - 2; of an exit the one at which it leaves the target, of streams the one at which they enter it."""
    draft_vocab_size: int | None = None
    """Vocabulary of the kinds of ``SMALLER`` and of a draft model: the most frequent tokens; None: all."""
    own_lm_head: bool = False
    """Medusa only: an LM head for each depth, not the target's."""
    inner_dim: int = 0
    """Width of the MLP speculator's state, and of an exit's MLP; 0: the target's."""
    num_layers: int = 2
    """Layers of a block head, and of a draft model, which has the target's first ones."""
    num_anchors: int = 64
    """Blocks of a row that train a block head or streams in an update, each after a random anchor."""
    rank: int = 32
    """Rank of the additions of streams to the target's linear layers, and of the anchor's map; of DSpark's Markov
    chain."""

    def check(self, vocab_size: int) -> None:
        """Raises ConfigError for options that the kind does not have, or that do not fit the target."""
        size = self.draft_vocab_size
        if size is not None:
            if self.kind not in (*SMALLER, DRAFT_MODEL):
                raise ConfigError(
                    f"--draft-vocab-size is for {', '.join(SMALLER)}: {self.kind} has the target's vocabulary"
                )
            if not 0 < size <= vocab_size:
                raise ConfigError(
                    f"--draft-vocab-size is {size}: it must be from 1 to {vocab_size}, the target's tokens"
                )
        if self.own_lm_head and self.kind != "medusa":
            raise ConfigError(f"--own-lm-head is for medusa, not for {self.kind}")
        if self.inner_dim and self.kind not in ("mlp_speculator", "early_exit"):
            raise ConfigError(f"--inner-dim is for mlp_speculator and early_exit, not for {self.kind}")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Settings that make a training what it is: an interrupted one continues with the same, or not at all."""

    steps: int = 4000
    batch_rows: int = 1
    learning_rate: float = 1e-3
    seed: int = 0

    def scale(self, step: int) -> float:
        """Part of the learning rate at a step: a warm-up over the first 3 %, then a cosine to zero."""
        progress = step / max(1, self.steps)
        if progress < _WARM_UP:
            return (progress + 1 / max(1, self.steps)) / (_WARM_UP + 1 / max(1, self.steps))
        return 0.5 * (1.0 + math.cos(math.pi * (progress - _WARM_UP) / (1.0 - _WARM_UP)))


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Options of ``paceline train-head``."""

    form: HeadForm
    target: str
    data: Sequence[Path]
    out: Path
    schedule: Schedule
    held_out: Sequence[Path] = ()
    """Files or folders of held-out documents; (): a random twentieth of the data."""
    cache: Path | None = None
    """Folder of the features; None: ``features`` in ``out``."""
    num_tokens: int = 262_144
    length: int = 256
    """Tokens of a row."""
    prompt_tokens: int = 64
    chats: int = 0
    """Prompts that the target writes itself by its chat template; 0: the data are continued."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """The target continues the data at these; (): the data are its own text already."""
    held_out_rows: int = 128
    device: str = "auto"
    dtype: str = "auto"
    compare: str | None = None
    """A draft model whose figures are reported with the head's."""
    trust_remote_code: bool = False

    def check(self) -> None:
        """Raises ConfigError for values that no training can have."""
        positive = {
            "--depths": self.form.depths,
            "--layers": self.form.num_layers,
            "--anchors": self.form.num_anchors,
            "--rank": self.form.rank,
            "--steps": self.schedule.steps,
            "--batch-rows": self.schedule.batch_rows,
            "--tokens": self.num_tokens,
            "--held-out-rows": self.held_out_rows,
            "--learning-rate": self.schedule.learning_rate,
        }
        for flag, value in positive.items():
            if not value > 0:
                raise ConfigError(f"{flag} is {value:g}: it must be more than 0")
        if self.held_out_rows < 2:
            raise ConfigError("--held-out-rows is 1: it must be at least 2, one greedy and one at temperature 1")
        if self.prompt_tokens < _LEAST_PROMPT:
            raise ConfigError(f"--prompt-tokens is {self.prompt_tokens}: it must be at least {_LEAST_PROMPT}")
        least = self.prompt_tokens + self.form.depths + 1
        if self.length <= least:
            raise ConfigError(
                f"--length is {self.length}: it must be more than {least}, the prompt, the depths and one token"
            )
        if any(not temperature >= 0 for temperature in self.temperatures):
            raise ConfigError(f"--temperatures is {min(self.temperatures):g}: a temperature must be at least 0")
        if self.chats < 0 or self.chats == 1:
            raise ConfigError(f"--chats is {self.chats}: at least 2, one of them is held out")
        if bool(self.chats) == bool(self.data):
            raise ConfigError(
                f"--data is {'given with' if self.data else 'missing, as is'} --chats: name files or folders with "
                "text for the target to continue, or how many chats it shall write itself"
            )
        if self.chats and (self.held_out or not self.temperatures):
            key = "held-out" if self.held_out else "temperatures"
            raise ConfigError(f"--{key} is given with --chats: the target answers chats that nobody has written yet")
