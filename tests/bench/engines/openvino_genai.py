"""The part of OpenVINO GenAI that a benchmark uses: a pipeline that counts on from the last token of a prompt."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

__version__ = "0.0"
SchedulerConfig = GenerationConfig = SimpleNamespace


def draft_model(path: str, device: str, **options: Any) -> str:
    """The draft as the pipeline takes it."""
    assert device == "CPU"
    return path


class Handle:
    """What the requests of a pipeline are read by."""

    def __init__(self) -> None:
        self.unread: list[list[int]] = []

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        return {0: SimpleNamespace(generated_ids=self.unread.pop(0))}


class ContinuousBatchingPipeline:
    """Steps bring one token to each request, or K + 1 with a draft model."""

    def __init__(self, path: str, scheduler: Any, device: str, options: dict[str, Any]) -> None:
        assert not scheduler.enable_prefix_caching
        self._drafts = "draft_model" in options
        self._open: list[tuple[Handle, list[int], int]] = []

    def add_request(self, number: int, ids: Any, config: Any) -> Handle:
        handle, (last, most) = Handle(), (int(ids.array[0, -1]), config.max_new_tokens)
        self._open.append(
            (handle, list(range(last + 1, last + most + 1)), 1 + getattr(config, "num_assistant_tokens", 0))
        )
        assert self._drafts or not hasattr(config, "num_assistant_tokens")
        return handle

    def has_non_finished_requests(self) -> bool:
        return bool(self._open)

    def step(self) -> None:
        time.sleep(0.002)
        for handle, left, a_step in self._open:
            handle.unread.append([left.pop(0) for _ in range(min(a_step, len(left)))])
        self._open = [item for item in self._open if item[1]]
