"""One training of a head, from its options to its files and its report."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.checkpoint.chat import load_chat
from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import require_same_tokens
from paceline.config import ModelOptions
from paceline.drafters.training.chats import written_chats
from paceline.drafters.training.data import encode, read_documents
from paceline.drafters.training.export import write_head
from paceline.drafters.training.features import OUT, FeatureCache, Rows
from paceline.drafters.training.kinds import TrainableHead, boundaries_of, make_head, teacher_of
from paceline.drafters.training.options import TrainingOptions
from paceline.drafters.training.replay import Agreement, Unroll, agreement, joined
from paceline.drafters.training.trainer import CHECKPOINT, Trainer
from paceline.errors import ConfigError
from paceline.model.device import occupy, resolve
from paceline.model.loading import load_pretrained

_HELD_OUT_SHARE = 0.05
_HELD_OUT_SEED = 1
_BATCH = 8
"""Held-out rows of one pass."""


class Progress(Protocol):
    """Shows how far a stage is."""

    def __call__(self, stage: str, done: int, total: int, note: str = "") -> None: ...


@dataclass(frozen=True, slots=True)
class Figures:
    """Held-out acceptance of one drafter."""

    name: str
    greedy: Agreement
    sampled: Agreement


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of a training."""

    figures: list[Figures]
    """Held-out figures of the head, and of the draft model to compare with."""
    unigram: float
    """Share of the held-out greedy tokens that the most frequent token is."""
    depths: int
    num_parameters: int
    num_steps: int

    def as_json(self) -> dict[str, Any]:
        """Content of ``report.json``."""
        return {
            "most_frequent_token": self.unigram,
            "parameters": self.num_parameters,
            "steps": self.num_steps,
            **{
                each.name: {"greedy": self._of(each.greedy), "temperature_1": self._of(each.sampled)}
                for each in self.figures
            },
        }

    def _of(self, found: Agreement) -> dict[str, Any]:
        return {
            "agreement_by_depth": found.by_depth(),
            "agreement_given_prefix": found.given_prefix(),
            f"accepted_per_round_of_{self.depths}": found.accepted_per_round(self.depths),
            "standard_error": found.standard_error(self.depths),
        }


@dataclass(frozen=True, slots=True)
class Source:
    """A target in memory, and the texts that it continues."""

    checkpoint: Checkpoint
    target: PreTrainedModel
    dtype: torch.dtype
    folder: Path
    """Folder of the features."""
    train: list[tuple[int, ...]]
    """Token ids of the training texts, or of the prompts of chats."""
    held_out: list[tuple[int, ...]]

    def features(
        self, options: TrainingOptions, boundaries: Sequence[int], progress: Progress
    ) -> tuple[FeatureCache, FeatureCache]:
        """Continuations of the training and the held-out texts with the states at ``boundaries``, made where they are
        missing."""
        train, held_out = (
            _features(stage, self.folder / name, self.target, texts, options, boundaries, progress)
            for stage, name, texts in (
                ("features", "train", self.train),
                ("held-out features", "held_out", self.held_out),
            )
        )
        return train, held_out


def open_source(options: TrainingOptions, progress: Progress) -> Source:
    """Loads a target and reads its texts, or has it write chats. Raises ConfigError."""
    options.check()
    checkpoint = Checkpoint.open(options.target, options.trust_remote_code)
    options.form.check(checkpoint.vocab_size)
    if options.length > checkpoint.max_model_len:
        raise ConfigError(f"--length is {options.length}: the target takes at most {checkpoint.max_model_len} tokens")
    documents = None if options.chats else _documents(options, checkpoint)
    running = ModelOptions.model_validate({"device": options.device, "dtype": options.dtype})
    device, dtype = resolve(running, occupy(running))
    target = load_pretrained(checkpoint, dtype, device).eval().requires_grad_(False)
    folder = options.cache or options.out / "features"
    train, held_out = documents or _chats(options, target, folder, progress)
    return Source(checkpoint, target, dtype, folder, train, held_out)


