"""Files that users name: an endless one ends in an error, and there is one way to read them."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.chat import load_chat
from paceline.checkpoint.files import embedded_paths
from paceline.cli.main import main
from paceline.client.connection import Tls
from paceline.config import ServiceConfig
from paceline.drafters.heads.probe import texts_of
from paceline.errors import ConfigError
from paceline.errors.files import read_bytes, read_text
from paceline.plan.measured import read
from paceline.security.keys import read_keys
from paceline_bench.dataset import read_questions

SERVICES = Path(__file__).parents[1] / "services"
ENDLESS = Path("/dev/zero")
OWN = {
    # Sources that are compiled, and what the system tells of itself.
    *("core/native.py", "model/compiled/linear.py", "model/compiled/package.py", "model/parallel/shared_memory.py"),
    *("preflight/gpus.py", "preflight/host_memory.py", "runtime/cores.py"),
    "target/origin.py",
    *("cluster/connections.py", "cluster/janitor.py", "cluster/local_streams.py", "config/installed.py"),
    *("embedded/__init__.py", "web/playground.py", "security/haproxy.py", "security/renewal.py"),
    # Files of a checkpoint or of a training, which have fixed names in a directory.
    *("checkpoint/folder.py", "checkpoint/gguf/described.py", "checkpoint/overrides.py", "cli/drafting.py"),
    *("checkpoint/tiktoken_model.py", "checkpoint/translated.py"),
    *("model/parallel/load.py", "drafters/training/chats.py", "drafters/training/features.py", "web/batch.py"),
}
"""Files of the package that read others whole by themselves, none of which a user names alone."""


READERS: list[Callable[[Path], Any]] = [
    lambda path: ServiceConfig.from_file(path),
    lambda path: load_chat(str(embedded_paths()[0]), str(path)),
    lambda path: Tls(ca_file=path).credentials(),
    lambda path: texts_of(str(path)),
    lambda path: read(path),
    lambda path: read_keys(path),
    lambda path: [*read_questions(path)],
]


@pytest.mark.parametrize("reader", READERS)
def test_an_endless_file_is_refused(reader: Callable[[Path], Any]) -> None:
    with pytest.raises(ConfigError, match=r"'/dev/zero': it has more than 67108864 bytes"):
        reader(ENDLESS)


@pytest.mark.parametrize(
    "command",
    [
        *[("generate", "a", f"--{flag}", "/dev/zero") for flag in ("json-schema", "grammar", "structural-tag")],
        ("serve", "--local", "--chat-template", "/dev/zero"),
        ("advise", "--measure", "--prompts-file", "/dev/zero"),
    ],
    ids=lambda command: command[-2],
)
def test_commands_refuse_an_endless_file(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) != 0
    assert "'/dev/zero': it has more than 67108864 bytes" in capsys.readouterr().err


def test_a_longer_limit_is_kept_to_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"1234")
    assert read_bytes(file, "it", 4) == b"1234"
    with pytest.raises(ConfigError, match=r"^it: it has more than 3 bytes, the most that is read$"):
        read_bytes(file, "it", 3)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("nowhere", "No such file"), (".", "Is a directory"), ("a\0b", "null byte"), ("~none/a", "home")],
)
def test_what_cannot_be_read_is_said_with_the_reason(path: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^it: it cannot be read \(.*{reason}.*\)$"):
        read_text(path, "it")


def test_text_has_the_line_ends_of_this_system_and_is_utf8(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes("é\r\nb\rc\n".encode())
    assert read_text(file, "it") == "é\nb\nc\n"
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"^it: it is not UTF-8 text \("):
        read_text(file, "it")


def _reads_whole(path: Path) -> bool:
    calls = (node.func for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return any(isinstance(call, ast.Attribute) and call.attr in ("read_text", "read_bytes") for call in calls)


def test_files_that_users_name_are_read_in_one_place() -> None:
    package = SERVICES / "paceline"
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if _reads_whole(path)}
    assert found == OWN
