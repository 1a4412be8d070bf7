"""Two ranks that the tests of a module share: each start of their processes takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.model.parallel.ranks import Ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks
