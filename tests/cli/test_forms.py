"""The flags of structured output."""

from pathlib import Path

import pytest

from paceline.cli.flags import add_form_flags, form_of
from paceline.cli.main import Parser
from paceline.errors import ConfigError, InvalidRequestError
from paceline.types import StructuredOutput


def form(*flags: str) -> StructuredOutput | None:
    parser = Parser()
    add_form_flags(parser)
    return form_of(parser.parse_args(flags)).get("structured_output")


def test_each_flag_names_a_form(tmp_path: Path) -> None:
    path = tmp_path / "form"
    path.write_text('{"type": "null"}', encoding="utf-8")
    assert form() is None
    assert form("--json-schema", str(path)) == StructuredOutput(json_schema='{"type": "null"}')
    assert form("--grammar", str(path)) == StructuredOutput(grammar='{"type": "null"}')
    assert form("--structural-tag", str(path)) == StructuredOutput(structural_tag='{"type": "null"}')
    assert form("--json-object") == StructuredOutput(json_object=True)
    assert form("--regex", "a+") == StructuredOutput(regex="a+")
    assert form("--choice", "a", "--choice", "b") == StructuredOutput(choice=("a", "b"))


def test_a_mistake_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"--json-schema is '.*nowhere': it cannot be read"):
        form("--json-schema", str(tmp_path / "nowhere"))
    with pytest.raises(InvalidRequestError, match=r"structured_output\.regex is .*: at least one character"):
        form("--regex", "")
    with pytest.raises(SystemExit):
        form("--regex", "a", "--json-object")
    assert "is given with --regex: one of them is allowed" in capsys.readouterr().err
