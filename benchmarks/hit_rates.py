"""Hit rates of a target's next token, by rule and temperature: `python benchmarks/hit_rates.py`.

Teacher-forced with the embedded pair: at every position both models see the same context, so positions do not
depend on what any rule would have generated. Contexts are continuations of held-out prompts that the target sampled
at the same temperature (with other random numbers than those of the rules), which is what serving sees; or, with
`--text held-out`, files that neither model was trained on. With F alternatives per position:

acceptance       the draft's token x is accepted by the target at this position.
after rejection  given that x was rejected: the recovered token is among F alternatives other than x (Saguaro:
                 F - 1, of those whose q is scaled).
after full acc.  the target's own token at this position, as it draws a bonus token, is among the draft's first
                 F candidates.

coupled          ranked by log q + g with the target's noise; x is the first (at temperature 0: no noise).
rejection        x is drawn from q; alternatives are ranked by log q + g with the noise of recovered and bonus tokens.
                 At temperature 0 it is coupled.
saguaro          rejection with q of the F likeliest scaled by C before drawing; these are the alternatives.
Everything is computed by the functions that serve: `process`, `draft_candidates`, `rank` and `verify`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.core.processors import Row, SamplerState
from paceline.core.sampling import best_recovered, draft_candidates, process, rank_coupled, row_keys
from paceline.core.tree import Proposal
from paceline.core.verification import verify
from paceline.drafters.protocol import Candidates
from paceline.drafters.ranking import RankingRow, Rule, rank
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.model.loading import load_pretrained
from paceline.types import Acceptance, SamplingParams
from paceline_bench.prompts import held_out_texts

WINDOW, SKIPPED, TOP_M = 256, 64, 256
"""Tokens of a text window; how many of them are context only; candidates of the draft that are looked at."""


@dataclass
class Counts:
    """Events of one rule at one temperature."""

    positions: int = 0
    accepted: int = 0
    foreseen_recovered: int = 0
    foreseen_bonus: int = 0

    def add(self, x: int, recovered: int | None, bonus: int, others: Sequence[int], first: Sequence[int]) -> None:
        self.positions += 1
        self.accepted += recovered is None
        self.foreseen_recovered += recovered is not None and recovered in others and recovered != x
        self.foreseen_bonus += bonus in first

    def row(self) -> tuple[str, str, str]:
        rejected = self.positions - self.accepted
        return (
            f"{self.accepted / self.positions:.3f}",
            f"{self.foreseen_recovered / rejected:.3f}" if rejected else "-",
            f"{self.foreseen_bonus / self.positions:.3f}",
        )


def windows(num_positions: int) -> Tensor:
    """[windows, WINDOW]: parts of held-out files in turn, as many as the positions need."""
    tokenizer = load_tokenizer(str(TARGET_DIR))
    texts = [tokenizer.encode(text) for _, text in sorted(held_out_texts().items())]
    found: list[tuple[int, ...]] = []
    for start in range(0, max(map(len, texts)), WINDOW):
        found += [ids[start : start + WINDOW] for ids in texts if len(ids) >= start + WINDOW]
    needed = -(-num_positions // (WINDOW - SKIPPED))
    if len(found) < needed:
        available = len(found) * (WINDOW - SKIPPED)
        raise SystemExit(f"--positions is {num_positions}: the held-out text has {available}")
    return torch.tensor(found[:needed])


def continued(model: Any, held_out: Tensor, temperature: float) -> Tensor:
    """[windows, WINDOW]: the target's own continuations of the first SKIPPED tokens."""
    options: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    torch.manual_seed(0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    prompt = held_out[:, :SKIPPED]
    ids: Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=WINDOW - SKIPPED, **options
    )
    return ids


