"""Does a family do with us what it does in transformers? What the tests assert, and the table in docs/families.md.

    python -m tests.model.conformance RESULTS.jsonl      examines what RESULTS does not hold yet, writes the table

Of each family a tiny random checkpoint, whose window, if it has one, is a fraction of the text:

- float32: prefill in chunks, then greedy decoding over three KV pages, gives the tokens of transformers' ``generate``
  and its logits within FP32_LIMIT; so do proposals that are verified several tokens at a time. Tied and untied.
- Two ranks give the tokens and logits of one process, within the same limit.
  Of delta layers the logits are those of transformers' one-by-one form.
- bfloat16: the logits of the same text are as near to those of transformers in float32 as transformers' own in bfloat16
  are, by one process and by two ranks, see BF16_LIMIT.

Differences are the largest of a row, relative to the largest logit of all. With experts a rounding can choose another
expert, so in bfloat16 one row in five may be anywhere.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tests.model.families import Case, cases, checkpoint, class_name, family_names
from tests.model.parallel.ranks import Ranks, led, load
from tests.support.models import chunk, prompt
from torch import Tensor
from transformers import PreTrainedModel

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.linear import Kind
from paceline.errors import ConfigError
from paceline.model.attention.chunks import Chunks
from paceline.model.linear.families import spec_of
from paceline.model.linear.layers import linear_modules
from paceline.model.loading import LoadedModel, load_pretrained, prepare
from paceline.model.parallel.collectives import Collectives
from paceline.model.parallel.plan import ShardPlan, plan_shards
from paceline.model.runner import ModelRunner
from paceline.model.selftest import InvarianceReport, check_invariance
from paceline.types import pages_for

FP32_LIMIT = 1e-5
BF16_LIMIT = 1.25
"""Of the rows' differences from transformers in float32, the one that four of five are below: how many times that of
transformers in bfloat16. Two roundings of the same sums are farther from each other than each is from the truth."""
RANKS_LIMIT = 1.6
"""The same of two ranks, which round their sums in parts."""
_WORST_LIMIT = 2.0
"""The same of the worst row, where there are no experts."""
PROMPT = prompt(1, 100)
NUM_NEW = 40
DOCS = Path(__file__).parents[2] / "docs" / "families.md"
_CHUNK = 37
_PROPOSALS = (2, 5, 9, 3, 17, 4)


@dataclass
class Result:
    """What was found of a case. Differences are None where it was refused before."""

    name: str
    class_name: str
    notes: str = ""
    refused: str = ""
    """The reason, at any degree."""
    refused_ranks: str = ""
    """The reason, at degree 2."""
    fp32: float | None = None
    """The largest difference from transformers."""
    bf16: float | None = None
    """How many times as far from float32 as transformers, see BF16_LIMIT."""
    ranks_fp32: float | None = None
    """The largest difference of two ranks from one process."""
    ranks_bf16: float | None = None
    held: float | None = None
    """The part of the parameters that a rank of two holds."""
    bits_fp32: str = ""
    """The verdict of the start-up self-test: "yes", or how many verified rows are not bit for bit those of decoding."""
    bits_bf16: str = ""


def examine(case: Case, ranks: Ranks, folder: Path) -> Result:
    """Runs the case; AssertionError where it does not conform."""
    result = Result(case.name, class_name(case.family))
    config = case.config()
    tied = bool(getattr(config, "tie_word_embeddings", False))
    for tie in (tied, not tied) if _can_tie(case) else (tied,):
        path = str(folder / f"tied-{tie}")
        checkpoint(case.config(tie_word_embeddings=tie) if tie != tied else config).save_pretrained(path)
        try:
            model = prepare(load_pretrained(Checkpoint.open(path), torch.float32), compile=False)
        except ConfigError as error:
            result.refused = str(error).replace(f" ({path})", "")
            return result
        result.notes = result.notes or _notes(case, model, path)
        rows, tokens, difference = _whole(path, model)
        result.fp32 = max(difference, result.fp32 or 0.0)
        if tie == tied:
            result.bits_fp32 = _verdict(check_invariance(model.runner(16)))
        try:
            plan = plan_shards(case.config(tie_word_embeddings=tie) if tie != tied else config, 1, 2)
        except ConfigError as error:
            result.refused_ranks = str(error)
        else:
            theirs, text = ranks.run(rank_text, path, torch.float32, None)[0]
            difference = float(_differences(theirs, rows).max())
            assert difference <= FP32_LIMIT, f"two ranks are {difference:.1e} from one process"
            assert text == tokens
            result.held = result.held or _held(plan)
            result.ranks_fp32 = max(difference, result.ranks_fp32 or 0.0)
        if tie == tied:
            _bfloat16(result, path, tokens, ranks)
    return result


def _whole(path: str, model: LoadedModel) -> tuple[Tensor, list[int], float]:
    """Logits and tokens of one process in float32, and the difference from transformers."""
    reference = load_pretrained(Checkpoint.open(path), torch.float32)
    ids = torch.tensor([PROMPT])
    settings = {"do_sample": False, "max_new_tokens": NUM_NEW, "pad_token_id": 0, "eos_token_id": None}
    want = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    runner = model.runner(16)
    rows, tokens = run_text(runner, None)
    assert tokens == want, "greedy tokens are not those of generate"
    assert len({*rows.argmax(-1).tolist()}) > 10, "the checkpoint says the same everywhere"
    difference = float(_differences(rows, transformers_logits(reference, tokens)).max())
    assert difference <= FP32_LIMIT, f"{difference:.1e} from transformers in float32"
    verified = _verified(runner, tokens)
    assert float(_differences(verified, rows[len(PROMPT) :]).max()) <= FP32_LIMIT
    assert torch.equal(verified.argmax(-1), rows[len(PROMPT) :].argmax(-1)), "verification is not decoding"
    return rows, tokens, difference


def _held(plan: ShardPlan) -> float:
    shards = plan.parameters.values()
    return sum(math.prod(s.local_shape) for s in shards) / sum(math.prod(s.shape) for s in shards)


def _bfloat16(result: Result, path: str, tokens: list[int], ranks: Ranks) -> None:
    model = prepare(load_pretrained(Checkpoint.open(path), torch.bfloat16), compile=False)
    rows, _ = run_text(model.runner(16), tokens)
    exact = transformers_logits(load_pretrained(Checkpoint.open(path), torch.float32), tokens)
    theirs = _differences(transformers_logits(load_pretrained(Checkpoint.open(path), torch.bfloat16), tokens), exact)

    def times(rows: Tensor, limit: float) -> float:
        ours = _differences(rows, exact)
        if "MoE" not in result.notes:
            worst = float(ours.max() / theirs.max())
            assert worst <= _WORST_LIMIT, f"a row is {worst:.2f} times as far from float32 as transformers' worst"
        far = float(ours.quantile(0.8) / theirs.quantile(0.8))
        assert far <= limit, f"{far:.2f} times as far from float32 as transformers in bfloat16"
        return far

    result.bf16 = times(rows, BF16_LIMIT)
    report = check_invariance(model.runner(16))
    assert report.num_different <= 0.02 * report.num_rows, str(report)
    result.bits_bf16 = _verdict(report)
    if not result.refused_ranks:
        split, _ = ranks.run(rank_text, path, torch.bfloat16, tokens)[0]
        result.ranks_bf16 = times(split, RANKS_LIMIT)


def _verdict(report: InvarianceReport) -> str:
    return "yes" if report.holds else f"{report.num_different} of {report.num_rows}"


def rank_text(
    group: Collectives, path: str, dtype: torch.dtype, tokens: list[int] | None
) -> tuple[Tensor, list[int]] | None:
    """``run_text`` of rank 0."""
    return led(load(group, path, dtype), run_text, tokens)


def run_text(runner: ModelRunner, tokens: Sequence[int] | None) -> tuple[Tensor, list[int]]:
    """Logits [tokens, vocab] of the prompt in chunks and of NUM_NEW tokens one by one: the greedy ones, or given."""
    pages = runner.cache.allocate(pages_for(len(PROMPT) + NUM_NEW))
    text, rows = list(PROMPT), []
    for first in range(0, len(PROMPT), _CHUNK):
        rows.append(runner.forward([chunk(text, first, min(first + _CHUNK, len(PROMPT)), pages)]).clone())
    for at in range(len(PROMPT), len(PROMPT) + NUM_NEW):
        text.append(int(rows[-1][-1].argmax()) if tokens is None else tokens[at])
        rows.append(runner.forward([chunk(text, at, at + 1, pages)]).clone())
    runner.cache.release(pages)
    return torch.cat(rows), text


def assert_follows(
    runner: ModelRunner,
    model: PreTrainedModel,
    prompt: Sequence[int],
    stops: Sequence[int],
    num_new: int,
    limit: float = FP32_LIMIT,
) -> None:
    """Raises AssertionError unless a prompt in steps that end at ``stops``, and greedy decoding behind it, have the
    tokens of transformers, and its logits within ``limit``."""
    text, rows, num = [*prompt], [], len(prompt)
    pages = runner.cache.allocate(pages_for(num + num_new))
    for first, stop in itertools.pairwise((0, *stops, num)):
        rows.append(runner.forward([chunk(text, first, stop, pages)]).clone())
    for at in range(num, num + num_new):
        text.append(int(rows[-1][-1].argmax()))
        rows.append(runner.forward([chunk(text, at, at + 1, pages)]).clone())
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": num_new, "pad_token_id": 0, "eos_token_id": None}
    assert text == model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    assert float(_differences(torch.cat(rows), transformers_logits(model, text)).max()) <= limit
    runner.cache.release(pages)
    runner.cache.check_integrity([])


def assert_invariant(runner: ModelRunner) -> None:
    """Raises AssertionError unless the self-test holds, with branches."""
    report = check_invariance(runner, max_len=300, max_step_tokens=128)
    assert report.holds, str(report)
    assert report.has_branches
    runner.cache.check_integrity([])


def assert_invariant_on_two_ranks(model: PreTrainedModel, folder: Path) -> None:
    """The same of a checkpoint in float32 on two ranks."""
    model.save_pretrained(folder / "model")
    with Ranks(2, folder) as ranks:
        assert ranks.run(_invariant_rank, str(folder / "model"))[0]


def _invariant_rank(group: Collectives, path: str) -> bool:
    led(load(group, path, torch.float32), assert_invariant)
    return True


def _verified(runner: ModelRunner, text: list[int]) -> Tensor:
    """Logits of what follows the prompt, several tokens in each step."""
    pages = runner.cache.allocate(pages_for(len(text)))
    runner.forward([chunk(text, 0, len(PROMPT), pages)])
    rows, first = [], len(PROMPT)
    for size in _PROPOSALS:
        rows.append(runner.forward([chunk(text, first, first + size, pages)]).clone())
        first += size
    assert first == len(text)
    runner.cache.release(pages)
    return torch.cat(rows)


def transformers_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """Logits of transformers: of all tokens at once, or one by one where there are delta layers.

    Of those transformers' form for many tokens is up to five times as far from float64 as its form for one, or as ours.
    """
    ids = torch.tensor([tokens])
    with torch.no_grad():
        if not any(spec_of(layer).kind in (Kind.GATED_DELTA, Kind.KIMI_DELTA) for _, layer in linear_modules(model)):
            logits: Tensor = model(ids, use_cache=False).logits[0]
            return logits
        cache, rows = None, []
        for at in range(len(tokens)):
            out = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0])
    return torch.cat(rows)


def _differences(rows: Tensor, want: Tensor) -> Tensor:
    """[tokens] the largest of each row, relative to the largest logit."""
    return (rows.float() - want.float()).abs().amax(-1) / want.float().abs().max()


def _can_tie(case: Case) -> bool:
    config = case.config()
    cls = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    return hasattr(config, "tie_word_embeddings") and bool(getattr(cls, "_tied_weights_keys", None))


def _notes(case: Case, model: LoadedModel, path: str) -> str:
    """What is of note, read off the model itself."""
    config = case.config()
    text = config.get_text_config()
    reference = load_pretrained(Checkpoint.open(path), torch.float32)
    names = {part for name, _ in reference.named_modules() for part in [name.rpartition(".")[2]]}
    kv_heads = {layer.num_kv_heads for layer in model.layers}
    notes = []
    if getattr(text, "kv_lora_rank", None):
        notes.append("MLA")
    elif min(kv_heads) < text.num_attention_heads:
        notes.append("GQA")
    if model.sliding_window is not None:
        notes.append("chunks" if isinstance(model.sliding_window, Chunks) else "window")
    if getattr(text, "attn_logit_softcapping", None) or getattr(text, "final_logit_softcapping", None):
        notes.append("softcap")
    if any(name.endswith(".sinks") for name, _ in reference.named_parameters()):
        notes.append("sinks")
    if names & {"q_norm", "query_layernorm", "q_layernorm", "qk_norm", "query_norm", "key_layernorm"}:
        notes.append("QK norm")
    notes += sorted({spec.kind for spec in model.linear.values()})
    if any(name.endswith(".compressor.position_bias") for name, _ in reference.named_parameters()):
        notes.append("compressed layers")
    elif getattr(text, "index_topk", None):
        notes.append("indexed layers")
    if any("expert" in name for name in names):
        notes.append("MoE, shared" if any("shared" in name for name in names) else "MoE")
    if _can_tie(case):
        notes.append("tied and untied")
    else:
        notes.append("tied" if getattr(text, "tie_word_embeddings", False) else "untied")
    return ", ".join(notes)


def table(results: Sequence[Result]) -> str:
    """The page of the families."""
    planned = [result for result in results if result.name in family_names()]
    counts = count(planned)
    lines = [
        f"""# Model families

