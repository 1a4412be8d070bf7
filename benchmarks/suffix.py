"""Accepted draft tokens per round of suffix decoding and of prompt lookup, on texts of an agent that edits a file.

The texts are made here, by a fixed rule, from source files of this project: each turn's prompt is the conversation so
far, and its output is the whole file again with a few lines changed, as agents that rewrite files write it. Drafters
follow the fixed texts: a round proposes the likeliest path, at most K tokens, and accepts up to the first token that
differs. No model takes part, so that nothing but the drafters is compared.

    python benchmarks/suffix.py
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.core.processors import SamplerState
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.protocol import Drafter, Leaf
from paceline.drafters.suffix import SuffixDrafter
from paceline.embedded import TARGET_DIR
from paceline.types import SamplingParams

FILES = Path(__file__).parents[1] / "services" / "paceline"


def edited(lines: Sequence[str], choice: random.Random, num_edits: int) -> list[str]:
    """The lines of a file after some edits: one renamed word, lines that go, lines that come twice or change place."""
    result = list(lines)
    for _ in range(num_edits):
        at = choice.randrange(len(result) - 1)
        kind = choice.randrange(4)
        if kind == 0:
            words = [word for word in result[at].replace("(", " ").replace(":", " ").split() if word.isidentifier()]
            if words:
                word = choice.choice(words)
                result[at] = result[at].replace(word, f"{word}_{choice.randrange(100)}")
        elif kind == 1:
            del result[at]
        elif kind == 2:
            result.insert(choice.randrange(len(result)), result[at])
        else:
            result.insert(at, f"    # step {choice.randrange(1000)}: {result[choice.randrange(len(result))].strip()}")
    return result


def conversations(names: Sequence[str], num_turns: int, num_edits: int, seed: int) -> list[list[tuple[str, str]]]:
    """For each file the turns of an agent: (what is new in the prompt, output)."""
    choice, found = random.Random(seed), []
    for name in names:
        lines = (FILES / name).read_text().splitlines()[:120]
        turns = []
        for number in range(num_turns):
            new = edited(lines, choice, num_edits)
            at = choice.randrange(len(lines))
            asked = f"\nTurn {number}: the tests of {name} fail at line {at}. Write it again.\n"
            turns.append((("\n".join(lines) if number == 0 else "") + asked, "\n".join(new)))
            lines = new
        found.append(turns)
    return found


def accepted(drafter: Drafter, session: str, context: Sequence[int], output: Sequence[int], k: int) -> tuple[int, int]:
    """Accepted tokens and rounds of one output."""
    sampler = SamplerState(SamplingParams(), 0, context, vocab_size=1 << 20)
    drafter.open(session, context, sampler, "")
    while not drafter.ready(session):
        drafter.prefill()
    at = num_accepted = rounds = 0
    while at < len(output):
        path: list[int] = []
        while len(path) < min(k, len(output) - at - 1):
            candidates = drafter.expand([Leaf(session, len(path), tuple(range(len(path))), tuple(path))])
            if candidates.log_q[0, 0] == -float("inf"):
                break
            path.append(int(candidates.token_ids[0, 0]))
        right = next((i for i, token in enumerate(path) if token != output[at + i]), len(path))
        rounds, num_accepted = rounds + 1, num_accepted + right
        drafter.advance(session, output[at : at + right + 1], range(right + 1), ())
        at += right + 1
    drafter.close(session)
    return num_accepted, rounds


def main() -> None:
    """Prints accepted tokens per round of every drafter."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--edits", type=int, default=6, help="edits of each turn")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    encode = load_tokenizer(str(TARGET_DIR)).encode
    names = ["core/tree.py", "drafters/ngram.py", "router/retry.py", "model/kv_cache.py"]
    made = conversations(names, args.turns, args.edits, args.seed)
    drafters = {
        "prompt lookup, n-grams of 1 to 4": lambda: NgramDrafter(max_match=4),
        "suffix, own text": lambda: SuffixDrafter(),
        "suffix, own text, factor 1": lambda: SuffixDrafter(max_spec_factor=1.0),
        "suffix, own text, no least frequency": lambda: SuffixDrafter(min_token_prob=0.0),
        "suffix, outputs shared": lambda: SuffixDrafter(shared_tokens=1 << 16),
    }
    print(f"{'accepted tokens per round':40s}" + "".join(f"{f'K={k}':>9s}" for k in args.draft_tokens))
    for name, make in drafters.items():
        row = []
        for k in args.draft_tokens:
            drafter, total, rounds = make(), 0, 0
            for i, turns in enumerate(made):
                context: list[int] = []
                for number, (asked, output) in enumerate(turns):
                    context += encode(asked)
                    tokens = encode(output)
                    num_accepted, num_rounds = accepted(drafter, f"{i}.{number}", context, tokens, k)
                    total, rounds = total + num_accepted, rounds + num_rounds
                    context += tokens
            row.append(total / rounds)
        print(f"{name:40s}" + "".join(f"{value:9.2f}" for value in row))


if __name__ == "__main__":
    main()
