"""Train the embedded pair: a small target language model and a draft distilled from it.

The corpus is the source of the CPython standard library of the interpreter that runs this script (or of
`--stdlib DIR`). Each stage reads what the one before it left in `--work` and may be interrupted and repeated;
the training stages continue from their last checkpoint:

    corpus      choose the files, hold out a seeded 4 %, record the list
    tokenizer   byte-level BPE of 4,096 on the training files; encode both parts
    target      train the target on next-token cross-entropy
    draft       the same for the draft (a short start; the next stage does the work)
    distill     train the draft on the target's full distribution, on the corpus and on the target's own text
    publish     write both checkpoints in bfloat16 to `--publish-to`

Training is data-parallel over `--processes` processes of one torch thread each: a multi-threaded region
stalls whenever anything else wants one of its cores. The schedule follows the clock (`--minutes`), so the
learning rate reaches zero at the end whatever else the machine is doing.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import os
import random
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 4096
END_OF_TEXT = "<|endoftext|>"
HELD_OUT_FRACTION = 0.04
SEED = 20260
# Tests are another kind of text (assertions, tables); encodings and pydoc_data are data tables.
EXCLUDED_FOLDERS = {"site-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
EXCLUDED_FOLDERS |= {"_vendor", "_distutils"}  # in packages: the work of others, copies of the standard library
EXCLUDED_PREFIXES = ("config-", "lib2to3/pgen2/data")
MIN_FILE_BYTES = 200


@dataclass(frozen=True)
class Shape:
    """The dimensions in which the two models differ; heads are 64 wide."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int


TARGET_SHAPE = Shape(hidden_size=384, num_layers=8, num_heads=6, num_kv_heads=2, intermediate_size=1024)
DRAFT_SHAPE = Shape(hidden_size=192, num_layers=2, num_heads=3, num_kv_heads=1, intermediate_size=512)

TOP = 128
CE_WEIGHT = 0.1
SAMPLED_SHARE = 0.2
PLAIN_SHARE = 0.3


Options = argparse.Namespace
"""The command line; ``bfloat16``: products in it are twice as fast as in float32 with avx512_bf16, else a tenth."""


