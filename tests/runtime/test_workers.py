"""Workers with small engines: start errors, deaths, and no process left behind; see ``test_connections.py``."""

import gc
import logging
import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.fakes import Idle

from paceline.config.memory import tune_engine_process
from paceline.errors import ConfigError, EngineError
from paceline.logs import BUILT, STAGES
from paceline.runtime.process_worker import ProcessWorker
from paceline.runtime.workers import ThreadWorker
from paceline_bench.processes import read_process

TIMEOUT_S = 60


class Echo(Idle):
    """Sends every message back; obeys a few words."""

    def __init__(self, emit: Any) -> None:
        self.emit, self.num_received = emit, 0
        self.pending: list[Any] = []

    def receive(self, messages: Any) -> None:
        self.pending += messages
        self.num_received += len(messages)

    def step(self) -> bool:
        if not self.pending:
            return False
        message = self.pending.pop(0)
        if message == "exit":
            os._exit(3)
        if message == "hang":
            time.sleep(3600)
        if message == "environment":
            message = (os.environ.get("OMP_NUM_THREADS"), "torch" in sys.modules, os.getpid())
        self.emit([message])
        return True

    def facts(self) -> dict[str, Any]:
        return {"num_sessions": self.num_received}


@dataclass(frozen=True)
class EchoFactory:
    error: str = ""

    def __call__(self, emit: Any) -> Echo:
        logging.getLogger(STAGES).info("warming %s", "up")
        if self.error == "config":
            raise ConfigError("no such model")
        if self.error:
            raise ZeroDivisionError(self.error)
        return Echo(emit)


class Client:
    """A worker and what it has said."""

    def __init__(self, kind: Any, factory: Any = None) -> None:
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.worker = kind("echo", factory or EchoFactory(), self.deliver, self.deaths.put)

    def deliver(self, messages: Any) -> None:
        for message in messages:
            self.messages.put(message)

    def next(self) -> Any:
        return self.messages.get(timeout=TIMEOUT_S)


@pytest.fixture(params=[ThreadWorker, ProcessWorker])
def kind(request):
    return request.param


@pytest.fixture
def client(kind):
    client = Client(kind)
    client.worker.start()
    yield client
    client.worker.stop(timeout_s=0.5)


def test_the_facts_of_an_engine_are_those_of_its_last_round(client):
    assert client.worker.facts == {"num_sessions": 0}
    client.worker.send(["one", "two"])
    assert [client.next(), client.next()] == ["one", "two"]
    assert client.worker.came_round()
    client.worker.send(["three"])  # its answer comes after that of the question
    assert client.next() == "three"
    assert client.worker.facts["num_sessions"] in (2, 3)


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [("config", ConfigError, "^no such model$"), ("other", EngineError, "ZeroDivisionError: other")],
)
def test_start_raises_the_error_of_the_factory(kind, error, expected, message):
    client = Client(kind, EchoFactory(error))
    with pytest.raises(expected, match=message):
        client.worker.start()
    client.worker.stop()
    assert not client.worker.alive
    assert client.deaths.empty()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize("num_cores", [1, 2])
def test_what_an_engine_of_several_cores_sends_is_taken_on_another_than_its_first(num_cores):
    """On its first one it goes on; of an engine with one core nothing is known that rests."""
    allowed = sorted(os.sched_getaffinity(0))
    cores: queue.SimpleQueue[set[int]] = queue.SimpleQueue()
    worker = ProcessWorker(
        "echo", EchoFactory(), lambda _: cores.put(os.sched_getaffinity(0)), print, allowed[:num_cores]
    )
    worker.start()
    worker.send(["message"])
    assert cores.get(timeout=TIMEOUT_S) == {*allowed[num_cores > 1 :]}
    worker.stop()
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_death_of_the_process_is_reported():
    client = Client(ProcessWorker)
    client.worker.start()
    client.worker.send(["exit"])
    assert "its process ended" in client.deaths.get(timeout=TIMEOUT_S)
    client.worker.send(["too late"])
    client.worker.stop()


