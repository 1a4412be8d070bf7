"""Shared by all tests: one torch thread, reproducible property tests, and the ring of the tools."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("paceline", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")

TOOLS = ("tests/bench/", "tests/plan/", "tests/k8s/", "tests/cluster/test_files.py", "tests/cli/test_plan.py")
"""What these tests cover does not serve: benchmark, planner, manifests and cluster files."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of the tools, before any option chooses among the marks."""
    for item in items:
        if item.nodeid.startswith(TOOLS):
            item.add_marker(pytest.mark.tools)
