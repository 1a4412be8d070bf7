"""Set-up of vLLM's tests over Paceline: stubs first, then its own fixtures, and one line for each test in a record."""

from __future__ import annotations

import json
import os

import openai
import pytest
from tests import stubs, utils

stubs.install(
    (
        "vllm",
        "tblib",
        "schemathesis",
        "openai_harmony",
        "torch",
        "fastapi",
        "transformers",
        "tensorizer",
        "pybase64",
        "gpt_oss",
    )
)


def _asks(value: object) -> bool:
    """True for a server, and what has one: a client, or a tuple with either."""
    if isinstance(value, tuple):
        return any(map(_asks, value))
    return isinstance(value, (utils.RemoteOpenAIServer, openai.AsyncOpenAI, openai.OpenAI))


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("asyncio", "slow_test", "core_model", "cpu_model", "cpu_test", "skip_global_cleanup", "optional"):
        config.addinivalue_line("markers", f"{mark}: of vLLM")


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.num_servers = utils.num_servers


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    asks = utils.num_servers > getattr(item, "num_servers", utils.num_servers) or any(
        map(_asks, getattr(item, "funcargs", {}).values())
    )
    if report.when == "call" or report.outcome != "passed":
        reason = ""
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        elif report.failed:
            reason = str(call.excinfo.value)[:400] if call.excinfo else ""
        line = {"test": item.nodeid, "when": report.when, "outcome": report.outcome, "reason": reason}
        line["asks_server"] = asks
        with open(os.environ["VLLM_TESTS_RECORD"], "a", encoding="utf-8") as record:
            record.write(json.dumps(line) + "\n")
