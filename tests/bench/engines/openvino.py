"""The part of OpenVINO that a benchmark uses beside ``openvino_genai``."""

from __future__ import annotations

from typing import Any


class Tensor:
    """A tensor that remembers its array."""

    def __init__(self, array: Any) -> None:
        self.array = array
