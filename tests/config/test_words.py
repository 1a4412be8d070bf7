"""Values that are words of YAML 1.1, such as ``off``: each documented value can be written as it is documented,
whatever reads the file.

The fields are found in the types, so a new one is held by these tests. Mutants: no ``_read_as_meant``; only ``off``
in ``_WORDS``; ``as_meant`` without lists.
"""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, Field

from paceline.config import ServiceConfig
from paceline.config.base import Strict
from paceline.config.environment import variable_of
from paceline.errors import ConfigError


def words(annotation: Any, path: tuple[str, ...] = (), kind: str = "") -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """(path, value, kind of draft) of every documented word below a type; ``[]`` stands for an entry of a list."""
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        tag = annotation.model_fields["kind"].default if "kind" in annotation.model_fields and len(path) == 1 else kind
        for name, field in annotation.model_fields.items():
            yield from words(field.annotation, (*path, field.alias or name), tag)
    elif origin is Literal:
        yield from ((path, word, kind) for word in get_args(annotation))
    elif origin in (Union, types.UnionType, Annotated):
        for one in get_args(annotation)[: 1 if origin is Annotated else None]:
            yield from words(one, path, kind)
    elif origin is list:
        yield from words(get_args(annotation)[0], (*path, "[]"), kind)


EVERY = sorted({(path, word, kind) for path, word, kind in words(ServiceConfig) if isinstance(word, str)})
PLAIN = [(path, word) for path, word, kind in EVERY if "[]" not in path and path[0] != "draft_config"]


def test_the_fields_are_found():
    found = {(".".join(path), word) for path, word, _ in EVERY}
    assert ("target_config.engine_kwargs.batch_invariant", "off") in found
    assert ("target_config.engine_kwargs.heads.[].method", "suffix") in found
    assert ("draft_config.engine_kwargs.placement", "apart") in found
    assert len(found) > 80


def nested(path: tuple[str, ...], text: str) -> str:
    """YAML, in flow style, of a value as it is written."""
    for name in reversed(path):
        text = f"[{text}]" if name == "[]" else f"{{{name}: {text}}}"
    return text


def refused_as_no_word(error: ConfigError, name: str) -> bool:
    """True if the value itself was refused, rather than what it says of others."""
    return f"{name} is " in str(error) and any(part in str(error) for part in ("it must be", "is true", "is false"))


def test_every_documented_word_can_be_written_bare():
    wrong = []
    for path, word, kind in EVERY:
        data = yaml.safe_load(nested(path, word))  # as Ray's own reader and PyYAML do
        if kind and path[-1] != "kind":
            data["draft_config"]["kind"] = kind
        try:
            ServiceConfig.parse(data)
        except ConfigError as error:
            if refused_as_no_word(error, path[-1]):
                wrong.append(str(error))
    assert not wrong, wrong


@pytest.mark.parametrize("word", ["off", "Off", "OFF"])
def test_files_settings_environment_and_serve_files_agree(word, tmp_path, monkeypatch):
    keys = [path for path, allowed in PLAIN if allowed == "off"]
    assert len(keys) == 3
    for path in keys:
        file = tmp_path / "service.yaml"
        file.write_text(nested(path, word))
        serve = tmp_path / "serve.yaml"
        serve.write_text(nested(("applications", "[]", "args", *path), word))
        monkeypatch.setenv(variable_of(".".join(path)), word)
        ways = {
            "file": ServiceConfig.from_file(file),
            "serve file": ServiceConfig.from_file(serve),
            "set": ServiceConfig().with_overrides([f"{'.'.join(path)}={word}"]),
            "environment": ServiceConfig().with_environment(),
        }
        monkeypatch.delenv(variable_of(".".join(path)))
        for way, value in ways.items():
            for name in path:
                value = getattr(value, name)
            assert value == "off", way


class Words(Strict):
    """Every word that YAML 1.1 takes for a boolean, and numbers that it takes for text."""

    switch: Literal["off", "on"] = "off"
    answer: Literal["yes", "no"] | None = None
    both: bool | Literal["off"] = True
    several: list[Literal["off", "on", "auto"]] = Field(default_factory=list)
    named: dict[str, Literal["off", "on"]] = Field(default_factory=dict)
    share: float = 0.0
    text: str = ""


@pytest.mark.parametrize("text", ["off", "on", "OFF", "On"])
def test_a_word_is_what_the_field_allows(text):
    def read(name: str, value: str) -> Any:
        return getattr(Words.model_validate(yaml.safe_load(f"{name}: {value}")), name)

    assert read("switch", text) == text.lower()
    assert read("answer", {"off": "no", "on": "yes"}[text.lower()]) == {"off": "no", "on": "yes"}[text.lower()]
    assert read("both", text) is (text.lower() == "on")
    assert read("several", f"[{text}, auto]") == [text.lower(), "auto"]
    assert read("named", f"{{a: {text}}}") == {"a": text.lower()}


@pytest.mark.parametrize(("text", "value"), [("1e-3", 1e-3), ("2E5", 2e5), ("1.5e-3", 1.5e-3), ("-1e3", -1e3)])
def test_a_number_with_an_exponent_is_one(text, value):
    assert Words.model_validate(yaml.safe_load(f"share: {text}")).share == value
    assert Words.model_validate(yaml.safe_load(f"text: '{text}'")).text == text


def test_a_word_where_text_is_needed_is_refused_with_the_remedy():
    with pytest.raises(ConfigError) as refusal:
        ServiceConfig.parse(yaml.safe_load("target_config: {model_loading_config: {model_id: on}}"))
    assert str(refusal.value) == (
        "target_config.model_loading_config.model_id is true: it must be text in quotes, as YAML takes on, off, yes "
        "and no for true and false"
    )
