"""Accepted draft tokens per round of suffix decoding and of prompt lookup, on texts of an agent that edits a file.

The texts are made here, by a fixed rule, from source files of this project: each turn's prompt is the conversation so
far, and its output is the whole file again with a few lines changed, as agents that rewrite files write it. Drafters
follow the fixed texts: a round proposes the likeliest path, at most K tokens, and accepts up to the first token that
differs. No model takes part, so that nothing but the drafters is compared. The prompt lookup of a target, which ends
where it expects to be wrong, has a line of its own.

    python benchmarks/suffix.py
"""

from __future__ import annotations

import argparse
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.core.processors import SamplerState
from paceline.core.statistics import DecayingRatio
from paceline.drafters.protocol import Drafter, Leaf
from paceline.drafters.suffix import SuffixDrafter, ngram_drafter
from paceline.embedded import TARGET_DIR
from paceline.target.lookup import Lookup, new_shares
from paceline.types import SamplingParams

NAMES = ("core/tree.py", "drafters/suffix.py", "router/retry.py", "model/kv_cache.py")
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


def conversations(
    files: Mapping[str, Sequence[str]], num_turns: int, num_edits: int, seed: int
) -> list[list[tuple[str, str]]]:
    """For each file, given by its lines, the turns of an agent: (what is new in the prompt, output)."""
    choice, found = random.Random(seed), []
    for name, lines in files.items():
        turns = []
        for number in range(num_turns):
            new = edited(lines, choice, num_edits)
            at = choice.randrange(len(lines))
            asked = f"\nTurn {number}: the tests of {name} fail at line {at}. Write it again.\n"
            turns.append((("\n".join(lines) if number == 0 else "") + asked, "\n".join(new)))
            lines = new
        found.append(turns)
    return found


class OfDrafter:
    """The rounds of a session of a drafter."""

    def __init__(self, drafter: Drafter, session: str, context: Sequence[int]) -> None:
        self._drafter, self._session = drafter, session
        drafter.open(session, context, SamplerState(SamplingParams(), 0, context, vocab_size=1 << 20), "")
        while not drafter.ready(session):
            drafter.prefill()

    def propose(self, num_tokens: int) -> Sequence[int]:
        """The likeliest path; its nodes are numbered from 0."""
        path: list[int] = []
        while len(path) < num_tokens:
            candidates = self._drafter.expand([Leaf(self._session, len(path), tuple(range(len(path))), tuple(path))])
            if candidates.log_q[0, 0] == -float("inf"):
                break
            path.append(int(candidates.token_ids[0, 0]))
        return path

    def advance(self, token_ids: Sequence[int]) -> None:
        """Extends the context."""
        self._drafter.advance(self._session, token_ids, range(len(token_ids)), ())

    def close(self) -> None:
        """Closes the session."""
        self._drafter.close(self._session)


class OfLookup:
    """The rounds of a target's own prompt lookup."""

    def __init__(self, shares: Sequence[DecayingRatio], context: Sequence[int]) -> None:
        self._tokens = [*context]
        self._lookup = Lookup(self._tokens, shares)

    def propose(self, num_tokens: int) -> Sequence[int]:
        """What it looks up."""
        return self._lookup.proposal(num_tokens).token_ids

    def advance(self, token_ids: Sequence[int]) -> None:
        """Extends the text."""
        self._tokens += token_ids

    def close(self) -> None:
        """Does nothing."""


Rounds = OfDrafter | OfLookup
Begin = Callable[[str, Sequence[int]], Rounds]
"""From a session's name and context."""


def of_drafter(drafter: Drafter) -> Begin:
    """Sessions of one drafter."""
    return functools.partial(OfDrafter, drafter)


def of_lookup() -> Begin:
    """Sessions of one target."""
    shares = new_shares()
    return lambda session, context: OfLookup(shares, context)


def accepted(rounds: Rounds, output: Sequence[int], k: int) -> tuple[int, int]:
    """Accepted tokens and rounds of one output."""
    at = num_accepted = num_rounds = 0
    while at < len(output):
        path = rounds.propose(min(k, len(output) - at - 1))
        right = next((i for i, token in enumerate(path) if token != output[at + i]), len(path))
        num_rounds, num_accepted = num_rounds + 1, num_accepted + right
        rounds.advance(output[at : at + right + 1])
        at += right + 1
    rounds.close()
    return num_accepted, num_rounds


def turns_of(
    made: Sequence[Sequence[tuple[str, str]]], encode: Callable[[str], Sequence[int]]
) -> list[tuple[list[int], list[int]]]:
    """(context, output) of every turn of some conversations, in tokens."""
    found = []
    for turns in made:
        context: list[int] = []
        for asked, output in turns:
            context += encode(asked)
            tokens = [*encode(output)]
            found.append(([*context], tokens))
            context += tokens
    return found


def per_round(begin: Begin, turns: Sequence[tuple[list[int], list[int]]], k: int) -> float:
    """Accepted tokens per round of all turns, one after another."""
    counted = [accepted(begin(str(i), context), output, k) for i, (context, output) in enumerate(turns)]
    return sum(tokens for tokens, _ in counted) / sum(rounds for _, rounds in counted)


DRAFTERS: dict[str, Callable[[], Begin]] = {
    "prompt lookup, n-grams of 1 to 4": lambda: of_drafter(ngram_drafter(max_match=4)),
    "prompt lookup of the target": of_lookup,
    "suffix, own text": lambda: of_drafter(SuffixDrafter()),
    "suffix, own text, factor 1": lambda: of_drafter(SuffixDrafter(max_spec_factor=1.0)),
    "suffix, own text, no least frequency": lambda: of_drafter(SuffixDrafter(min_token_prob=0.0)),
    "suffix, outputs shared": lambda: of_drafter(SuffixDrafter(shared_tokens=1 << 16)),
}


def main() -> None:
    """Prints accepted tokens per round of every drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--edits", type=int, default=6, help="edits of each turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=int, default=120, help="of each file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    encode = load_tokenizer(str(TARGET_DIR)).encode
    files = {name: (FILES / name).read_text(encoding="utf-8").splitlines()[: args.lines] for name in NAMES}
    turns = turns_of(conversations(files, args.turns, args.edits, args.seed), encode)
    print(f"{'accepted tokens per round':40s}" + "".join(f"{f'K={k}':>9s}" for k in args.draft_tokens))
    for name, begin in DRAFTERS.items():
        row = [per_round(begin(), turns, k) for k in args.draft_tokens]
        print(f"{name:40s}" + "".join(f"{value:9.2f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
