"""Sums and gathers of one launch, by triton's interpreter between processes."""

import subprocess
import sys

import pytest
from tests.model.attention.test_interpreter import ROOT, environment

pytestmark = pytest.mark.slow


def said(case: str, *changes: str) -> str:
    """What ``one_shot_ranks`` prints."""
    command = [sys.executable, "-m", "tests.model.parallel.one_shot_ranks", case, *changes]
    given = environment(TRITON_INTERPRET="1")
    run = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout.splitlines()[-1]


def test_ranks_out_of_step_have_the_bits_of_a_sum_in_their_order() -> None:
    """Of two, three and four ranks, one- and two-shot; past the last number of a counter; of gathers; when a rank reads
    late, or dies, or the owner of a block does."""
    assert said("all") == "holds"


OWN_FIRST = (
    *("inner, DEGREE, DTYPE)", "inner, DEGREE, DTYPE, RANK)"),
    *("DTYPE: tl.constexpr):", "DTYPE: tl.constexpr, RANK: tl.constexpr):"),
    *("first = (tl.load(addresses) + slot)", "first = (tl.load(addresses + RANK) + slot)"),
    *("tl.load(addresses + other) + slot", "tl.load(addresses + (RANK + other) % DEGREE) + slot"),
)


@pytest.mark.parametrize(
    ("case", "changes", "answer"),
    [
        ("overtaken", ("(call & 1)", "(call & 0)"), "rank 1 reads in call 0 what rank 0 wrote for the next"),
        ("3 float32", OWN_FIRST, "call 0 of rank 0 of 3 in torch.float32 is another sum"),
        ("3 float16", ("volatile=True).to(tl.float32)", "volatile=True)"), "call 0 of rank 0 of 3 in torch.float16 is"),
        (
            "deaths",
            ("if late == 0:", "if late < 2:"),
            "((False, True), [True, True, True], [5",
        ),
        ("deaths", ('float("nan")', "0.0"), "((False, True), [False, False, True]"),
        ("wrapped", ('scope="sys") - call', 'scope="sys").to(tl.int64) - call'), "a rank that is ahead is taken for"),
        ("owners", ("(owner == RANK) | (owner == other)", "owner == RANK"), "blocks without a sum: [False, False"),
    ],
    ids=[
        "one slot",
        "own term first",
        "sums in 16 bits",
        "a broken rank goes on",
        "a broken rank gives zeros",
        "counters that wrap around are compared as numbers",
        "nobody waits for the owner of a block",
    ],
)
def test_a_mutant_of_the_kernel_is_caught(case: str, changes: tuple[str, ...], answer: str) -> None:
    assert said(case, *changes).startswith(answer)
