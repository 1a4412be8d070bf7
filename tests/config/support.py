"""What the tests of the configuration share."""

from pathlib import Path

import pytest

from paceline.config import ServiceConfig
from paceline.errors import ConfigError

needs_ray = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""Ray's own modules use what pydantic has deprecated."""
CLUSTER = Path(__file__).parent.parent.parent / "cluster"


def nested(key, value):
    """{"a": {"b": value}} for "a.b"."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def refusal(args):
    with pytest.raises(ConfigError) as caught:
        ServiceConfig.parse(args)
    message = str(caught.value)
    assert "\n" not in message
    return message
