"""The configuration as a JSON Schema, by which an editor completes and checks the files that ``--config`` takes."""

from __future__ import annotations

import re
from typing import Any

from paceline.config.service import ServiceConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def file_schema() -> dict[str, Any]:
    """The schema of a file: the configuration itself, or a Serve config file whose application's ``args`` it is.

    Returns:
        A JSON Schema of the dialect ``DIALECT``. It knows keys, types and bounds; what one key says of another is
        checked when the file is read.
    """
    tree = _plain(ServiceConfig.model_json_schema(by_alias=True))
    kinds = tree.pop("$defs")
    for kind in kinds.values():
        tag = kind["properties"].get("kind", {})
        if tag.get("const", "model") != "model":  # without a kind a draft is a model
            kind["required"] = sorted({*kind.get("required", ()), "kind"})
    ours = {"$ref": "#/$defs/ServiceConfig"}
    application = {"type": "object", "properties": {"args": ours}}
    serve = {"properties": {"applications": {"type": "array", "minItems": 1, "prefixItems": [application]}}}
    return {
        "$schema": DIALECT,
        "title": "Paceline's configuration",
        "type": "object",
        "if": {"required": ["applications"]},
        "then": serve,
        "else": ours,
        "$defs": {"ServiceConfig": tree, **kinds},
    }


def in_yaml(text: str | None) -> str:
    """A docstring as one line of Markdown, with Python's constants as YAML writes them."""
    text = " ".join((text or "").replace("``", "`").split())
    for name, value in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{name}\b", value, text)
    return text


def _plain(node: Any) -> Any:
    """Removes the titles that pydantic derives from names, and the defaults of whole sections."""
    if isinstance(node, list):
        return [_plain(inner) for inner in node]
    if not isinstance(node, dict):
        return node
    found: dict[str, Any] = {}
    for name, value in node.items():
        if name == "properties":
            found[name] = {key: _plain(inner) for key, inner in value.items()}
        elif name == "description":
            found[name] = in_yaml(value)
        elif not (name == "title" or (name == "default" and isinstance(value, dict))):
            found[name] = _plain(value)
    return found
