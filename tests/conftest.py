"""Shared by all tests: one torch thread, reproducible property tests, the tools' ring, the skip without a compiler."""

import contextlib
import gc
import importlib.util
import os
import sys
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A third of the time in which a small model is compiled is that of optimizing what calls its kernels.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# The same examples in each run: no change is refused for what it has not touched.
settings.register_profile(
    "paceline", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("paceline")

TOOLS = (
    *("tests/bench/", "tests/plan/", "tests/k8s/", "tests/examples/"),
    *("tests/cluster/test_files.py", "tests/cli/test_plan.py"),
)
"""What these tests cover does not serve: benchmark, planner, manifests, cluster files and examples."""

collect_ignore = ["clients"]
"""Run by ``make test-clients`` and ``make vllm-tests``, in an environment that does not see this package."""

COLLECTED: pytest.StashKey[list[pytest.Item]] = pytest.StashKey()
"""All tests that were collected, those of other rings included."""

GROUPS = {
    "processes": (
        "tests/service/",
        "tests/runtime/test_ranks.py",
        "tests/model/test_families.py",
        "tests/model/parallel/test_collectives.py",
        "tests/model/parallel/test_plan.py",
    ),
    "local": ("tests/local/",),
    "client": ("tests/client/",),
    "web": ("tests/web/",),
}
"""Tests of one group run one after the other in one process, and so do those of any other file.

``processes``: several processes that exchange messages all the time. The others share fixtures that take seconds.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spares the garbage collector the million objects that stay until the end: imported modules and tests. It looks
    for others as rarely as in a process of an engine."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


def _with_room(run: Any) -> object:
    """Runs beneath a frame that takes a block of the interpreter's stack of its own, half of which is free.

    CPython gets its stack in blocks of 16 KiB, and gives each back when the first frame in it returns. A loop whose
    calls cross the end of a block would spend most of its time on that.
    """
    return run()


_with_room.__code__ = _with_room.__code__.replace(co_stacksize=1 << 16)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    loop = session.config.pluginmanager.subset_hook_caller("pytest_runtestloop", [sys.modules[__name__]])
    return _with_room(lambda: loop(session=session))


@pytest.hookimpl(optionalhook=True)  # other environments have no pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file is a group: what its tests share is made in one process, not in each."""
    from xdist.scheduler import LoadGroupScheduling

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid).partition("::")[0]

    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives the marks that go by folder, and keeps the list of all tests, before any option chooses among the marks."""
    for item in items:
        if item.nodeid.startswith(TOOLS):
            item.add_marker(pytest.mark.tools)
        for name, folders in GROUPS.items():
            if item.nodeid.startswith(folders):
                item.add_marker(pytest.mark.xdist_group(name))
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"{addresses[0]}: its id is another one in each process: give its parameters ids")
    if items:
        items[0].config.stash[COLLECTED] = list(items)


@pytest.fixture(autouse=True, scope="session")
def _exempt_for_good() -> Iterator[None]:
    """Keeps what is exempt from collection so. An engine's thread exempts what is there when the engine is built, and
    ends that for all objects when it stops; among those of all tests each collection then takes more than a second.

    Sessions may spend a minute in their grammars: a virtual machine that stands still counts that as CPU time."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("paceline"):  # other environments run their tests without the package
            patch.setattr("paceline.runtime.build.tune_engine_process", lambda: None)
            patch.setattr("paceline.checkpoint.grammar_matcher.FREE_S", 60.0)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache for one test. It holds native operators alone, which are those of the cache that is kept."""
    return _use_cache(tmp_path / "own-cache", monkeypatch)


@pytest.fixture
def compiled_steps(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lets a test share compiled models with all others of this run that ask for it: equal ones are compiled once."""
    base = tmp_path_factory.getbasetemp()
    return _use_cache((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled-steps", monkeypatch)


def _use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes ``folder`` the cache of this process and of those that it starts, with the operators that are there."""
    from paceline.config import cache_dir  # other environments run their tests without the package

    kept = cache_dir() / "operators"
    for each in (kept, folder):
        each.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):  # another process of this run has made it
        (folder / "operators").symlink_to(kept)
    monkeypatch.setenv("PACELINE_CACHE", str(folder))
    return folder


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines' processes import torch and transformers once for all; in use, each imports them for seconds."""
    from tests.support.processes import context

    monkeypatch.setattr("paceline.runtime.process_worker.multiprocessing.get_context", lambda _: context)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine."""
    from tests.support.loops import finish, run_test  # other environments need not see this folder

    return run_test(pyfuncitem, finish)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds torch's numbers by the test alone, so that they are the same after whatever other tests. Skips what needs a
    compiler where there is none, before its fixtures: here, so that the summary has one line."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(zlib.crc32(item.nodeid.partition("@")[0].encode()))
    if item.get_closest_marker("compiler") is not None:
        from tests.support.compilers import lacking  # other environments run their tests without the package

        if reason := lacking(item):
            pytest.skip(reason)