def train_head(options: TrainingOptions, progress: Progress) -> Report:
    """Trains a head, or continues an interrupted training, writes it to ``options.out`` and measures it.

    Raises:
        ConfigError: what was asked for cannot be trained.
    """
    source = open_source(options, progress)
    target, dtype = source.target, source.dtype
    boundaries = boundaries_of(options.form, target.config.get_text_config().num_hidden_layers)
    teacher = teacher_of(target)
    parts = source.features(options, (*boundaries, *(() if OUT in boundaries else (OUT,))), progress)
    require_teacher(target, teacher, parts[0])
    progress("first weights", 0, 1)
    resumed = {"num_fitted": 0} if (options.out / CHECKPOINT).exists() else {}  # they are replaced
    head = make_head(options.form, target, parts[0], **resumed, tokenizer=source.checkpoint.tokenizer)
    progress("first weights", 1, 1)
    trainer = Trainer(head, teacher, parts[0], options.schedule, options.out, bfloat16=dtype == torch.bfloat16)
    steps = options.schedule.steps
    progress("training", trainer.step, steps)
    trainer.run(lambda step, loss: progress("training", step, steps, f"loss {loss:.3f}"))
    write_head(head, options.out, options.target)
    report = evaluate(head, teacher, parts[1], options, steps, progress)
    (options.out / "report.json").write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    return report


