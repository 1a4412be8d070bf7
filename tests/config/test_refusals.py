"""Whatever is wrong in a configuration is refused in the sentence of a page, where keys are given as to ``--set``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.config.support import nested, refusal
from tests.support.golden import check_page, pages_beside


def merged(one: Any, other: Any) -> Any:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return other
    return one | {key: merged(one.get(key), value) for key, value in other.items()}


def refused(line: str) -> str:
    """The sentence about a configuration of some ``KEY=VALUE``."""
    tree: dict[str, Any] = {}
    for setting in shlex.split(line):
        key, _, value = setting.partition("=")
        tree = merged(tree, nested(key, yaml.safe_load(value)))
    return str(refusal(tree))


@pytest.mark.parametrize("page", pages_beside(__file__), ids=lambda page: page.stem)
def test_a_mistake_is_refused_in_the_sentence_of_its_page(page: Path) -> None:
    check_page(page, refused)
