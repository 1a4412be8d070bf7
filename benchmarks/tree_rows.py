"""Tokens per target step with chains and with subtrees of as many draft tokens: `python benchmarks/tree_rows.py`.

The embedded pair, one session after another, both engines in turn: before each target step the draft grows its tree
until it has nothing more to do, so that every step has the best proposal that there is. The budget is given rows that
cost nothing up to a number of draft tokens, and no further ones; branches cost nothing either. So a chain has that many
tokens (at most 16), and a subtree the likeliest nodes that there are. What
rows and branches really cost is for the machine to say: `paceline bench` with `tree_verification` auto and off.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.cli.table import table
from paceline.config import ModelOptions
from paceline.draft.engine import DraftEngine
from paceline.drafters.model import ModelDrafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.messages import Outcome
from paceline.model.loading import LoadedModel, load_model
from paceline.router.relay import Outbox, Relay
from paceline.router.session import Actions, Session
from paceline.target.engine import TargetEngine
from paceline.types import SamplingParams, SpeculationParams
from paceline_bench.prompts import held_out_prompts

_CHAIN = 16
"""Tokens of the longest chain."""


class FreeRows:
    """Times of steps in which draft tokens are free up to a number of them."""

    known = True

    def __init__(self, num_rows: int) -> None:
        self._most = num_rows + 1

    def seconds(self, num_tokens: int) -> float:
        """One second, or forever."""
        return 1.0 if num_tokens <= self._most else 1e9

    def floor(self, num_tokens: int) -> float:
        """A convex function below ``seconds``."""
        return 1.0 if num_tokens <= self._most else 1.0 + 1e6 * (num_tokens - self._most)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns nothing."""


def tokens_per_step(
    models: tuple[LoadedModel, LoadedModel], prompts: list[list[int]], rows: int, temperature: float, *, trees: bool
) -> list[float]:
    """Tokens per step of each prompt's text, the first step left out."""
    target, draft = models
    from_target: list[Any] = []
    from_draft: list[Any] = []
    engine = TargetEngine(
        target.runner(32), from_target.extend, max_sessions=1, max_step_tokens=256, max_model_len=1024,
        trees=trees, clock=lambda: 0.0,
    )  # fmt: skip
    engine.allocation.cost = FreeRows(rows)  # type: ignore[assignment]
    engine._adapt = lambda step: None  # type: ignore[method-assign]  # no time passes by which drafting could pay
    drafter = ModelDrafter(draft.runner(64), max_leaves=16, max_prefill_tokens=256, top_m=256)
    drafting = DraftEngine(drafter, from_draft.extend, vocab_size=target.vocab_size, tree_budget=256, fan_out=6)
    relay = Relay()

    def deliver(actions: Actions | Outbox) -> None:
        engine.receive(actions.to_target)
        drafting.receive(actions.to_draft)

    def taken(messages: list[Any]) -> list[Any]:
        found = [*messages]
        messages.clear()
        return found

    results = []
    for i, prompt in enumerate(prompts):
        name = f"s{i}"
        sampling = SamplingParams(temperature=temperature, max_tokens=96, ignore_eos=True)
        session = Session(name, prompt, sampling, SpeculationParams(max_draft_tokens=_CHAIN), decode=str)
        relay.sessions[name] = session
        deliver(session.open(draft_available=True))
        sizes: list[int] = []
        while name in relay.sessions:
            while drafting.step() or from_draft:
                deliver(relay.on_draft(taken(from_draft)))
            engine.step()
            messages = taken(from_target)
            sizes += [len(message.token_ids) for message in messages if isinstance(message, Outcome)]
            deliver(relay.on_target(messages))
            deliver(session.digest())
            if session.result is not None:
                del relay.sessions[name]
        results.append(sum(sizes[1:-1]) / max(1, len(sizes) - 2))  # neither the prompt's step nor the last
    return results


def main() -> None:
    """Prints one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 12, 16, 32], help="draft tokens of a step")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=24)
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = ModelOptions(dtype="float32", compile=False)
    target, draft = (load_model(Checkpoint.open(str(path)), options) for path in (TARGET_DIR, DRAFT_DIR))
    tokenizer = load_tokenizer(TARGET_DIR)
    prompts = [[*prompt.token_ids] for prompt in held_out_prompts(tokenizer, args.prompts)]
    lines = []
    for temperature in args.temperatures:
        for rows in args.rows:
            chain, tree = (
                statistics.mean(tokens_per_step((target, draft), prompts, rows, temperature, trees=trees))
                for trees in (False, True)
            )
            lines.append([f"{temperature:g}", str(rows), f"{chain:.2f}", f"{tree:.2f}", f"{tree / chain - 1:+.0%}"])
            print(*lines[-1], flush=True)
    print(f"embedded pair, float32, {len(prompts)} prompts, 96 tokens each; tokens per step")
    print(*table([["temperature", "draft tokens", "chain", "subtree", "more"], *lines]), sep="\n")


if __name__ == "__main__":
    main()
