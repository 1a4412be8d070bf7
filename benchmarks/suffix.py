"""Accepted draft tokens per round of suffix decoding and of prompt lookup, on texts of an agent that edits a file.

The texts are made here, by a fixed rule, from source files of this project: each turn's prompt is the conversation so
far, and its output is the whole file again with a few lines changed, as agents that rewrite files write it. Drafters
follow the fixed texts: a round proposes the likeliest path, at most K tokens, and accepts up to the first token that
differs. No model takes part, so that nothing but the drafters is compared. The prompt lookup of a target, which ends
where it expects to be wrong, has a line of its own.

    python benchmarks/suffix.py

The same served: a whole pipeline whose target writes these texts in the place of its model's, whatever is drafted, on
files cut to `--lines`. Draft tokens cost it nothing, so that every step verifies as many as there are. The drafters run
in the target, beside its prompt lookup; one that is not adaptive has none, and verifies all that a request allows.

    python benchmarks/suffix.py --served
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.config import LocalConfig, ModelOptions, TargetModel
from paceline.core.processors import SamplerState
from paceline.core.statistics import DecayingRatio
from paceline.drafters.protocol import Candidates, Drafter, Head, Leaf
from paceline.drafters.suffix import SuffixDrafter, ngram_drafter
from paceline.embedded import TARGET_DIR
from paceline.local import LocalPipeline
from paceline.model.loading import load_model
from paceline.model.step_plan import SequenceStep
from paceline.target.engine import TargetEngine
from paceline.target.lookup import Lookup, new_shares
from paceline.target.mount import MountedHead
from paceline.types import PAGE_SIZE, SamplingParams, SpeculationParams

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


class Rounds(Protocol):
    """What proposes tokens for one text, round by round."""

    def propose(self, num_tokens: int) -> Sequence[int]:
        """The likeliest tokens to come, at most ``num_tokens``."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Appends what was written: accepted tokens of the last proposal, and one more."""
        ...

    def close(self) -> None:
        """Ends the text."""
        ...


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


Begin = Callable[[str, Sequence[int]], Rounds]
"""From a session's name and context."""


def of_drafter(drafter: Drafter) -> Begin:
    """Sessions of one drafter."""
    return lambda session, context: OfDrafter(drafter, session, context)


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


class Replay:
    """A target that writes given texts: the logits of its steps are those of the token that comes next in the text."""

    def __init__(self) -> None:
        self.text: Sequence[int] = ()
        """Prompt and output of the one session that there is."""
        self._vocab_size = 0

    def factory(
        self, num_tokens: int, k: int, heads: Sequence[MountedHead], *, adaptive: bool
    ) -> Callable[[Any], TargetEngine]:
        """What builds its engine for contexts of ``num_tokens``; steps with up to ``k`` draft tokens cost the same."""

        from paceline_bench.virtual import FreeRows

        def build(emit: Any) -> TargetEngine:
            options = ModelOptions(dtype="float32", device="cpu", compile=False)
            runner = load_model(Checkpoint.open(str(TARGET_DIR)), options).runner(num_tokens // PAGE_SIZE + 2)
            self._vocab_size = runner.vocab_size
            runner.forward = self._forward  # type: ignore[method-assign]
            engine = TargetEngine(
                runner,
                emit,
                max_sessions=1,
                max_step_tokens=256,
                max_model_len=num_tokens,
                adaptive=adaptive,
                trees=False,
                heads=heads,
            )
            engine.allocation.cost = FreeRows(k)  # type: ignore[assignment]
            engine._adapt = lambda step: None  # type: ignore[method-assign]
            return engine

        return build

    def _forward(self, steps: Sequence[SequenceStep]) -> Tensor:
        positions = [position for step in steps for position in step.positions[len(step.positions) - step.num_logits :]]
        logits = torch.zeros(len(positions), self._vocab_size)
        for row, position in enumerate(positions):
            logits[row, self.text[position + 1] if position + 1 < len(self.text) else 0] = 100.0
        return logits


class Silent(SuffixDrafter):
    """A head that never has a token, and leaves a target to its own prompt lookup."""

    def expand(self, leaves: Sequence[Leaf]) -> Candidates:
        """Nothing."""
        return Candidates(torch.zeros(len(leaves), 1, dtype=torch.long), torch.full((len(leaves), 1), -torch.inf))


SERVED: dict[str, Callable[[], Head]] = {
    "prompt lookup of the target": Silent,
    "prompt lookup, n-grams of 1 to 4": lambda: ngram_drafter(max_match=4),
    "suffix, own text": SuffixDrafter,
    "suffix, own text, not adaptive": SuffixDrafter,
}
"""What drafts in the target, beside its prompt lookup, which is on unless the target is not adaptive."""


def served(name: str, turns: Sequence[tuple[list[int], list[int]]], k: int) -> float:
    """Accepted tokens per round of turns that a pipeline serves. Raises AssertionError if a text is another one."""
    replay, heads = Replay(), [MountedHead(name, SERVED[name](), num_tokens=k)]
    longest = max(len(context) + len(output) for context, output in turns) + PAGE_SIZE
    checkpoint = replace(Checkpoint.open(str(TARGET_DIR)), max_model_len=longest, eos_token_ids=())
    tokens = rounds = 0
    with LocalPipeline(
        LocalConfig(target=TargetModel(path=str(TARGET_DIR)), worker="thread"),
        target_factory=replay.factory(longest, k, heads, adaptive="not adaptive" not in name),
        tokenizer=load_tokenizer(str(TARGET_DIR)),
        checkpoint=checkpoint,
    ) as pipeline:
        for context, output in turns:
            replay.text = [*context, *output]
            sampling = SamplingParams(max_tokens=len(output), temperature=0, ignore_eos=True)
            speculation = SpeculationParams(max_draft_tokens=k)
            result = pipeline.submit(context, sampling, speculation).result
            assert [*result.token_ids] == output, "another text than the target's"
            tokens, rounds = tokens + result.speculation.accepted, rounds + result.speculation.rounds
    return tokens / rounds


def main() -> None:
    """Prints accepted tokens per round of every drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--edits", type=int, default=6, help="edits of each turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lines", type=int, default=120, help="of each file")
    parser.add_argument("--served", action="store_true", help="by a pipeline, and not by the drafters alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    encode = load_tokenizer(str(TARGET_DIR)).encode
    files = {name: (FILES / name).read_text(encoding="utf-8").splitlines()[: args.lines] for name in NAMES}
    turns = turns_of(conversations(files, args.turns, args.edits, args.seed), encode)
    what = "accepted tokens per round" + (", served" if args.served else "")
    print(f"{what:40s}" + "".join(f"{f'K={k}':>9s}" for k in args.draft_tokens))
    for name in SERVED if args.served else DRAFTERS:
        row = []
        for k in args.draft_tokens:
            row.append(served(name, turns, k) if args.served else per_round(DRAFTERS[name](), turns, k))
        print(f"{name:40s}" + "".join(f"{value:9.2f}" for value in row), flush=True)


if __name__ == "__main__":
    main()
