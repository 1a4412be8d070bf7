"""Runs vLLM's own tests of its HTTP API against Paceline: ``make vllm-tests``.

The tests come out of vLLM's source distribution and are never kept in this repository; ``vllm_shim`` stands for the
parts of vLLM that they import. What does not apply is listed with its reason in ``vllm_shim/not_applicable.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.clients.checkpoint import save_chat_checkpoint
from tests.clients.server import serving
from tests.clients.vllm_shim.not_applicable import DIFFERENT, NOT_APPLICABLE, reason_of
from tests.support.zoo import folder

VERSION = "0.33.0"
SHIM = Path(__file__).with_name("vllm_shim")
NOT_APPLICABLE_FILE = "vllm_shim/not_applicable.py"
CLIENTS = Path("build/clients/bin/python").absolute()
HOME = Path("build/vllm")
NAMES = (
    *("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B", "Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct"),
    *("HuggingFaceH4/zephyr-7b-beta", "openai-community/gpt2", "gpt2"),
)
"""Models that the tests name. Those of other kinds, as of LoRA adapters, are not there."""


def fetch(into: Path) -> Path:
    """The folder of vLLM's sources; its package is fetched if it is not there, and not built."""
    found = next(into.glob("*/*/tests/entrypoints/openai"), None)
    if found is None:
        into.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-clean", "--no-deps", "--no-build-isolation"]
        # It is unpacked, and then its build fails: that is all that is needed of it.
        subprocess.run(
            [*pip, "--no-binary", "vllm", "-d", str(into), f"vllm=={VERSION}"],
            env={**os.environ, "TMPDIR": str(into.resolve())},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        found = next(into.glob("*/*/tests/entrypoints/openai"), None)
        if found is None:
            raise SystemExit(f"vllm=={VERSION} could not be fetched as a source distribution")
    return found.parents[2]


def lay(source: Path, suite: Path) -> None:
    """Lays the tests out with the shim in the place of what they import."""
    shutil.rmtree(suite, ignore_errors=True)
    tests = suite / "tests"
    shutil.copytree(source / "tests/entrypoints/openai", tests / "entrypoints/openai")
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(source / "tests/entrypoints" / name, tests / "entrypoints")
    for name in ("stubs.py", "utils.py", "conftest.py"):
        shutil.copy(SHIM / name, tests)
    (tests / "__init__.py").touch()
    (suite / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\ntimeout = 120\n", encoding="utf-8")


def _servers(tokenizer: Path) -> list[contextlib.AbstractContextManager[str]]:
    """Servers of a checkpoint that thinks, of one that does not, and of one that counts without being asked."""
    thinking = save_chat_checkpoint(HOME / "thinking", tokenizer)
    plain = save_chat_checkpoint(HOME / "plain", tokenizer, thinks=False)
    counting = save_chat_checkpoint(HOME / "counting", tokenizer, thinks=False)
    servers = ((thinking, ()), (plain, ()), (counting, ("--enable-force-include-usage",)))
    return [serving(checkpoint, "--drafter", "suffix", *options, names=NAMES) for checkpoint, options in servers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, help="vLLM's sources, if they are there already")
    parser.add_argument("--url", nargs=3, help="servers that run already, as _servers has them")
    parser.add_argument("--report", action="store_true", help="only tell what the last run has found")
    parser.add_argument("tests", nargs="*", help="arguments of pytest; default: all")
    args = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    record = (HOME / "record.jsonl").resolve()
    if not args.report:
        record.unlink(missing_ok=True)
        lay(args.source or fetch(HOME / "source"), HOME / "suite")
        with contextlib.ExitStack() as stack:
            tokenizer = folder("qwen3")
            urls = args.url or [stack.enter_context(one) for one in _servers(tokenizer)]
            environment = {
                **os.environ,
                "VLLM_TESTS_RECORD": str(record),
                "CLIENTS_CHECKPOINT": str(tokenizer.resolve()),
            }
            environment |= dict(zip(("CLIENTS_THINKING", "CLIENTS_PLAIN", "CLIENTS_COUNTING"), urls, strict=True))
            options = ["-q", "-p", "no:cacheprovider", "--tb", "short", "-W", "ignore"]
            options += ["--continue-on-collection-errors", *(args.tests or ["tests/entrypoints/openai"])]
            subprocess.run(
                [str(CLIENTS), "-m", "pytest", *options],
                cwd=HOME / "suite",
                env=environment,
                check=False,
            )
    raise SystemExit(report(record))


def report(record: Path) -> int:
    """Prints the counts, and each test that fails; returns the number of those that fail without a reason."""
    outcomes: dict[str, dict[str, Any]] = {}
    for line in record.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        test = one["test"].removeprefix("tests/entrypoints/openai/")
        if outcomes.get(test, {}).get("outcome") != "failed":
            outcomes[test] = one
    counts: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    unexplained = 0
    for test, one in sorted(outcomes.items()):
        reason, missed = one["reason"].removeprefix("Skipped: "), reason_of(test, NOT_APPLICABLE)
        if one["outcome"] == "skipped":
            if "not served: " in reason:
                missing[reason.split("not served: ")[1].split(" (")[0]] += 1
            else:
                counts["without a server"] += 1
        elif missed and one["outcome"] == "failed":
            missing[missed] += 1
        elif not one["asks_server"]:
            counts["without a server"] += 1
        elif one["outcome"] == "passed":
            counts["passed"] += 1
            if missed or reason_of(test, DIFFERENT):
                print(f"passes in spite of its line in {NOT_APPLICABLE_FILE}: {test}")
        else:
            why = reason_of(test, DIFFERENT)
            counts["failed"] += 1
            unexplained += why is None
            print(f"FAILED {test}: {why or repr(reason[:300])}")
    applicable = counts["passed"] + counts["failed"]
    print(f"{len(outcomes)} tests, {counts['without a server']} of them of vLLM's own code, without a server")
    print(f"{sum(missing.values())} of the HTTP API do not apply, as there are none of:")
    for what, num in missing.most_common():
        print(f"  {num:3d} {what}")
    print(f"{counts['passed']} of {applicable} tests that apply pass: {counts['passed'] / max(applicable, 1):.1%}")
    return unexplained


if __name__ == "__main__":
    main()