def autocast(options: Options) -> AbstractContextManager[object]:
    """Products in bfloat16 where they are fast."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.bfloat16)


# ---------------------------------------------------------------------------------------------------- corpus


def library_files(stdlib: Path) -> list[str]:
    """Relative paths of the library's own `.py` files, sorted."""
    names = []
    for path in sorted(stdlib.rglob("*.py")):
        relative = path.relative_to(stdlib)
        if EXCLUDED_FOLDERS.intersection(relative.parts) or str(relative).startswith(EXCLUDED_PREFIXES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if len(text) >= MIN_FILE_BYTES:
            names.append(relative.as_posix())
    return names


def corpus(options: Options) -> None:
    """Write `corpus.json`: `train` and `held_out`, relative paths under `stdlib`.

    Their texts are in `train.jsonl` and `held_out.jsonl` besides, as `paceline train-head` reads them.
    """
    names = library_files(options.stdlib)
    order = random.Random(SEED).sample(names, len(names))
    num_held_out = round(HELD_OUT_FRACTION * len(names))
    held_out, train = sorted(order[:num_held_out]), order[num_held_out:]
    record = {"source": f"CPython {sys.version.split()[0]} standard library", "stdlib": str(options.stdlib)}
    record |= {"train": train, "held_out": held_out}
    (options.work / "corpus.json").write_text(json.dumps(record, indent=1))
    for part in ("train", "held_out"):  # for `paceline train-head`
        lines = [json.dumps({"text": text}) + "\n" for text in read_texts(options, part)]
        (options.work / f"{part}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"{len(train)} training files, {len(held_out)} held out")


def read_texts(options: Options, part: str) -> list[str]:
    """Texts of one part of the corpus: `train` or `held_out`."""
    record = json.loads((options.work / "corpus.json").read_text())
    return [(Path(record["stdlib"]) / name).read_text(encoding="utf-8") for name in record[part]]


def trained_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE of `VOCAB` tokens for `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    )
    tokens = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **tokens)


def tokenizer(options: Options) -> None:
    """Train the BPE, save it, encode both parts to `<part>.u16`."""
    trained_tokenizer(read_texts(options, "train")).save_pretrained(options.work / "tokenizer")
    bpe = PreTrainedTokenizerFast.from_pretrained(options.work / "tokenizer").backend_tokenizer
    for part in ("train", "held_out"):
        ids: list[int] = []
        for text, encoding in zip(
            texts := read_texts(options, part), bpe.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            assert bpe.decode(encoding.ids, skip_special_tokens=False) == text
            ids.append(0)
            ids.extend(encoding.ids)
        np.array(ids, dtype=np.uint16).tofile(options.work / f"{part}.u16")
        print(f"{part}: {len(ids)} tokens in {len(texts)} files")


def load_tokens(work: Path, name: str) -> Tensor:
    """All tokens of `<name>.u16`, int64 [num_tokens]."""
    return torch.from_numpy(np.fromfile(work / f"{name}.u16", dtype=np.uint16).astype(np.int64))


def windows(tokens: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """`count` random windows of the packed stream, [count, length + 1]."""
    starts = torch.randint(len(tokens) - length - 1, (count, 1), generator=generator)
    return tokens[starts + torch.arange(length + 1)]


def mixed_rows(tokens: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """All of a text in rows, in random order, [n, length + 1]."""
    rows = tokens.unfold(0, length + 1, length)
    return rows[torch.randperm(len(rows), generator=generator)]


# ------------------------------------------------------------------------------------------------- training


def build(shape: Shape) -> LlamaForCausalLM:
    """A freshly initialised model; the projections that write to the residual stream start at zero."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def sequence_length(progress: float) -> int:
    """Short windows first (cheap), then long ones, so that every position up to 1,024 is trained."""
    return 256 if progress < 0.6 else 512 if progress < 0.85 else 1024


def learning_rate_scale(progress: float) -> float:
    """Part of `--learning-rate` to use: a warm-up over the first 3 % of the time, then a cosine to zero."""
    warm_up = 0.03
    if progress < warm_up:
        return 0.05 + 0.95 * progress / warm_up
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - warm_up) / (1.0 - warm_up))))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring all singular values of `matrix` near 1: five Newton-Schulz steps, multiplied in `dtype`."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` (Nesterov momentum 0.95, decay 0.1, steps as long as AdamW's) in a dtype of choice.

    That one always multiplies in bfloat16: over a minute per step of the target on a CPU without such instructions.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, dtype: torch.dtype) -> None:
        super().__init__(matrices, {"lr": lr})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"].lerp_(p.grad, 0.05)
                update = orthogonal(p.grad.lerp(momentum, 0.95), self.dtype)
                p.mul_(1.0 - 0.1 * rate).add_(update, alpha=-0.2 * math.sqrt(max(p.shape)) * rate)


Batch = TypeVar("Batch")


class Trainer:
    """Data-parallel training of one model: `loss_of(model, window)` on random windows until the time is up.

    Gradients are summed as one flat buffer. Matrices inside the layers are updated by Muon, each by one rank
    (round robin) and then broadcast; embeddings and norms by AdamW on every rank alike.
    """

    def __init__(self, name: str, model: LlamaForCausalLM, options: Options, rank: int) -> None:
        self.name, self.model, self.options, self.rank = name, model, options, rank
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.flat_grad = torch.zeros(sum(p.numel() for p in self.parameters))
        offset = 0
        for p in self.parameters:
            p.grad = self.flat_grad[offset : offset + p.numel()].view_as(p)
            offset += p.numel()
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers" in n]
        others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layers" in n)]
        self.owned = [matrices[r :: options.processes] for r in range(options.processes)]
        rate = options.learning_rate
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(self.owned[rank], lr=rate, dtype=torch.bfloat16 if options.bfloat16 else torch.float32),
            torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.step, self.seconds, self.num_tokens = 0, 0.0, 0
        self.path = options.work / f"{name}.rank{rank}.pt"

    def save(self) -> None:
        """Checkpoint this rank's state atomically; rank 0 also writes the model for others to load."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "counters": (self.step, self.seconds, self.num_tokens),
        }
        temporary = self.path.with_suffix(f".step{self.step}")
        torch.save(state, temporary)
        dist.barrier()  # both ranks hold the same step before either replaces its old file
        temporary.replace(self.path)
        if self.rank == 0:
            save_model(self.model, self.options.work / self.name)

    def resume(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        if self.path.exists():
            state = torch.load(self.path)
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.seconds, self.num_tokens = state["counters"]

    def update(self, scale: float) -> None:
        dist.all_reduce(self.flat_grad)
        self.flat_grad /= self.options.processes * self.options.accumulate
        norm = self.flat_grad.norm()
        self.flat_grad *= torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.options.learning_rate * scale
            optimizer.step()
        for owner, matrices in enumerate(self.owned):
            flat = torch.cat([p.data.flatten() for p in matrices])
            dist.broadcast(flat, src=owner)
            for p, piece in zip(matrices, torch.split(flat, [p.numel() for p in matrices]), strict=True):
                p.data.copy_(piece.view_as(p))
        self.flat_grad.zero_()

    def train(
        self,
        loss_of: Callable[[LlamaForCausalLM, Batch], Tensor],
        draw: Callable[[int, int, torch.Generator], Batch],
        evaluate: Callable[[], float],
    ) -> None:
        """`draw(count, length, generator)` gives `count` windows of text; `evaluate()` the held-out loss."""
        options = self.options
        self.resume()
        limit = 60.0 * options.minutes
        last = saved = time.monotonic()
        losses: list[float] = []
        self.model.train()
        while True:
            now = time.monotonic()
            clock = torch.tensor([self.seconds + now - last, now - saved])
            dist.broadcast(clock, src=0)  # rank 0's clock decides, so that all ranks take the same branch
            self.seconds, last = float(clock[0]), now
            progress = self.seconds / limit
            if clock[1] > 150 or progress >= 1.0:
                self.save()
                saved = time.monotonic()
            if progress >= 1.0:
                break
            length = sequence_length(progress)
            count = max(1, options.micro_tokens // length)
            seed = self.step * options.processes + self.rank
            generator = torch.Generator().manual_seed(SEED + seed)
            for _ in range(options.accumulate):
                batch = draw(count, length, generator)
                with autocast(options):
                    loss = loss_of(self.model, batch)
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(float(loss.detach()))
                self.num_tokens += count * length * options.processes
            self.update(learning_rate_scale(progress))
            self.step += 1
            if self.rank == 0 and self.step % 10 == 0:
                line = f"{self.name} step {self.step} {self.seconds / 60:.1f} min"
                line += f" {self.num_tokens / 1e6:.2f} Mtok loss {statistics.mean(losses):.3f}"
                if self.step % 50 == 0:
                    line += f" held-out {evaluate():.3f}"
                print(line, flush=True)
                losses.clear()
        if self.rank == 0:
            print(f"{self.name} finished: held-out loss {evaluate():.4f}", flush=True)
        dist.barrier()


def save_model(model: LlamaForCausalLM, directory: Path) -> None:
    """Write a bfloat16 copy with the tokenizer beside it, as `from_pretrained` reads it."""
    shipped = copy.deepcopy(model)
    shipped.bfloat16()
    shipped.save_pretrained(directory)
    for file in (directory.parent / "tokenizer").iterdir():
        shutil.copy(file, directory / file.name)


def logits_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Logits without a cache, [batch, length, vocab]."""
    return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def cross_entropy(model: LlamaForCausalLM, window: Tensor) -> Tensor:
    """Mean next-token loss in nats on windows [batch, length + 1]."""
    logits = logits_of(model, window[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())


class Scored(NamedTuple):
    """Text with the target's next-token distribution at every position: the likeliest tokens and the rest.

    Scoring once lets the draft pass over the text several times at a quarter of the cost of asking the target
    each time. `TOP` tokens hold nearly all probability; what is left is matched as one event.
    """

    ids: Tensor  # [rows, length + 1], int64
    top_ids: Tensor  # [rows, length, TOP], int16
    top_log: Tensor  # [rows, length, TOP], float16 log-probabilities

    def draw(self, num_tokens: int, length: int, generator: torch.Generator) -> Scored:
        """Random rows, about `num_tokens` in all, each cropped at random to `length` if it is longer."""
        length = min(length, self.top_ids.shape[1])
        rows = torch.randint(len(self.ids), (max(1, num_tokens // length),), generator=generator)
        start = int(torch.randint(self.top_ids.shape[1] - length + 1, (), generator=generator))
        end = start + length
        return Scored(self.ids[rows, start : end + 1], self.top_ids[rows, start:end], self.top_log[rows, start:end])


@torch.no_grad()
def score(teacher: LlamaForCausalLM, rows: Tensor, seconds: float) -> Scored:
    """Score `rows` [n, length + 1] for at most `seconds`; the rows that were not reached are left out."""
    end = time.monotonic() + seconds
    per_pass = max(1, 2048 // rows.shape[1])
    top_ids, top_log = [], []
    for part in torch.split(rows, per_pass):
        top = logits_of(teacher, part[:, :-1]).float().log_softmax(-1).topk(TOP, dim=-1)
        top_ids.append(top.indices.to(torch.int16))
        top_log.append(top.values.to(torch.float16))
        if time.monotonic() > end:
            break
    scored = torch.cat(top_ids)
    return Scored(rows[: len(scored)].contiguous(), scored, torch.cat(top_log))


def plain(window: Tensor) -> Scored:
    """Text that the target has not scored: all probability on the token that follows, [batch, length + 1]."""
    top_ids = window[:, 1:, None].to(torch.int16)
    return Scored(window, top_ids, torch.zeros_like(top_ids, dtype=torch.float16))


def distillation_loss(student: LlamaForCausalLM, batch: Scored) -> Tensor:
    """Forward KL from the target's distribution, plus a little cross-entropy on the text itself, in nats."""
    log_q = F.log_softmax(logits_of(student, batch.ids[:, :-1]).float(), dim=-1)
    log_p = batch.top_log.float()
    p, top_log_q = log_p.exp(), log_q.gather(-1, batch.top_ids.long())
    rest_p = (1.0 - p.sum(-1)).clamp(min=1e-6)
    rest_q = (1.0 - top_log_q.exp().sum(-1)).clamp(min=1e-6)
    divergence = (p * (log_p - top_log_q)).sum(-1) + rest_p * (rest_p / rest_q).log()
    return divergence.mean() + CE_WEIGHT * F.nll_loss(log_q.flatten(0, 1), batch.ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: Tensor) -> float:
    """Mean cross-entropy in nats per token on 16 fixed windows of 512 held-out tokens."""
    model.train(False)
    window = windows(tokens, 16, 512, torch.Generator().manual_seed(1))
    losses = [float(cross_entropy(model, part)) for part in torch.split(window, 4)]
    model.train()
    return statistics.mean(losses)


@torch.no_grad()
def sample_continuations(model: LlamaForCausalLM, prompts: Tensor, num_new: int, temperatures: Tensor) -> Tensor:
    """Continue `prompts` [batch, p] by `num_new` tokens; row i at `temperatures[i]`, 0 meaning greedy."""
    rows, cache, step = prompts, None, prompts
    for _ in range(num_new):
        output = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = output.past_key_values, output.logits[:, -1].float()
        hot = torch.softmax(logits / temperatures.clamp(min=1e-3)[:, None], dim=-1)
        sampled = torch.multinomial(hot, 1)
        step = torch.where(temperatures[:, None] > 0, sampled, logits.argmax(-1, keepdim=True))
        rows = torch.cat([rows, step], dim=1)
    return rows


def sampled_windows(teacher: LlamaForCausalLM, tokens: Tensor, options: Options, rank: int) -> Iterator[Tensor]:
    """Batches of the teacher's own text, [64, 257], half of it greedy, after 64 tokens of the corpus."""
    generator = torch.Generator().manual_seed(SEED + 7919 * (rank + 1))
    torch.manual_seed(SEED + rank)
    temperatures = torch.tensor([0.0, 0.0, 0.7, 1.0]).repeat(16)
    quick = copy.deepcopy(teacher)
    if options.bfloat16:
        quick.bfloat16()
    while True:
        yield sample_continuations(quick, windows(tokens, 64, 63, generator), 193, temperatures)


def worker(rank: int, options: Options) -> None:
    """One training process: one thread, low priority."""
    os.nice(10)
    torch.set_num_threads(1)
    work = options.work
    rendezvous = f"file://{work / options.stage}.rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.processes)
    text, held_out = load_tokens(work, "train"), load_tokens(work, "held_out")
    if options.stage in ("target", "draft"):
        model = build(TARGET_SHAPE if options.stage == "target" else DRAFT_SHAPE)
        trainer = Trainer(options.stage, model, options, rank)
        trainer.train(cross_entropy, functools.partial(windows, text), lambda: held_out_loss(model, held_out))
    else:
        distill(rank, options, text, held_out)
    dist.destroy_process_group()


def distill(rank: int, options: Options, corpus_text: Tensor, held_out: Tensor) -> None:
    """Sample text from the target, score that and the corpus, then train the draft on both.

    Sampling and scoring come before the training and take their fractions of `minutes` in addition.
    """
    teacher = LlamaForCausalLM.from_pretrained(options.work / "target", dtype=torch.float32)
    path = options.work / f"scored.rank{rank}.pt"
    if not path.exists():
        batches, end = [], time.monotonic() + 60.0 * options.minutes * options.sampled_fraction
        for batch in sampled_windows(teacher, corpus_text, options, rank):
            batches.append(batch)
            if time.monotonic() > end:
                break
        limit = 60.0 * options.minutes * options.scored_fraction
        with autocast(options):
            own = score(teacher, torch.cat(batches), limit)
        rows = mixed_rows(corpus_text, 1024, torch.Generator().manual_seed(SEED))
        with autocast(options):
            text = score(teacher, rows[rank :: options.processes], limit)
        torch.save((tuple(own), tuple(text)), path)
    own, text = (Scored(*parts) for parts in torch.load(path))
    print(f"rank {rank}: {own.ids.numel()} sampled, {text.ids.numel()} corpus tokens", flush=True)

    def draw(count: int, length: int, generator: torch.Generator) -> Scored:
        """The target's own text, the scored part of the corpus, or all of the corpus with its plain tokens."""
        kind = float(torch.rand((), generator=generator))
        if kind < PLAIN_SHARE:
            return plain(windows(corpus_text, options.micro_tokens // 512, 512, generator))
        source = own if kind < PLAIN_SHARE + SAMPLED_SHARE else text
        return source.draw(options.micro_tokens, max(512, length), generator)

    student = build(DRAFT_SHAPE)
    if (options.work / "draft").exists():
        student = LlamaForCausalLM.from_pretrained(options.work / "draft", dtype=torch.float32)
    trainer = Trainer("distill", student, options, rank)
    trainer.train(distillation_loss, draw, lambda: held_out_loss(student, held_out))


def launch(options: Options) -> None:
    """Run the training stage in `options.processes` fresh processes and wait for them."""
    (options.work / f"{options.stage}.rendezvous").unlink(missing_ok=True)
    spawn(worker, args=(options,), nprocs=options.processes)  # type: ignore[no-untyped-call]


# -------------------------------------------------------------------------------------------------- publish


def publish(options: Options) -> None:
    """Copy the trained pair and the list of held-out files into the package."""
    draft = "distill" if (options.work / "distill").exists() else "draft"
    for name, source in (("target", "target"), ("draft", draft)):
        destination = options.publish_to / name
        staging = options.publish_to / f".{name}.new"
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(options.work / source, staging)
        for file in staging.iterdir():
            file.chmod(0o644)
        shutil.rmtree(destination, ignore_errors=True)
        staging.rename(destination)
    record = json.loads((options.work / "corpus.json").read_text())
    held_out = {"source": record["source"], "held_out": record["held_out"]}
    (options.publish_to / "held_out.json").write_text(json.dumps(held_out, indent=1) + "\n")


def parse_options(arguments: list[str]) -> Options:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    stages = ["corpus", "tokenizer", "target", "draft", "distill", "publish"]
    parser.add_argument("stage", choices=stages)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "paceline-train")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--publish-to", type=Path, default=here.parent / "services/paceline/embedded")
    parser.add_argument("--minutes", type=float, default=50.0, help="training time of this stage")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--micro-tokens", type=int, default=2048, help="tokens per process and backward pass")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per update")
    parser.add_argument("--sampled-fraction", type=float, default=0.3, help="of --minutes, before distill")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of products")
    parser.add_argument("--scored-fraction", type=float, default=0.5, help="of --minutes, before distill")
    options, cpu = parser.parse_args(arguments), Path("/proc/cpuinfo")
    fast = cpu.exists() and "avx512_bf16" in cpu.read_text()
    options.bfloat16 = fast if options.dtype == "auto" else options.dtype == "bfloat16"
    return options


def main() -> None:
    options = parse_options(sys.argv[1:])
    options.work.mkdir(parents=True, exist_ok=True)
    {"corpus": corpus, "tokenizer": tokenizer, "publish": publish}.get(options.stage, launch)(options)


if __name__ == "__main__":
    main()
