"""What suffixes bring over prompt lookup on texts of an agent that edits files, by a fixed rule and without a clock."""

import random
import re
from collections.abc import Sequence

import pytest
from benchmarks import suffix

from paceline.types import MAX_DRAFT_TOKENS

K = 16


def file_of(choice: random.Random) -> list[str]:
    """Lines of a file that has few words, as source files have."""
    words = [f"word_{i}" for i in range(60)]
    often = [1 / (i + 1) for i in range(60)]

    def line() -> str:
        name, call, *arguments = choices(choice.randrange(3, 6))
        return choice.choice(
            (f"    {name} = {call}({', '.join(arguments)})", f"    if {name}.{call}:", f"def {name}():")
        )

    def choices(count: int) -> list[str]:
        return choice.choices(words, often, k=count)

    return [line() for _ in range(60)]


@pytest.fixture(scope="module")
def turns() -> list[tuple[list[int], list[int]]]:
    choice, ids = random.Random(3), dict[str, int]()

    def encode(text: str) -> list[int]:
        return [ids.setdefault(piece, len(ids)) for piece in re.findall(r"\w+|\s+|[^\w\s]", text)]

    files = {f"file_{i}": file_of(choice) for i in range(2)}
    return suffix.turns_of(suffix.conversations(files, num_turns=3, num_edits=4, seed=1), encode)


def per_round(name: str, turns: Sequence[tuple[list[int], list[int]]], k: int) -> float:
    return suffix.per_round(suffix.DRAFTERS[name](), turns, k)


@pytest.mark.parametrize("k", [K, MAX_DRAFT_TOKENS])
def test_suffixes_bring_half_as_much_again_as_prompt_lookup(turns: list[tuple[list[int], list[int]]], k: int) -> None:
    suffixes = per_round("suffix, own text", turns, k)
    for name in ("prompt lookup, n-grams of 1 to 4", "prompt lookup of the target"):
        assert suffixes >= 1.5 * per_round(name, turns, k), name


def test_a_longer_proposal_has_more_of_them(turns: list[tuple[list[int], list[int]]]) -> None:
    assert per_round("suffix, own text", turns, MAX_DRAFT_TOKENS) > 1.3 * per_round("suffix, own text", turns, K)
