"""Sums and gathers of one launch: by triton's interpreter between processes, and compiled for devices."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.model.attention.test_interpreter import ROOT, environment

pytestmark = pytest.mark.slow
COMPILE = """
import re, sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from paceline.model.parallel.one_shot import _exchange

for degree, (name, dtype), sums, twice in (
    (2, ("bf16", tl.bfloat16), True, False), (8, ("fp32", tl.float32), True, False),
    (4, ("i16", tl.int16), False, False), (4, ("bf16", tl.bfloat16), True, True),
):
    sizes = dict(RANK=1, DEGREE=degree, BLOCK=1024, BLOCK_BYTES=4096, NUM_BLOCKS=2048, DTYPE=dtype, SUMS=sums,
                 TWICE=twice, TIMED=True)
    types = dict(addresses="*i64", calls="*i32", broken="*i32", told="*i32", given="*" + name, result="*" + name,
                 count="i32", limit="i64")
    names = [p.name for p in _exchange.params]
    constants = {(i,): sizes[n] for i, n in enumerate(names) if n.isupper()}
    source = ASTSource(fn=_exchange, signature={n: types.get(n, "constexpr") for n in names}, constexprs=constants)
    ptx = compile(source, GPUTarget("cuda", int(sys.argv[1]), 32)).asm["ptx"]
    lines = ptx.splitlines()
    raised = [i for i, line in enumerate(lines) if re.search("atom.*sys.*release.*exch", line)]
    looks = [i for i, line in enumerate(lines) if re.search(r"acquire.*sys|sys.*acquire", line)]
    read = [i for i, line in enumerate(lines) if "ld.volatile" in line]
    barriers = [i for i, line in enumerate(lines) if "bar.sync" in line]
    assert len(raised) == degree + twice, len(raised)
    assert len(looks) >= 2 * degree, "one before the loop, one in it"
    assert len(read) >= degree, "the terms are not read from memory"
    assert any(i < raised[0] for i in barriers), "a counter is raised before all threads have written"
    assert any(looks[-1] < i < read[0] for i in barriers), "threads read before one has seen the counters"
    assert "globaltimer" in ptx
"""


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


@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_the_kernel_compiles_for_devices(capability: str, tmp_path: Path) -> None:
    """An A100, an H100 and a B200. Counters are raised by a release and read by an acquire of the whole system."""
    given = environment(TRITON_CACHE_DIR=str(tmp_path))
    script = tmp_path / "compile_one_shot.py"
    script.write_text(COMPILE)
    run = subprocess.run([sys.executable, str(script), capability], cwd=ROOT, env=given, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