def test_killed_while_it_is_busy():
    client = Client(ProcessWorker)
    client.worker.start()
    client.worker.send(["hang"])
    os.kill(client.worker.pid, signal.SIGKILL)
    assert "its process ended" in client.deaths.get(timeout=TIMEOUT_S)
    client.worker.stop()


def test_a_hanging_process_is_killed():
    client = Client(ProcessWorker)
    client.worker.start()
    client.worker.send(["hang"])
    client.worker.stop(timeout_s=0.3)
    assert not client.worker.alive
    assert client.deaths.empty()


def test_thread_limits_are_set_before_the_factory_is_loaded():
    client = Client(ProcessWorker)
    client.worker.start()
    client.worker.send(["environment"])
    threads, torch_loaded, pid = client.next()
    client.worker.stop()
    assert threads == "1"
    assert not torch_loaded  # this engine needs none: importing paceline.runtime.workers must not load it
    assert pid != os.getpid()


def test_no_process_outlives_its_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            sys.path[:0] = {path!r}
            from test_workers import Client, ProcessWorker
            if __name__ == "__main__":
                client = Client(ProcessWorker)
                client.worker.start()
                client.worker.send(["hang"])
                print(client.worker.pid, flush=True)
                time.sleep(3600)
            """
        ).format(path=[os.path.dirname(__file__), *filter(None, sys.path)])
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + TIMEOUT_S
    while read_process(pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_relay_between_two_workers():
    """Target, relay in this process, draft and back, many times."""
    done = threading.Event()
    came_back: list[int] = []

    def from_first(messages: Any) -> None:
        second.worker.send(list(messages))

    def from_second(messages: Any) -> None:
        came_back.extend(messages)
        if len(came_back) == 200:
            done.set()
        else:
            first.worker.send([len(came_back)])

    first, second = Client(ProcessWorker), Client(ProcessWorker)
    first.worker._on_messages = from_first
    second.worker._on_messages = from_second
    first.worker.start()
    second.worker.start()
    first.worker.send([0])
    assert done.wait(TIMEOUT_S)
    first.worker.stop()
    second.worker.stop()
    assert came_back == list(range(200))


def test_what_is_there_when_an_engine_is_built_is_not_collected_again() -> None:
    frozen, limits = gc.get_freeze_count(), gc.get_threshold()
    try:
        gc.set_threshold(700)
        tune_engine_process()
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold()[0] > 10_000, "steps make thousands of objects"
        gc.set_threshold(0)
        tune_engine_process()
        assert gc.get_threshold()[0] == 0, "who turned collection off keeps it off"
    finally:
        gc.set_threshold(*limits)
        gc.unfreeze()


def test_a_settled_process_keeps_the_memory_of_its_steps():
    """Blocks as of a step of many tokens: untuned, each of them comes back from the system page by page."""
    script = """
import ctypes, resource, sys
from paceline.config.memory import tune_engine_process
if "tune_engine_process" in sys.argv:
    tune_engine_process()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.memset.restype = ctypes.c_void_p
def step():
    blocks = [libc.malloc(20 << 20) for _ in range(4)]
    for block in blocks:
        libc.memset(block, 1, 20 << 20)
    for block in blocks:
        libc.free(block)
step(); step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    faults = [
        int(subprocess.run([sys.executable, "-c", script, word], capture_output=True, text=True, check=True).stdout)
        for word in ("tune_engine_process", "nothing")
    ]
    assert faults[0] < 100 < faults[1]


def test_stages_of_a_process_are_logged_by_its_parent(caplog):
    caplog.set_level(logging.INFO, STAGES)
    worker = ProcessWorker("target", EchoFactory(), lambda messages: None, lambda reason: None)
    try:
        worker.start()
        told = [(record.engine, record.getMessage()) for record in caplog.records if record.name == STAGES]
        assert told == [("target", "warming up"), ("target", BUILT)]
    finally:
        worker.stop()