def _chats(
    options: TrainingOptions, target: PreTrainedModel, folder: Path, progress: Progress
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Prompts that the target writes, for the training and held out."""
    chat = load_chat(options.target, trust_remote_code=options.trust_remote_code)
    if chat is None:
        raise ConfigError(
            f"--chats is {options.chats}: the target {options.target!r} has no chat template, name --data"
        )
    progress("chats", 0, options.chats)
    prompts = written_chats(
        target,
        chat,
        options.chats,
        options.prompt_tokens,
        options.schedule.seed,
        folder / "chats.jsonl",
        lambda count: progress("chats", count, options.chats),
    )
    count = max(1, round(_HELD_OUT_SHARE * len(prompts)))
    return prompts[count:], prompts[:count]


def _documents(options: TrainingOptions, checkpoint: Checkpoint) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Token ids of the training and the held-out documents; what is held out is not trained on."""
    texts = read_documents(options.data)
    if options.held_out:
        others = read_documents(options.held_out, "--held-out")
        known = set(others)
        texts = [text for text in texts if text not in known]
    else:
        random.Random(_HELD_OUT_SEED).shuffle(texts)
        count = max(1, round(_HELD_OUT_SHARE * len(texts)))
        others, texts = texts[:count], texts[count:]
    tokenizer = checkpoint.tokenizer
    train, held_out = encode(tokenizer, texts), encode(tokenizer, others)
    if not train or not held_out:
        raise ConfigError("--data holds one document: name a second one, or --held-out")
    largest = max(max(ids) for ids in (*train, *held_out))
    if largest >= checkpoint.vocab_size:
        raise ConfigError(
            f"the tokenizer of {options.target!r} gives token {largest}, its model has {checkpoint.vocab_size} tokens"
        )
    return train, held_out


def _features(
    stage: str,
    folder: Path,
    target: PreTrainedModel,
    documents: list[tuple[int, ...]],
    options: TrainingOptions,
    boundaries: Sequence[int],
    progress: Progress,
) -> FeatureCache:
    """The features of some documents, made as far as they are missing. Held-out text is greedy and drawn, in turn."""
    held_out = stage != "features"
    rows = Rows(
        target=options.target,
        data=_digest(documents),
        num_rows=options.held_out_rows if held_out else -(-options.num_tokens // options.length),
        length=options.length,
        prompt_tokens=options.length if not (held_out or options.temperatures) else options.prompt_tokens,
        temperatures=(0.0, 1.0) if held_out else options.temperatures,
        seed=options.schedule.seed + held_out,
    )
    cache = FeatureCache(folder, rows)
    total = (1 + len(boundaries)) * cache.num_files
    done = total - cache.missing(boundaries)
    progress(stage, done, total)

    def more(files: int) -> None:
        nonlocal done
        done += files
        progress(stage, done, total)

    cache.fill(target, documents, boundaries, more)
    return cache


def _digest(documents: Sequence[Sequence[int]]) -> str:
    found = hashlib.sha256()
    for ids in documents:
        found.update(b"%d:" % len(ids) + b",".join(b"%d" % token for token in ids))
    return found.hexdigest()[:16]


# -- the target's own distribution ---------------------------------------------------------------------------------


@torch.no_grad()
def require_teacher(target: PreTrainedModel, teacher: Callable[[Tensor], Tensor], cache: FeatureCache) -> None:
    """Raises ConfigError if the target's logits are something else of its last state than ``teacher`` says."""
    row = cache.read(0, (OUT,))
    token_ids = row.token_ids[None, : row.num_tokens].to(target.device)
    own = target(token_ids, use_cache=False).logits.float().softmax(-1)
    ours = teacher(row.states[None, : row.num_tokens].to(target.device)).float().softmax(-1)
    if float((own - ours).abs().sum(-1).mean()) > 0.1:  # half the sum is the total variation
        raise ConfigError(
            f"the logits of {type(target).__name__} differ from its LM head's on its last state: "
            "heads for it cannot be trained"
        )


# -- held out ------------------------------------------------------------------------------------------------------


def evaluate(
    head: TrainableHead,
    teacher: Callable[[Tensor], Tensor],
    cache: FeatureCache,
    options: TrainingOptions,
    num_steps: int,
    progress: Progress,
) -> Report:
    """Replays rounds of the head, and of the draft model to compare with, on held-out continuations."""
    depths = options.form.depths
    drafters: list[tuple[str, Unroll, Tensor | None, int]] = [
        (options.form.kind, head.module.eval().unroll, head.module.target_ids, depths if head.module.exits else 0)
    ]
    if options.compare is not None:
        other = Checkpoint.open(options.compare, options.trust_remote_code)
        require_same_tokens(Checkpoint.open(options.target, options.trust_remote_code).tokenizer, other.tokenizer)
        model = load_pretrained(other, head.target.dtype, head.target.device).eval()
        drafters.append((f"draft {options.compare}", unroll_of(model), None, 0))
    num_rows, done = cache.rows.num_rows, 0
    found: list[dict[bool, list[Agreement]]] = [{True: [], False: []} for _ in drafters]
    counts = torch.zeros(1, dtype=torch.int64)
    progress("replay", 0, num_rows)
    for start, end in batches(cache.rows, _BATCH):
        rows = [cache.read(row, (*head.boundaries, OUT)) for row in range(start, end)]
        greedy = cache.rows.temperature(start) == 0
        token_ids = torch.stack([row.token_ids for row in rows]).to(head.target.device)
        both = torch.stack([row.states for row in rows]).to(head.target.device)
        size = both.shape[-1] // (len(head.boundaries) + 1)
        num_prompt, num_tokens = (
            torch.tensor([getattr(row, name) for row in rows]) for name in ("num_prompt", "num_tokens")
        )
        with torch.no_grad():
            log_p = teacher(both[..., -size:]).float().log_softmax(-1)
        for parts, (_, unroll, target_ids, states_ahead) in zip(found, drafters, strict=True):
            one = agreement(
                unroll,
                log_p,
                token_ids,
                both[..., :-size].float(),
                num_prompt,
                num_tokens,
                depths,
                greedy=greedy,
                target_ids=target_ids,
                states_ahead=states_ahead,
            )
            parts[greedy].append(one)
        if greedy:
            new = torch.cat([row.token_ids[row.num_prompt : row.num_tokens] for row in rows])
            counts = torch.bincount(new, minlength=log_p.shape[-1]) + counts
        done += len(rows)
        progress("replay", done, num_rows)
    figures = [
        Figures(name, joined(parts[True]), joined(parts[False]))
        for parts, (name, *_) in zip(found, drafters, strict=True)
    ]
    return Report(
        figures=figures,
        unigram=float(counts.max() / counts.sum()),
        depths=depths,
        num_parameters=head.num_parameters,
        num_steps=num_steps,
    )


def batches(rows: Rows, size: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of at most ``size`` rows of one file, so of one temperature."""
    for first in range(0, rows.num_rows, rows.per_file):
        last = min(first + rows.per_file, rows.num_rows)
        for start in range(first, last, size):
            yield start, min(start + size, last)


def unroll_of(model: PreTrainedModel) -> Unroll:
    """A draft model as a drafter of the replay: at depth d its prediction after the token at t + 1 + d."""

    def unroll(states: Tensor, token_ids: Tensor, depths: int) -> Any:
        num_rows = states.shape[1]
        logits = model(token_ids[:, : num_rows + depths], use_cache=False).logits
        for depth in range(depths):
            yield logits[:, 1 + depth : 1 + depth + num_rows]

    return unroll