Written by `python -m tests.model.conformance RESULTS.jsonl`: tiny random checkpoints of every decoder family that
transformers ships a tensor-parallel plan for (transformers {transformers.__version__}, \
torch {torch.__version__}), some variants, and eight families
that have a plan of ours (`model/parallel/tables.py`).

Of {len(planned)} families {counts["one"]} work at degree 1 and {counts["two"]} at degree 2; {counts["refused"]} are \
refused with the reason, before they run.

In float32 numbers are the largest difference of any logit, relative to the largest one: at degree 1 from transformers,
at degree 2 from degree 1. All greedy tokens are equal to those of transformers' `generate`, and differences at most
{FP32_LIMIT:.0e}.

In bfloat16 they are distances from transformers in float32, as multiples of the distance that transformers itself has
in bfloat16: at most {BF16_LIMIT} at degree 1 and {RANKS_LIMIT} at degree 2. The distance is that of the row that four
rows of five stay below, since with experts a rounding can choose another expert.

*Same bits* is the verdict of the self-test that a target runs when it starts (`batch_invariant`), eagerly on the CPU
that wrote the row (one with AMX, of MLA and compressed layers one without): verification gives the bits of
decoding, or how many of its rows differ.

*MLA*: a layer keeps one latent and one rotated key of a token, whatever the number of its heads; every rank has them
whole. No family keeps keys and values of each head instead.

