"""What hints from an early exit of the target would bring a draft that ranks the target's next tokens.

In Mirror speculative decoding the target tells its draft, while its upper layers still run, which tokens a layer below
them finds likely, by the final norm and the LM head. Here the target's choice at each position of its own text is
ranked by the draft alone and with the hint multiplied in (q^(1 - w) e^w, where w is the best on every other prompt);
printed is how often the choice is among the first, on the prompts between. Later exits leave less time: the message
must arrive, and the draft expand below what is new, before the last layer ends.

    python benchmarks/hints.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.cli.table import table
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.model.loading import load_pretrained
from paceline_bench.prompts import held_out_prompts

AMONG = (1, 2, 3, 4, 8)
FITTED = 3
"""Outcomes for which the weight is the best: as many as a draft prepares by default."""
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


def hits(scores: Tensor, chosen: Tensor, among: int) -> float:
    """Share of positions whose chosen token is among the first by ``scores`` [prompts, positions, vocabulary]."""
    return float((scores.topk(among, -1).indices == chosen[..., None]).any(-1).float().mean())


@torch.no_grad()
def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=96)
    args = parser.parse_args()
    checkpoint, length = Checkpoint.open(str(TARGET_DIR)), args.prompt_tokens
    prompts = [prompt.token_ids[:length] for prompt in held_out_prompts(checkpoint.tokenizer, args.prompts)]
    target = load_pretrained(checkpoint, torch.float32).eval()
    draft = load_pretrained(Checkpoint.open(str(DRAFT_DIR)), torch.float32).eval()
    ids = torch.tensor([prompt for prompt in prompts if len(prompt) == length])
    rows: list[tuple[str, ...]] = [("T", "exit", "w", *(f"among {n}" for n in AMONG))]
    for temperature in (0, 1):
        generator, lengths = (
            torch.manual_seed(0),
            {"max_new_tokens": args.max_tokens, "min_new_tokens": args.max_tokens},
        )
        text = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=temperature > 0, top_k=0, top_p=1.0, **lengths
        )
        out = target(text, output_hidden_states=True, use_cache=False)
        at = slice(length - 1, -1)
        p, q = (logits[:, at].log_softmax(-1) for logits in (out.logits, draft(text, use_cache=False).logits))
        noise = -torch.log(-torch.log(torch.rand(p.shape, generator=generator))) * temperature  # the rule's own
        chosen = (p + noise).argmax(-1)
        exits = range(1, len(out.hidden_states) - 1)
        for layer in (0, *exits):
            state = target.model.norm(out.hidden_states[layer][:, at])
            e = target.lm_head(state).log_softmax(-1) if layer else q
            mixed = {w: (1 - w) * q + w * e + noise for w in (WEIGHTS if layer else (0.0,))}
            best = max(mixed, key=lambda w: hits(mixed[w][::2], chosen[::2], FITTED))
            shares = [f"{hits(mixed[best][1::2], chosen[1::2], n):.3f}" for n in AMONG]
            rows.append((str(temperature), f"{layer} of {len(exits) + 1}" if layer else "none", f"{best:g}", *shares))
    print(*table(rows), sep="\n")


if __name__ == "__main__":
    main()
