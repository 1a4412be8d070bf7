"""The tokens of plain decoding, which every run must give."""

import pytest
from tests.faults.runs import requests
from tests.support.models import pair
from tests.support.pump import plain_reference

from paceline.types import Result


@pytest.fixture(scope="module")
def reference() -> dict[str, Result]:
    """Plain decoding of each request alone."""
    return plain_reference(pair("llama")[0], requests())