*Of a rank* is the part of the parameters that each of two ranks holds: what a plan leaves out, such as latent
attention, every rank has whole.

| family | class | of note | degree 1, fp32 | bf16 | same bits, fp32 | bf16 | degree 2, fp32 | bf16 | of a rank |
|---|---|---|---|---|---|---|---|---|---|"""
    ]
    for result in results:
        if not result.refused:
            two = f"{_number(result.ranks_fp32)} | {_number(result.ranks_bf16)} | {_number(result.held)}"
            two = "refused | |" if result.refused_ranks else two
            lines.append(
                f"| {result.name} | {result.class_name} | {result.notes} | {_number(result.fp32)} | "
                f"{_number(result.bf16)} | {result.bits_fp32} | {result.bits_bf16} | {two} |"
            )
    lines += ["", "## Refused", "", "| family | degree | reason |", "|---|---|---|"]
    lines += [f"| {r.name} | any | {r.refused} |" for r in results if r.refused]
    lines += [f"| {r.name} | 2 | {r.refused_ranks} |" for r in results if r.refused_ranks and not r.refused]
    return "\n".join(lines) + "\n"


def count(results: Sequence[Result]) -> Counter[str]:
    """How many work at degree 1 ("one") and 2 ("two"), and are refused at any degree ("refused")."""
    found: Counter[str] = Counter()
    for result in results:
        found["refused"] += bool(result.refused)
        found["one"] += not result.refused
        found["two"] += not result.refused and not result.refused_ranks
    return found


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0.0 else f"{value:.0e}" if value < 1e-3 else f"{value:.3f}"


def main() -> None:
    """Examines and writes."""
    parser = argparse.ArgumentParser(description="Examines every family and writes docs/families.md.")
    parser.add_argument("results", type=Path, help="JSONL of what was found; what it holds is not examined again")
    record: Path = parser.parse_args().results
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = record.read_text().splitlines() if record.exists() else []
    known = {found.name: found for line in lines for found in [Result(**json.loads(line))]}
    with tempfile.TemporaryDirectory() as folder, Ranks(2, Path(folder)) as ranks:
        for case in cases():
            if case.name in known:
                continue
            with tempfile.TemporaryDirectory() as models, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    known[case.name] = examine(case, ranks, Path(models))
                except Exception as error:
                    print(case.name, type(error).__name__, *str(error).splitlines()[:3], file=sys.stderr, flush=True)
                    continue
            with record.open("a") as file:
                file.write(json.dumps(asdict(known[case.name])) + "\n")
            print(known[case.name], flush=True)
    missing = [case.name for case in cases() if case.name not in known]
    if missing:
        sys.exit(f"no result of {', '.join(missing)}: the table is not written")
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(table([known[case.name] for case in cases()]), encoding="utf-8")


if __name__ == "__main__":
    main()
