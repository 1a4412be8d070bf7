"""Log lines on standard error, for people at the command line and for programs that collect them from a service.

The command line prints one plain sentence per record (``configure``). A service prints one line per record with the
request, session and replica that it is about (``configure_service``), plain or as a JSON object. Prompts and texts are
never printed. Inputs quoted by pydantic are left out, and an unexpected error in a request is logged by its frames
alone (``unexpected``).
"""

from __future__ import annotations

import contextlib
import json as json_
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, TextIO

import pydantic

from paceline.config import LogConfig

_ROOT = "paceline"

STAGES = "paceline.startup"
"""Name of the logger of start-up stages of engines: each record is the beginning of a stage, at level INFO."""
BUILT = "ready"
"""The last stage of an engine that was built in a process of its own."""


# -- narration ----------------------------------------------------------------------------------------------------

_is_quiet = False


@contextlib.contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """If ``wanted``, commands of this process print only results, warnings and errors during the block: no stages of a
    start, no progress, no summaries."""
    global _is_quiet
    before, _is_quiet = _is_quiet, wanted
    try:
        yield
    finally:
        _is_quiet = before


def is_quiet() -> bool:
    """True within a block of ``quiet``."""
    return _is_quiet


def narrate(text: str) -> None:
    """Prints what goes on to standard error, unless it is to be quiet."""
    if not _is_quiet:
        print(text, file=sys.stderr, flush=True)


# -- command line -------------------------------------------------------------------------------------------------


class _Sentence(logging.Formatter):
    """Shows tracebacks at the debug level only: the message says what a user can do. An unexpected error in a request
    is not the user's: its frames are always printed."""

    def format(self, record: logging.LogRecord) -> str:
        if level() > logging.DEBUG:
            record.exc_info = record.exc_text = record.stack_info = None
        text, trace = super().format(record), getattr(record, "traceback", None)
        return f"{text}\n{trace}" if trace else text


def configure(log_level: int) -> None:
    """Prints Paceline's records from ``log_level`` on, other libraries' from warnings on."""
    _hush_torchao()
    logging.basicConfig(level=logging.WARNING, handlers=[_handler(_Sentence("paceline: %(message)s"))])
    logging.getLogger(_ROOT).setLevel(log_level)


def level() -> int:
    """The level that Paceline's records are printed from."""
    return logging.getLogger(_ROOT).getEffectiveLevel()


def configure_service(config: LogConfig, *, replica_id: str = "", stream: TextIO | None = None) -> None:
    """Prints one structured line per record, plain or JSON, to ``stream`` (default: standard error).

    Paceline's records are printed from the configured level on, other libraries' from warnings on.
    ``replica_id`` is part of every line of this process. A later call replaces an earlier one.
    """
    root = logging.getLogger()
    _hush_torchao()
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, (_Sentence, _Line)):
            root.removeHandler(handler)
    root.addHandler(_handler(_JsonLine(replica_id) if config.as_json else _Line(replica_id), stream))
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(config.level)


def configure_replica(config: LogConfig, replica_id: str) -> None:
    """Calls ``configure_service`` with the process' own stderr: Serve's ``sys.stderr`` buffers a thousand lines."""
    configure_service(config, replica_id=replica_id, stream=sys.__stderr__)


def _hush_torchao() -> None:
    """Silences torchao, which transformers imports wherever it is installed, and which warns when it is imported."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.getMessage())


def _handler(formatter: logging.Formatter, stream: TextIO | None = None) -> logging.Handler:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    return handler


# -- errors -------------------------------------------------------------------------------------------------------


def describe(error: BaseException) -> str:
    """Type and message of an error in one line, without the inputs that pydantic quotes."""
    if isinstance(error, pydantic.ValidationError):
        parts = (
            f"{'.'.join(map(str, e['loc'])) or error.title}: {e['msg']}"
            for e in error.errors(include_input=False, include_url=False, include_context=False)
        )
        return f"ValidationError: {'; '.join(parts)}"
    return f"{type(error).__name__}: {error}"


def unexpected(logger: logging.Logger, error: BaseException) -> None:
    """Logs an unexpected error in a request: types and frames, but no messages, which may quote the prompt."""
    name = type(error).__name__
    logger.error(
        "unexpected error in a request: %s", name, extra={"traceback": _trace(error, lambda each: type(each).__name__)}
    )


def _trace(error: BaseException, describe: Callable[[BaseException], str] = describe) -> str:
    """Traceback of an error and its causes, innermost first, each one described by ``describe``."""
    parts = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        parts.append("".join(traceback.format_tb(current.__traceback__)) + describe(current))
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nwhile handling\n".join(reversed(parts))


# -- lines --------------------------------------------------------------------------------------------------------

_IDS = ("request_id", "session_id", "replica_id")


@lru_cache(maxsize=4)
def _standard(factory: Callable[..., logging.LogRecord]) -> frozenset[str]:
    """Attributes that every record has; Ray's factory adds some of its own."""
    record = factory("", logging.INFO, "", 0, "", (), None)
    return frozenset(record.__dict__) | {"message", "asctime", "taskName"}


class _Line(logging.Formatter):
    """``2026-01-31T12:00:00.123Z INFO paceline.router: message request_id=r1 k=8``, and a traceback below."""

    def __init__(self, replica_id: str) -> None:
        super().__init__()
        self._replica_id = replica_id

    def format(self, record: logging.LogRecord) -> str:
        fields = self._fields(record)
        head = f"{fields.pop('time')} {fields.pop('level')} {fields.pop('logger')}: {_one_line(fields.pop('message'))}"
        trace = fields.pop("traceback", None)
        line = " ".join([head, *(f"{key}={_word(value)}" for key, value in fields.items())])
        return f"{line}\n{trace}" if trace else line

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        standard = _standard(logging.getLogRecordFactory())
        extra = {key: value for key, value in record.__dict__.items() if key not in standard}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            **{key: extra.get(key) for key in ("request_id", "session_id")},
            "replica_id": extra.get("replica_id") or self._replica_id,
        }
        for key, value in extra.items():
            fields.setdefault(key, describe(value) if isinstance(value, BaseException) else value)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields["error"] = describe(error)
            if record.levelno >= logging.ERROR or level() <= logging.DEBUG:
                fields["traceback"] = _trace(error)
        return {key: value for key, value in fields.items() if value is not None and (value or key not in _IDS)}


class _JsonLine(_Line):
    """The fields of a record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        return json_.dumps(self._fields(record), ensure_ascii=False, default=str)


def _message(record: logging.LogRecord) -> str:
    """Message of a record; pydantic's errors among its arguments are printed without the inputs that they quote."""

    def safe(value: object) -> object:
        return describe(value) if isinstance(value, pydantic.ValidationError) else value

    if isinstance(record.msg, BaseException):
        return describe(record.msg)
    if not record.args:
        return str(record.msg)
    args = record.args
    if isinstance(args, Mapping):
        return str(record.msg) % {key: safe(value) for key, value in args.items()}
    return str(record.msg) % tuple(safe(value) for value in args)


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _word(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') else json_.dumps(text, ensure_ascii=False)
