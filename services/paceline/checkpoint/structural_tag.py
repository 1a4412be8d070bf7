"""Structural tags, the form of output that xgrammar and vLLM define for tool calls, as a Lark grammar of llguidance.

A structural tag is a tree of formats: literal text, JSON of a schema, tags (``begin``, a format, ``end``), and free
text in which a trigger starts one of several tags. Both spellings are read: ``{"format": ...}`` and the older
``{"structures": [...], "triggers": [...]}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.checkpoint.json_schema import MAX_DEPTH, WHITESPACE, as_compiled, check_parsed
from paceline.checkpoint.lark import quoted
from paceline.errors import InvalidRequestError
from paceline.errors.refusals import shown

_FIELDS: dict[str, dict[str, type]] = {
    "any_text": {},
    "const_string": {"value": str},
    "regex": {"pattern": str},
    "json_schema": {"json_schema": dict},
    "sequence": {"elements": list},
    "or": {"elements": list},
    "optional": {"content": dict},
    "tag": {"begin": str, "content": dict, "end": str},
    "triggered_tags": {"triggers": list, "tags": list},
    "tags_with_separator": {"tags": list, "separator": str},
}
"""Type of a format -> its fields, all needed."""
_NEEDED: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
_FLAGS = {"at_least_one", "stop_after_first"}
"""Further fields of the two formats of several tags, false unless they are given."""
_EXCLUDES = "excludes"
"""A further field of free text: a list of texts that it does not hold."""


def lark_of(text: str, specials: Mapping[str, int]) -> str:
    """The grammar of a structural tag.

    Args:
        text: the structural tag, as JSON.
        specials: special token -> its id. Where one stands in a text of the tag, that token is meant; free text holds
            none of them.

    Raises:
        InvalidRequestError: the tag is malformed, or a format in it is not supported; it names the place.
    """
    root, place = root_of(text)
    grammar = _Grammar(specials)
    start = grammar.expression(root, place, last=True)
    return "\n".join(("%llguidance {}", f"start: {start or quoted('')}", *grammar.rules))


def root_of(text: str) -> tuple[dict[str, Any], str]:
    """The format of a structural tag, and its place in it. Raises as ``lark_of``."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"structured_output.structural_tag is not JSON: {error}") from None
    match tag:
        case {"format": dict(root), **rest} if not rest.keys() - {"type"}:
            place = "#/format"
        case {"structures": list(), "triggers": list(), **rest} if not rest.keys() - {"type"}:
            root, place = _of_structures(tag), "#"
        case _:
            raise _fault("#", f"is {shown(tag)}: an object with format, or with structures and triggers, is needed")
    if tag.get("type", "structural_tag") != "structural_tag":
        raise _fault("#/type", f"is {shown(tag['type'])}: only 'structural_tag' is allowed")
    return root, place


