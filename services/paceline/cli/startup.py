"""Progress of a start, on standard error: the stage and seconds of each part, live on a terminal and as plain lines
elsewhere. Once it is ready, suggests commands.

Stages are log records of ``STAGES`` from engines of this machine (``paceline.logs``), or what a cluster tells.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn

from paceline.config import ServerConfig
from paceline.logs import BUILT, STAGES, is_quiet, narrate

if TYPE_CHECKING:
    from paceline.local import LocalPipeline

_PROMPT = "def read_file(path):"


@dataclass(frozen=True, slots=True)
class _Stage:
    doing: str
    began_s: float
    task: TaskID | None


class StartView(logging.Handler):
    """Shows what each part that is starting does, from the beginning of the block to its end or ``close``.

    On a terminal each part has a line with a spinner and its seconds; finished stages stay above with their durations.
    Elsewhere each stage is one line when it begins, with the seconds since the start. With --quiet nothing is shown.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        live: bool = True,
        lasting: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``live``: False for plain lines on a terminal, too. ``lasting``: False to erase all lines at the end, and to
        show nothing without a terminal."""
        super().__init__(logging.INFO)
        self._console = console or Console(stderr=True)
        self._clock, self._began_s = clock, clock()
        self._lasting = lasting and not is_quiet()
        self._stages: dict[str, _Stage] = {}
        columns = (SpinnerColumn(), TextColumn("{task.description} {task.elapsed:.0f} s"))
        self.is_live = live and self._console.is_terminal and not is_quiet()
        """True if stages are shown while they last."""
        self._bars = Progress(*columns, console=self._console, transient=True) if self.is_live else None

    def __enter__(self) -> Self:
        logger = logging.getLogger(STAGES)
        self._before = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # --verbose would print it once again
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the view: later stages are not shown. Idempotent."""
        logger = logging.getLogger(STAGES)
        if self in logger.handlers:
            logger.removeHandler(self)
            logger.setLevel(self._before[0])
            logger.propagate = self._before[1]
            for part in list(self._stages):
                self._end(part)
            if self._bars is not None:
                self._bars.stop()
        super().close()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began_s

    def emit(self, record: logging.LogRecord) -> None:
        """Notes a stage of an engine, which is named by the record's ``engine`` or its thread."""
        if hasattr(record, "execution"):  # of an engine that serves already
            return
        self.note(getattr(record, "engine", (record.threadName or "").removeprefix("paceline-")), record.getMessage())

    def note(self, part: str, doing: str) -> None:
        """Shows that ``part`` does this now; ``BUILT``: it has started. Any thread may call it."""
        with self._locked():
            if part in self._stages and self._stages[part].doing == doing:
                return
            self._end(part)
            if doing == BUILT:
                return
            task = None
            if self._bars is not None:
                task = self._bars.add_task(f"{part}: {doing}", total=None)
            else:
                self._say(f"{part}: {doing} ({self.elapsed_s:.1f} s)")
            self._stages[part] = _Stage(doing, self._clock(), task)

    def _end(self, part: str) -> None:
        stage = self._stages.pop(part, None)
        if stage is not None and self._bars is not None and stage.task is not None:
            self._bars.remove_task(stage.task)
            self._say(f"{part}: {stage.doing}, done in {self._clock() - stage.began_s:.1f} s")

    def _say(self, text: str) -> None:
        if self._lasting:
            self._console.print(f"paceline: {text}", markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


@contextlib.contextmanager
def starting(pipeline: LocalPipeline, *, verbose: bool = False) -> Iterator[None]:
    """Starts the engines of a command for the block; a terminal shows their stages until they have started.

    ``verbose``: the log reports the stages instead.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.nullcontext() if verbose else StartView(lasting=False):
            stack.enter_context(pipeline)
        yield


def tell_ready(view: StartView, steps: Sequence[str]) -> None:
    """Prints what to type next, and how long the start took; with --quiet neither."""
    if not is_quiet():
        print("\n".join(steps), flush=True)
    narrate(f"paceline: ready after {view.elapsed_s:.1f} s")


def next_steps(server: ServerConfig, *, https: bool, chats: bool) -> list[str]:
    """The lines to print below "ready": commands that ask this service, and the address of its page.

    ``https``: the HTTP port is encrypted. ``chats``: the target has a chat template.
    """
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    host = f"[{host}]" if ":" in host else host
    url = f"http{'s' if https else ''}://{host}:{server.http_port}"
    key = "" if server.api_keys is None else ' -H "authorization: Bearer $PACELINE_API_KEY"'
    body = json.dumps({"prompt": _PROMPT, "max_tokens": 32})
    generate = f'paceline generate "{_PROMPT}" --address {host}:{server.grpc_port}{" --tls" if server.tls else ""}'
    commands = [generate, f"curl {url}/v1/completions{key} -d '{body}'"]
    if chats:
        commands.append(f"paceline chat --address {url}")
    lines = [f"{'' if i else 'try':9}{command}" for i, command in enumerate(commands)]
    return [*lines, f"page     {url}/"] if server.playground else lines
