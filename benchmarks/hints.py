"""What hints from an early exit of the target would bring a draft that ranks the target's next tokens, and bring it.

In Mirror speculative decoding the target tells its draft, while its upper layers still run, which tokens a layer below
them finds likely, by the final norm and the LM head. Here the target's choice at each position of its own text is
ranked by the draft alone and with the hint multiplied in (q^(1 - w) e^w, where w is the best on every other prompt);
printed is how often the choice is among the first, on the prompts between. Later exits leave less time: the message
must arrive, and the draft expand below what is new, before the last layer ends.

    python benchmarks/hints.py

The same served, under a virtual clock (`simulate.py`): engines, trees and messages are those of production. A step of
the target lasts one unit, of which the layers below boundary b of L take b / L; the exit itself is free, since a longer
step ends elsewhere between two steps of the draft, which changes more than hints do. A tree step of the draft lasts
`--draft-step` units and expands `--leaves` nodes. Each text must be that without hints.

    python benchmarks/hints.py --served

`--head FOLDER --boundaries 4`: both by an exit head of that boundary, as `paceline train-head early_exit` trains it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import simulate
from paceline.checkpoint.files import Checkpoint
from paceline.cli.table import table
from paceline.config import HintOptions
from paceline.drafters.heads.lent import Continued, layers_from, lend
from paceline.drafters.heads.load import open_head
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.model.loading import LoadedModel, load_pretrained, prepare
from paceline.router.session import Session
from paceline.target.hints import Hints
from paceline.target.mount import behind
from paceline.types import SamplingParams, SpeculationParams
from paceline_bench.prompts import Prompt, held_out_prompts

AMONG = (1, 2, 3, 4, 8)
FITTED = 3
"""Outcomes for which the weight is the best: as many as a draft prepares by default."""
WEIGHTS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


def hits(scores: Tensor, chosen: Tensor, among: int) -> float:
    """Share of positions whose chosen token is among the first by ``scores`` [prompts, positions, vocabulary]."""
    return float((scores.topk(among, -1).indices == chosen[..., None]).any(-1).float().mean())


@torch.no_grad()
def rank(args: argparse.Namespace) -> None:
    """Prints the first table."""
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
        layers = exits if args.head is None else args.boundaries
        for layer in (0, *layers):
            state = out.hidden_states[layer][:, at]
            if args.head is not None and layer:
                plan = open_head("early_exit", args.head, checkpoint, boundaries=(layer,))
                state = plan.load_module(torch.float32, torch.device("cpu"))(state)
            state = target.model.norm(state)
            e = target.lm_head(state).log_softmax(-1) if layer else q
            mixed = {w: (1 - w) * q + w * e + noise for w in (WEIGHTS if layer else (0.0,))}
            best = max(mixed, key=lambda w: hits(mixed[w][::2], chosen[::2], FITTED))
            shares = [f"{hits(mixed[best][1::2], chosen[1::2], n):.3f}" for n in AMONG]
            rows.append((str(temperature), f"{layer} of {len(exits) + 1}" if layer else "none", f"{best:g}", *shares))
    print(*table(rows), sep="\n")


def served(args: argparse.Namespace) -> None:
    """Prints the second table."""
    checkpoint = Checkpoint.open(str(TARGET_DIR))
    network = load_pretrained(checkpoint, torch.float32)
    draft = prepare(load_pretrained(Checkpoint.open(str(DRAFT_DIR)), torch.float32), compile=False)
    prompts = held_out_prompts(checkpoint.tokenizer, args.prompts)
    num_layers = network.config.num_hidden_layers
    columns = ("tokens/unit", "tokens/step", "nodes used", "nodes of hints/step")
    print(f"draft step {args.draft_step:g}, {args.prompts} prompts x {args.max_tokens} tokens")
    for temperature in args.temperatures:
        rows: list[tuple[str, ...]] = [("T", "leaves", "hints at", *columns)]
        for leaves in args.leaves:
            texts = None
            for boundary in (None, *args.boundaries):
                target = prepare(network, compile=False, midway=boundary)
                found, figures = serve(args, target, draft, prompts, temperature, leaves, boundary)
                texts = texts or found
                assert found == texts, "another text than without hints"
                at = f"{boundary} of {num_layers}" if boundary else "none"
                rows.append((f"{temperature:g}", str(leaves), at, *figures))
        print("", *table(rows), sep="\n", flush=True)


def serve(
    args: argparse.Namespace,
    target: LoadedModel,
    draft: LoadedModel,
    prompts: Sequence[Prompt],
    temperature: float,
    leaves: int,
    boundary: int | None,
) -> tuple[list[list[int]], tuple[str, ...]]:
    """The texts with hints from a boundary, or without, and the figures of all but the first, which warms up."""
    hints, hint_after = None, 0.0
    if boundary is not None:
        network: Any = target.step
        rest = Continued(lend(partial(layers_from, target.size.num_layers), network.model))
        exit = rest.logits
        if args.head is not None:
            plan = open_head("early_exit", args.head, Checkpoint.open(str(TARGET_DIR)), boundaries=(boundary,))
            exit = behind(plan.load_module(torch.float32, torch.device("cpu")), exit)
        hints = Hints(HintOptions(boundary=boundary, model=args.head), exit)
        hint_after = boundary / target.size.num_layers
    simulation = simulate.Simulation(
        target,
        draft,
        draft_step=args.draft_step,
        max_leaves=leaves,
        tree_budget=256,
        fan_out=6,
        hints=hints,
        hint_after=hint_after,
        adaptive=False,
    )
    engine, drafts = simulation._target, simulation._draft.stats
    texts, num_tokens, units, steps, before = [], 0, 0.0, 0, (0, 0, 0)
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=index, ignore_eos=True)
        session = Session(f"s{index}", prompt.token_ids, sampling, SpeculationParams(), decode=lambda _: "")
        started = engine.stats.rounds
        text, first, took = simulation.run(session)
        texts.append(text)
        if index == 0:
            before = drafts.nodes_used, drafts.nodes_missed, drafts.hints_nodes
            continue
        num_tokens, units = num_tokens + len(text) - first, units + took
        steps += engine.stats.rounds - started - 1
    used, missed = drafts.nodes_used - before[0], drafts.nodes_missed - before[1]
    added = (drafts.hints_nodes - before[2]) / steps
    return texts, (
        f"{num_tokens / units:.3f}",
        f"{num_tokens / steps:.3f}",
        f"{used / (used + missed):.3f}",
        f"{added:.1f}",
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=40, help="of the first table")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--served", action="store_true", help="print the second table")
    parser.add_argument("--boundaries", type=int, nargs="+", default=[6, 7], help="of the second table")
    parser.add_argument("--head", metavar="FOLDER", help="exit head of the boundary, of both tables")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of the second table")
    parser.add_argument("--leaves", type=int, nargs="+", default=[4], help="of a tree step of the draft")
    parser.add_argument("--draft-step", type=float, default=0.2, help="in steps of the target (default 0.2)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    (served if args.served else rank)(args)


if __name__ == "__main__":
    main()
