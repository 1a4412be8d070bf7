"""Log lines on standard error, for people at the command line and for machines that collect them from a service.

The command line prints one plain sentence per record (``configure``). A service prints one line per record with the
request, session and replica that it is about (``configure_service``), plain or as a JSON object. Prompts and texts
are nobody's business but the client's: what may be one is logged as ``PromptText``.
"""

from __future__ import annotations

import json as json_
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TextIO

import pydantic

from paceline.config import LogConfig

_ROOT = "paceline"

_MIN_HIDDEN = 8
"""A prompt of fewer characters is not looked for in messages: it would match by chance."""


class _Sentence(logging.Formatter):
    """Leaves tracebacks to the debug level: what a user can act on is in the message."""

    def format(self, record: logging.LogRecord) -> str:
        if level() > logging.DEBUG:
            record.exc_info = record.exc_text = record.stack_info = None
        return super().format(record)


def configure(log_level: int) -> None:
    """Prints Paceline's records from ``log_level`` on, those of other libraries from warnings on."""
    _hush_torchao()
    logging.basicConfig(level=logging.WARNING, handlers=[_handler(_Sentence("paceline: %(message)s"))])
    logging.getLogger(_ROOT).setLevel(log_level)


def level() -> int:
    """The level that Paceline's records are printed from."""
    return logging.getLogger(_ROOT).getEffectiveLevel()


def configure_service(config: LogConfig, *, replica_id: str = "", stream: TextIO | None = None) -> None:
    """As ``configure``, with one structured line per record, of other libraries too. May be called again.

    ``replica_id``: named in every line of this process. ``stream``: where they go, by default standard error.
    """
    global _prompts
    _prompts = config.prompts
    root = logging.getLogger()
    _hush_torchao()
    for handler in root.handlers[:]:
        if isinstance(handler.formatter, (_Sentence, _Line)):
            root.removeHandler(handler)
    root.addHandler(_handler(_JsonLine(replica_id) if config.as_json else _Line(replica_id), stream))
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(config.level)


def configure_replica(config: LogConfig, replica_id: str) -> None:
    """``configure_service`` in a replica, past the ``sys.stderr`` of Serve, which keeps a thousand lines to itself."""
    configure_service(config, replica_id=replica_id, stream=sys.__stderr__)


def _hush_torchao() -> None:
    """transformers imports torchao wherever it is installed, and its import warns of GPU kernels and of itself."""
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").addFilter(_is_not_of_enums)


def _is_not_of_enums(record: logging.LogRecord) -> bool:
    return "is an Enum subclass" not in record.getMessage()


def _handler(formatter: logging.Formatter, stream: TextIO | None = None) -> logging.Handler:
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    return handler


# -- what must not be read ----------------------------------------------------------------------------------------

_prompts = False


@dataclass(frozen=True, slots=True, repr=False)
class PromptText:
    """A prompt, a text or token ids in a log or error message: ``<124 characters>`` unless prompts are printed."""

    value: str | Sequence[int]

    def __repr__(self) -> str:
        if _prompts:
            return repr(self.value)
        unit = "character" if isinstance(self.value, str) else "token"
        return f"<{len(self.value)} {unit}{'' if len(self.value) == 1 else 's'}>"

    __str__ = __repr__


def describe(error: BaseException) -> str:
    """Type and message of an error in one line, without the inputs that pydantic quotes."""
    if isinstance(error, pydantic.ValidationError) and not _prompts:
        parts = (
            f"{'.'.join(map(str, e['loc'])) or error.title}: {e['msg']}"
            for e in error.errors(include_input=False, include_url=False, include_context=False)
        )
        return f"ValidationError: {'; '.join(parts)}"
    return f"{type(error).__name__}: {error}"


def _trace(error: BaseException) -> str:
    """The traceback, causes included, with each error as ``describe`` gives it."""
    parts = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        frames = "".join(traceback.format_tb(current.__traceback__))
        parts.append(f"{frames}{describe(current)}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return "\nwhile handling\n".join(reversed(parts))


# -- what a line is about -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Subject:
    request_id: str = ""
    session_id: str = ""
    hidden: str = field(default="", repr=False)


_NOTHING = _Subject()
_subject: ContextVar[_Subject] = ContextVar("paceline_log_subject", default=_NOTHING)


@contextmanager
def request(request_id: str, session_id: str = "", *, prompt: str = "") -> Iterator[None]:
    """Every line of this task, and of the tasks that it starts inside, names the request.

    ``prompt`` is replaced by its length should another library's error quote it whole. Not around a ``yield`` of an
    asynchronous generator, whose consumer would log under the same name: there, ``bind`` a logger.
    """
    token = _subject.set(_Subject(request_id, session_id, prompt))
    try:
        yield
    finally:
        _subject.reset(token)


class _Bound(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, {**kwargs, "extra": {**(self.extra or {}), **(kwargs.get("extra") or {})}}


def bind(logger: logging.Logger, **extra: object) -> logging.LoggerAdapter[logging.Logger]:
    """A logger whose lines name ``request_id``, ``session_id`` or whatever is given, wherever it is used."""
    return _Bound(logger, extra)


# -- lines --------------------------------------------------------------------------------------------------------

_IDS = ("request_id", "session_id", "replica_id")


@lru_cache(maxsize=4)
def _standard(factory: Callable[..., logging.LogRecord]) -> frozenset[str]:
    """The attributes that every record has; Ray's factory adds some of its own."""
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
        subject = _subject.get()
        standard = _standard(logging.getLogRecordFactory())
        extra = {key: value for key, value in record.__dict__.items() if key not in standard}
        ids = {"request_id": subject.request_id, "session_id": subject.session_id, "replica_id": self._replica_id}
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            **{key: extra.get(key) or ids[key] for key in _IDS},
        }
        for key, value in extra.items():
            fields.setdefault(key, describe(value) if isinstance(value, BaseException) else value)
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields["error"] = describe(error)
            if record.levelno >= logging.ERROR or level() <= logging.DEBUG:
                fields["traceback"] = _trace(error)
        empty = {key for key, value in fields.items() if value is None or (key in _IDS and not value)}
        return {key: _hide(value, subject.hidden) for key, value in fields.items() if key not in empty}


class _JsonLine(_Line):
    """The same as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        return json_.dumps(self._fields(record), ensure_ascii=False, default=str)


def _message(record: logging.LogRecord) -> str:
    """The message; an exception among its arguments is described, not printed."""

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


def _hide(value: Any, hidden: str) -> Any:
    """The value, with the hidden text replaced by its length where its printed form holds it."""
    if _prompts or len(hidden) < _MIN_HIDDEN:
        return value
    text = printed = str(value)
    for form in (hidden, repr(hidden)[1:-1], json_.dumps(hidden)[1:-1]):
        text = text.replace(form, repr(PromptText(hidden)))
    return value if text == printed else text


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _word(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') else json_.dumps(text, ensure_ascii=False)
