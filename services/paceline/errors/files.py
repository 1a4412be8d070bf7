"""Reads whole files that a user names, up to a limit, or says why it does not."""

from __future__ import annotations

from pathlib import Path

from paceline.errors import ConfigError

MOST_BYTES = 64 << 20
"""Of a configuration, a template, a grammar, keys or prompts."""
MOST_TEXT_BYTES = 1 << 30
"""Of a file of texts to train on, or to draft from."""


def read_bytes(path: str | Path, subject: str, most_bytes: int = MOST_BYTES) -> bytes:
    """The content of a file, or of a pipe until its end; ``~`` is the home directory.

    Args:
        path: may be endless, as ``/dev/zero`` is: no more than ``most_bytes`` are read.
        subject: how the error begins: the setting and its value, such as ``--config is 'a.yaml'``.
        most_bytes: a longer file is refused.

    Raises:
        ConfigError: the file cannot be read, or is longer than ``most_bytes``.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(most_bytes + 1)
    except (OSError, ValueError, RuntimeError) as error:  # ValueError: a NUL in the path; RuntimeError: no such user
        raise ConfigError(f"{subject}: it cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if len(content) > most_bytes:
        raise ConfigError(f"{subject}: it has more than {most_bytes} bytes, the most that is read")
    return content


def read_text(path: str | Path, subject: str, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8, its line ends ``\\n``. Raises ConfigError as ``read_bytes``, and for other text."""
    content = read_bytes(path, subject, most_bytes)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{subject}: it is not UTF-8 text ({error})") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