def _of_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The older spelling in terms of the newer one."""
    tags = []
    for i, one in enumerate(tag["structures"]):
        if not isinstance(one, dict) or one.keys() != {"begin", "schema", "end"}:
            raise _fault(f"#/structures/{i}", f"is {shown(one)}: an object of begin, schema and end is needed")
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Grammar:
    """Rules of a grammar, which become more as its formats are read."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self._names: dict[str, str] = {}  # what a rule derives -> its name
        self._specials = specials
        self._split = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or "(?!)")

    @property
    def rules(self) -> list[str]:
        """All rules, a line each."""
        return [f"{name}{body}" for body, name in self._names.items()]

    def expression(self, node: Any, place: str, then: str = "", *, last: bool = False, depth: int = 0) -> str:
        """Rule of a format followed by the text ``then``. ``last``: nothing follows. Raises as ``lark_of``."""
        if depth > MAX_DEPTH:
            raise _fault(place, f"is nested too deep: at most {MAX_DEPTH} levels are allowed")
        _check_fields(node, place)
        inner: dict[str, Any] = {"depth": depth + 1, "last": last and not then}
        match node["type"]:
            case "any_text":
                return self._free_text(then, place, node.get(_EXCLUDES, []), last=last)
            case "const_string":
                return self._joined(self._text(node["value"]), self._text(then))
            case "regex":
                return self._joined(self._rule(f": {_slashed(node['pattern'])}"), self._text(then))
            case "json_schema":
                return self._joined(self._json(node["json_schema"], f"{place}/json_schema"), self._text(then))
            case "sequence":
                elements, ends = node["elements"], [""] * (len(node["elements"]) - 1) + [then]
                return self._joined(
                    *(
                        self.expression(
                            one, f"{place}/elements/{i}", end, depth=depth + 1, last=last and i == len(elements) - 1
                        )
                        for i, (one, end) in enumerate(zip(elements, ends, strict=True))
                    )
                )
            case "or":
                return self._either(
                    self.expression(one, f"{place}/elements/{i}", then, depth=depth + 1, last=last)
                    for i, one in enumerate(node["elements"])
                )
            case "optional":
                content = self.expression(node["content"], f"{place}/content", **inner)
                return self._joined(f"({content})?" if content else "", self._text(then))
            case "tag":
                begin = self._text(node["begin"])
                return self._joined(begin, self._tag(node, place, depth), self._text(then))
            case "triggered_tags":
                if then or not last:
                    raise _fault(place, "is followed by something, but its free text ends with the output")
                return self._triggered(node, place, depth)
        tags = self._either(
            self.expression(one, f"{place}/tags/{i}", depth=depth + 1) for i, one in enumerate(_tags_of(node, place))
        )
        more = "" if node.get("stop_after_first") else f"({self._joined(self._text(node['separator']), tags)})*"
        several = self._joined(tags, more)
        return self._joined(several if node.get("at_least_one") else f"({several})?", self._text(then))

    def _tag(self, tag: Mapping[str, Any], place: str, depth: int) -> str:
        """The content and the end of a tag."""
        return self.expression(tag["content"], f"{place}/content", tag["end"], depth=depth + 1)

    def _triggered(self, node: Mapping[str, Any], place: str, depth: int) -> str:
        triggers, by_trigger = node["triggers"], {}
        for i, trigger in enumerate(triggers):
            if not isinstance(trigger, str) or not trigger:
                raise _fault(f"{place}/triggers/{i}", f"is {shown(trigger)}: text is needed")
            by_trigger[trigger] = list[str]()
        at_once = []
        for i, tag in enumerate(_tags_of(node, place)):
            at = f"{place}/tags/{i}"
            _check_fields(tag, at)
            found = [trigger for trigger in by_trigger if tag["begin"].startswith(trigger)]
            if len(found) != 1:
                raise _fault(f"{at}/begin", f"is {shown(tag['begin'])}: it must begin with exactly one of the triggers")
            content = self._tag(tag, at, depth)
            by_trigger[found[0]].append(self._joined(self._text(tag["begin"].removeprefix(found[0])), content))
            at_once.append(self._joined(self._text(tag["begin"]), content))
        free = self._rule(": /(?s:.*)/")
        tags = self._either(
            self._joined(self._until(trigger, f"{place}/triggers/{i}"), self._either(by_trigger[trigger]))
            for i, trigger in enumerate(by_trigger)
            if by_trigger[trigger]
        )
        if node.get("at_least_one"):
            first = self._either(at_once)
            return first if node.get("stop_after_first") else self._joined(first, f"({tags})*", f"({free})?")
        return f"({tags} | {free})?" if node.get("stop_after_first") else f"({tags})* ({free})?"

    def _free_text(self, then: str, place: str, excludes: Sequence[str], *, last: bool) -> str:
        if then:
            return self._until(then, place, excludes)
        if not last:
            raise _fault(place, "is any_text that has no end: only the last format, or the content of a tag, may be it")
        return f"({self._terminal(excludes)})?"

    def _until(self, text: str, place: str, excludes: Sequence[str] = ()) -> str:
        """Free text up to the first ``text``, and this."""
        first, *rest = self._pieces(text)
        if first in self._specials:
            return self._joined(f"({self._terminal(excludes)})?", *map(self._piece, (first, *rest)))
        if rest:
            raise _fault(place, f"ends with {shown(text)}: a special token in it may only be at its beginning")
        return self._rule(f"[lazy]: {pattern_without(excludes)} {quoted(first)}")

    def _terminal(self, excludes: Sequence[str]) -> str:
        """Free text to its very end, which is not empty."""
        return self._rule(f": {pattern_without(excludes)}", "T") if excludes else self._rule(": /(?s:.+)/")

    def _json(self, schema: Mapping[str, Any], place: str) -> str:
        check_parsed(schema, f"structured_output.structural_tag: {place}")
        return self._rule(
            ": %json " + json.dumps({"x-guidance": {"whitespace_pattern": WHITESPACE}, **as_compiled(schema)})
        )

    def _rule(self, body: str, kind: str = "r") -> str:
        """The name of the rule with this body: attributes, a colon and its right side. ``T``: of a terminal."""
        return self._names.setdefault(body, f"{kind}{len(self._names)}")

    def _text(self, text: str) -> str:
        return " ".join(map(self._piece, self._pieces(text)))

    def _pieces(self, text: str) -> list[str]:
        """Parts of a text: special tokens, and the text between them."""
        found, at = [], 0
        for special in self._split.finditer(text):
            found += [text[at : special.start()], special.group()]
            at = special.end()
        return [part for part in (*found, text[at:]) if part]

    def _piece(self, part: str) -> str:
        return f"<[{self._specials[part]}]>" if part in self._specials else quoted(part)

    @staticmethod
    def _joined(*parts: str) -> str:
        return " ".join(part for part in parts if part)

    def _either(self, parts: Any) -> str:
        found = [part or quoted("") for part in parts]
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def _check_fields(node: Any, place: str) -> None:
    kind = node.get("type") if isinstance(node, dict) else None
    if not isinstance(kind, str) or kind not in _FIELDS:
        shown_kind = shown(kind if isinstance(node, dict) else node)
        raise _fault(f"{place}/type", f"is {shown_kind}: {', '.join(_FIELDS)} are supported")
    fields = _FIELDS[kind]
    flags = _FLAGS if "tags" in fields else set()
    for name, allowed in fields.items():
        if not isinstance(node.get(name), allowed):
            raise _fault(f"{place}/{name}", f"is {shown(node.get(name))}: {_NEEDED[allowed]} is needed")
    for name in node.keys() - fields.keys() - {"type"}:
        if name == _EXCLUDES and kind == "any_text":
            if not isinstance(node[name], list) or not all(isinstance(text, str) and text for text in node[name]):
                raise _fault(f"{place}/{name}", f"is {shown(node[name])}: a list of texts is needed")
            continue
        if name not in flags:
            raise _fault(f"{place}/{name}", f"is {shown(node[name])}, but {kind} has no such field")
        if not isinstance(node[name], bool):
            raise _fault(f"{place}/{name}", f"is {shown(node[name])}: true or false is allowed")
    if kind in ("sequence", "or") and not node["elements"]:
        raise _fault(f"{place}/elements", "is []: at least one is needed")


def _tags_of(node: Mapping[str, Any], place: str) -> list[Any]:
    for i, tag in enumerate(node["tags"]):
        if not isinstance(tag, dict) or tag.get("type") != "tag":
            raise _fault(f"{place}/tags/{i}", f"is {shown(tag)}: a format of type 'tag' is needed")
    if not node["tags"]:
        raise _fault(f"{place}/tags", "is []: at least one is needed")
    return list(node["tags"])


def pattern_without(excludes: Sequence[str]) -> str:
    """Any text, but none that holds one of ``excludes``."""
    if not excludes:
        return "/(?s:.*)/"
    held = "|".join("".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text) for text in excludes)
    return f"(/(?s:.*)/ & ~{_slashed(f'(?s:.*)({held})(?s:.*)')})"


def _slashed(pattern: str) -> str:
    """A regular expression between slashes, as Lark reads one."""
    inside = re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern, flags=re.S)
    return f"/{inside}/"


def _fault(place: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_output.structural_tag: {place} {problem}")
