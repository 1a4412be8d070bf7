"""``paceline completion``: what a real bash completes by it."""

from __future__ import annotations

import subprocess

import pytest
from tests.cli.test_config import printed

from paceline.cli.completion import SHELLS
from paceline.cli.main import COMMANDS


def completed(text: str, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    function = text.rsplit("complete ", 1)[1].split("-F ")[1].split()[0]
    listed = " ".join(f"'{word}'" for word in words)
    code = f"{text}\nCOMP_WORDS=({listed})\nCOMP_CWORD={len(words) - 1}\nCOMPREPLY=()\n{function}\n"
    code += "printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(["bash", "--norc"], input=code, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes_commands_flags_and_choices(capsys, tmp_path):
    text = printed(capsys, "completion", "bash")
    assert {*COMMANDS, "bench"} <= {*completed(text, "paceline", "")}
    assert completed(text, "paceline", "serve", "--grpc") == ["--grpc-port"]
    assert {"ngram", "suffix"} <= {*completed(text, "paceline", "serve", "--drafter", "")}
    assert completed(text, "paceline", "bench", "endp") == ["endpoint"]
    (tmp_path / "one.yaml").touch()
    assert completed(text, "paceline", "serve", "--config", f"{tmp_path}/o") == [f"{tmp_path}/one.yaml"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_knows_every_command(capsys, shell):
    text = printed(capsys, "completion", shell)
    for command in COMMANDS:
        assert command in text
    assert "max-tokens" in text
