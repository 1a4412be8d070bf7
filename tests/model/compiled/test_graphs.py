"""The recorder of CUDA graphs, without a GPU: what it refuses before it records, and that engines take turns."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from paceline.model.compiled import graphs
from paceline.model.compiled.graphs import CudaRecorder, WaitingRefused

MASK = torch.tensor([True, False])


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x.nonzero(),
        lambda x: x[MASK],
        lambda x: x.index_put_([MASK], torch.zeros(())),
        lambda x: x.masked_select(MASK),
        lambda x: torch.equal(x, x),
    ],
)
def test_what_waits_for_the_device_is_refused_in_this_thread_alone(waits) -> None:
    waits(torch.ones(2))
    with WaitingRefused():
        with pytest.raises(RuntimeError, match="waits for the device"):
            waits(torch.ones(2))
        elsewhere = threading.Thread(target=waits, args=(torch.ones(2),))
        elsewhere.start()
        elsewhere.join()
    waits(torch.ones(2))


def test_a_copy_to_the_host_waits() -> None:
    with WaitingRefused(), pytest.raises(RuntimeError, match="waits for the device"):
        torch.ones(2, device="meta").to("cpu")


def test_arithmetic_and_indexing_by_numbers_do_not_wait() -> None:
    x, at = torch.arange(6.0).view(2, 3), torch.tensor([1, 0])
    with WaitingRefused():
        y = torch.softmax(x[at] @ x.T, -1).index_select(0, at)
        y.index_put_((at,), torch.zeros(2, 2))
        assert y.shape == (2, 2)


class FakeCuda(SimpleNamespace):
    """The part of ``torch.cuda`` that a recorder calls; says what is called while a graph is captured."""

    def __init__(self) -> None:
        super().__init__(log=[], capturing=0)
        self.Stream = lambda device: SimpleNamespace(wait_stream=lambda other: None)
        self.graph_pool_handle = lambda: (0, 0)
        self.current_stream = self.Stream
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        yield

    def synchronize(self, device: torch.device) -> None:
        assert not self.capturing, "the device waits while another thread captures"

    @contextlib.contextmanager
    def graph(self, graph: object, **options: object) -> Iterator[None]:
        assert not self.capturing, "two captures at once"
        self.capturing += 1
        self.log.append("captured")
        yield
        self.capturing -= 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(graphs.torch, "cuda", fake)
    return fake


def in_threads(call: Callable[[], None], count: int) -> None:
    """Runs ``call`` in so many threads at once."""
    with ThreadPoolExecutor(count) as threads:
        for _ in range(count):
            threads.submit(call)


def test_engines_of_one_process_record_one_after_the_other(cuda: FakeCuda) -> None:
    failures: list[BaseException] = []

    def record() -> None:
        try:
            recorder = CudaRecorder(torch.device("cpu"))
            for _ in range(5):
                recorder.record(lambda: time.sleep(0.002))
        except BaseException as error:
            failures.append(error)

    in_threads(record, 3)
    assert failures == []
    assert cuda.log == ["captured"] * 15


def test_without_turns_two_captures_would_meet(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "RECORDING", contextlib.nullcontext())
    both = threading.Barrier(2)
    errors: list[str] = []
    calls = threading.local()

    def step() -> None:
        calls.number = getattr(calls, "number", 0) + 1
        if calls.number == 4:  # the captured one
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(60)

    def record() -> None:
        try:
            CudaRecorder(torch.device("cpu")).record(step)
        except AssertionError as error:
            errors.append(str(error))
            both.abort()

    in_threads(record, 2)
    assert len(errors) == 1


def test_a_step_that_waits_is_not_captured(cuda: FakeCuda) -> None:
    recorder = CudaRecorder(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="waits for the device"):
        recorder.record(lambda: torch.ones(2).nonzero())
    assert cuda.log == []
    recorder.record(lambda: torch.ones(2))
    assert cuda.log == ["captured"]
