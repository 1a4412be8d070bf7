"""Fixtures of several modules; two ranks are those of a module, as each start of their processes takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.model.parallel.ranks import Ranks
from tests.support.models import save_pair

from paceline.model import layout


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target of a small pair."""
    return str(save_pair(tmp_path_factory.mktemp("models")) / "target")


@pytest.fixture(params=[pytest.param("native", marks=pytest.mark.compiler), "numpy"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of laying steps out, masking and packing."""
    if request.param == "numpy":
        monkeypatch.setattr(layout, "native_module", lambda: None)
    else:
        assert layout.usable()
