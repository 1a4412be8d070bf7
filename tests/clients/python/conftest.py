"""Where the server is, and what all clients are asked."""

from __future__ import annotations

import os
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

URL = os.environ.get("CLIENTS_URL", "http://127.0.0.1:8801")
MODEL = "chat"
WEATHER = "How is the weather in Rome?"
"""The model answers by a call of ``get_weather``, if there is such a tool."""
COMPARE = "compare Rome and Oslo"
"""By two calls."""
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Says how the weather is in a city.", "parameters": CITY},
}
THOUGHT = "The user wants a short answer, so I will give one."
HELLO = "Hello! It is good to see you here today."
SUNNY = "It is sunny in Rome today"


class Place(BaseModel):
    """Where to, and for how long."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=0, le=9)


@pytest.fixture(scope="session")
def v1() -> str:
    return f"{URL}/v1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
