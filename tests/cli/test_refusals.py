"""Whatever is wrong on the command line is refused in the words of a page, before a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.golden import check_page, pages_beside
from tests.support.refusals import answer_of


@pytest.mark.parametrize("page", pages_beside(__file__), ids=lambda page: page.stem)
def test_a_mistake_is_refused_in_the_words_of_its_page(page: Path) -> None:
    check_page(page, answer_of)