def count(
    counts: Counts, logits_p: Tensor, logits_q: Tensor, rows: list[Row], rule: Acceptance, saguaro: float, f: int
) -> None:
    """Adds the positions of one window. logits: [positions, vocab]."""
    token_ids, log_q = draft_candidates(logits_q, rows, TOP_M)
    keys = row_keys(rows)
    coupled = rule is Acceptance.COUPLED or rows[0].state.greedy
    others: list[tuple[int, ...]]
    if coupled:
        ranked = rank_coupled(token_ids, log_q, keys.seeds, keys.positions, keys.greedy)[0].tolist()
        xs, firsts = [ids[0] for ids in ranked], [ids[:f] for ids in ranked]
        others = [tuple(ids[1 : f + 1]) for ids in ranked]
        proposals = [Proposal((x,)) for x in xs]
    else:
        scaled = f if saguaro < 1 else f + 1
        wanted = [RankingRow(row, Rule.REJECTION, scaled, saguaro, nonce) for nonce, row in enumerate(rows)]
        rankings = rank(Candidates(token_ids, log_q), wanted)
        guesses = token_ids.tolist() if saguaro < 1 else best_recovered(token_ids, log_q, rows, f)[0]
        xs, firsts = [ranking.token_ids[0] for ranking in rankings], [ids[:f] for ids in guesses]
        others = [ranking.token_ids[1:] for ranking in rankings]
        proposals = [Proposal((x,), (ranking.q,)) for x, ranking in zip(xs, rankings, strict=True)]
    rules = [rule] * len(rows)
    # The bonus row of a one-token proposal is not looked at; the row itself fills its place.
    twice = process(logits_p.repeat_interleave(2, 0), [row for row in rows for _ in range(2)])
    verdicts = verify(twice, proposals, rules)
    own = verify(process(logits_p, rows), [Proposal()] * len(rows), rules)
    for x, verdict, mine, other, first in zip(xs, verdicts, own, others, firsts, strict=True):
        recovered = verdict.token_ids[0] if verdict.num_accepted == 0 else None
        counts.add(x, recovered, mine.token_ids[0], other, first)


def main() -> None:
    parser = argparse.ArgumentParser(description="hit rates by rule and temperature")
    parser.add_argument("--positions", type=int, default=4608)
    parser.add_argument("--fan-out", type=int, default=3, help="F (default 3)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--text", choices=["generated", "held-out"], default="generated")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()

    torch.set_num_threads(1)
    models = [
        load_pretrained(Checkpoint.open(str(path)), getattr(torch, options.dtype)).eval()
        for path in (TARGET_DIR, DRAFT_DIR)
    ]
    rules = [
        ("coupled", Acceptance.COUPLED, 1.0),
        ("rejection", Acceptance.REJECTION, 1.0),
        ("rejection, saguaro 0.25", Acceptance.REJECTION, 0.25),
    ]
    cells = {(t, name): Counts() for t in options.temperatures for name, _, _ in rules}
    held_out = windows(options.positions)
    for temperature in options.temperatures:
        text = continued(models[0], held_out, temperature) if options.text == "generated" else held_out
        for index, window in enumerate(tuple(ids) for ids in text.tolist()):
            with torch.no_grad():
                logits = [m(torch.tensor([window])).logits[0, SKIPPED - 1 : -1].float() for m in models]
            params = SamplingParams(temperature=temperature)
            for name, rule, saguaro in rules:
                state = SamplerState(
                    params,
                    index,
                    window[:SKIPPED],
                    vocab_size=logits[0].shape[-1],
                    num_ranked=options.fan_out + 1 if rule is Acceptance.COUPLED else 0,
                )
                rows = [Row(state, window[SKIPPED:end]) for end in range(SKIPPED, WINDOW)]
                count(cells[temperature, name], logits[0], logits[1], rows, rule, saguaro, options.fan_out)
    table_rows = [("temperature, rule", "acceptance", "hit after rejection", "hit after full acc.")]
    for (temperature, name), counts in cells.items():
        if temperature > 0 or name == "coupled":
            name = "greedy" if temperature == 0 else name
            table_rows.append((f"{temperature:g} {name}", *counts.row()))
    positions = next(iter(cells.values())).positions
    print(f"embedded pair, {options.dtype}, F = {options.fan_out}, {positions} positions of {options.text} text")
    print("\n".join(table(table_rows)))


if __name__ == "__main__":
    main()
