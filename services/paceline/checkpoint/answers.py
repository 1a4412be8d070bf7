"""Separates growing answers into content, reasoning and tool calls, by the regions of a format.

In the text of an answer, each token that is a mark of the format becomes one code point, a lone surrogate. So a mark
token is never confused with the same text spelled out. A mark without a token is found as text. What is read does not
depend on how the text is cut: the parser decides nothing that more text could change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.checkpoint.call_readers import (
    ArgumentsStream,
    Call,
    CallReader,
    Known,
    NoCallError,
    PreparedReader,
    UnfinishedCallError,
)
from paceline.checkpoint.marks import Marks

Kind = Literal["content", "reasoning", "call", "arguments", "nothing"]
_RANKS = {"call": 0, "reasoning": 1}
"""Order of two regions that begin at the same place with the same text."""
_CLOSERS = frozenset("]})")
_KEPT_CHARS = 4096
"""Characters that were read already and are kept before the text is cut."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of an answer: how it begins and ends. Patterns spell the marks out."""

    kind: Kind
    """``nothing``: its text is dropped."""
    opens: str
    """Regular expression of the region's beginning; the reader gets its named groups. The text of a call begins with
    the group ``body``, if there is one, else after the match."""
    closes: str | None = None
    """Regular expression of its end. None: a call ends where its value does, ``nothing`` at once, others never."""
    reader: CallReader | None = None
    """Reads the text of a call."""
    grows: bool = False
    """More text may make a match longer. False: a match is final where it is found."""
    bare: bool = False
    """True: the region has no mark of its own, and begins only an answer or a line."""
    behind_calls: bool = False
    """The region begins only after a call."""
    implied: bool = False
    """An answer begins within it, unless the prompt has opened or closed it."""


@dataclass(frozen=True, slots=True)
class Said:
    """Something that an answer has said."""

    kind: Kind
    text: str
    start: int
    """Number of code points of the answer before it."""
    end: int
    """Number of code points up to its end."""
    call: Call | None = None
    """The call, if the kind is ``call``. Parts of kind ``arguments`` that follow continue its arguments."""


@dataclass(frozen=True, slots=True)
class _Rule:
    region: Region
    opens: Any
    closes: Any
    reader: PreparedReader | None


class Reading:
    """A format, made ready for one tokenizer. Stateless."""

    def __init__(
        self,
        regions: Sequence[Region],
        added: Mapping[int, tuple[str, bool]],
        *,
        outside: Kind,
        bound: bool = False,
    ) -> None:
        """Prepares the regions.

        Args:
            regions: the format's regions.
            added: (text, True if special) of each added token, by id.
            outside: kind of the text outside all regions.
            bound: a grammar constrains the answers. So ordinary tokens may spell every mark that is not special. A
                call that begins is certain, and its arguments are streamed where they are JSON.
        """
        patterns = [pattern for one in regions for pattern in (one.opens, one.closes) if pattern is not None]
        patterns += [pattern for one in regions if one.reader is not None for pattern in one.reader.patterns]
        self.marks, self.added = Marks(added, patterns, by_text=bound), added
        self.outside: Kind = outside
        self.bound = bound
        self._rules = [
            _Rule(
                one,
                self.marks.compile(one.opens),
                None if one.closes is None else self.marks.compile(one.closes),
                None if one.reader is None else one.reader.prepared(self.marks),
            )
            for one in regions
        ]

    def rules(self, calls: bool) -> list[_Rule]:
        """Returns the rules of all regions; without calls if ``calls`` is false."""
        return [rule for rule in self._rules if calls or rule.region.kind != "call"]

    def parser(self, tools: Sequence[Mapping[str, Any]] | None, begun: str = "", *, fresh: bool = True) -> AnswerParser:
        """A new parser.

        Args:
            tools: the offered tools. None: text that looks like a call is content.
            begun: the part of the prompt that belongs to the answer.
            fresh: the answer begins there; False: it continues one.
        """
        return AnswerParser(self, self.rules(bool(tools)), Known(tools or ()), self.marks.of_text(begun), fresh=fresh)


@dataclass(slots=True)
class _Open:
    """The region that is open."""

    rule: _Rule
    start: int
    body: int
    groups: dict[str, str] = field(default_factory=dict)
    arguments: ArgumentsStream | None = None
    """Arguments of a call that is streamed."""


class AnswerParser:
    """The state of one answer."""

    def __init__(self, reading: Reading, rules: list[_Rule], known: Known, begun: str, *, fresh: bool) -> None:
        self._reading, self._rules, self._known = reading, rules, known
        self._text = begun
        self._own = len(begun)  # where the answer begins; nothing before it is said
        self._base = -len(begun)  # place of the text's first code point in the answer
        self._at = 0  # what is before it was said
        self._scan = 0  # where the end of the open region is looked for
        self._open: _Open | None = None
        self.barred: dict[int, int] = {}  # rule by identity -> where it may begin again, after text that was no call
        self._behind_call = False
        self._blank = True  # nothing but blanks outside calls since the beginning, or the last call
        self._implied: _Rule | None = None
        self.cuts_call = False
        """True once an answer has ended inside a call that has been streamed in part."""
        for _ in self._run(ended=False):
            pass
        opened = any(r.region.kind == "reasoning" and r.opens.search(begun) for r in rules)
        if fresh and not opened:
            self._implied = next((rule for rule in rules if rule.region.implied), None)
        self._behind_call, self._blank = False, True

    @property
    def in_reasoning(self) -> bool:
        """True while the reasoning is open."""
        return self._implied is not None or (self._open is not None and self._open.rule.region.kind == "reasoning")

    def feed(self, text: str, *, ended: bool = False) -> list[Said]:
        """Adds text and returns the parts that it decides. ``ended``: no more text will come."""
        self._text += text
        said = list(self._run(ended=ended))
        if self._at > _KEPT_CHARS:  # a call that is open begins at this place
            self._cut(self._at - 1)
        return said

    def _cut(self, count: int) -> None:
        self._text, self._base = self._text[count:], self._base + count
        self._at, self._scan, self._own = self._at - count, max(self._scan - count, 0), max(self._own - count, 0)
        self.barred = {rule: at - count for rule, at in self.barred.items() if at > count}
        if self._open is not None:
            self._open.start, self._open.body = self._open.start - count, self._open.body - count

    def _run(self, *, ended: bool) -> Iterator[Said]:
        while True:
            if self._open is None:
                said = self._begin_implied(ended) if self._implied is not None else self._outside(ended)
            elif self._open.rule.reader is not None:
                said = self._within_call(ended)
            else:
                said = self._within_text(ended)
            if said is None:
                return
            yield from said
            if self._open is None and self._at >= len(self._text) and self._implied is None:
                return

    def _say(self, kind: Kind, end: int) -> list[Said]:
        """Says the text up to ``end``, which belongs to a region, or is outside of them."""
        start, self._at = max(self._at, self._own), max(self._at, end)
        text = self._text[start:end].translate(self._reading.marks.shown)
        if not text or kind == "nothing":
            return []
        return [Said(kind, text, self._base + start, self._base + end)]

    def _begin_implied(self, ended: bool) -> list[Said] | None:
        """Enters the reasoning in which an answer begins, also where the model opens it itself."""
        rule = self._implied
        assert rule is not None
        start = re.compile(r"\s*").match(self._text, self._at)
        assert start is not None
        found = rule.opens.match(self._text, start.end(), partial=not ended)
        if found is not None and found.partial:
            return None
        self._implied = None
        self._at = self._at if found is None else found.end()
        self._open = _Open(rule, self._at, self._at)
        return []

    def _outside(self, ended: bool) -> list[Said] | None:
        """Text up to the next region, which it enters; None if more is needed."""
        best: tuple[tuple[int, int, int, int], _Rule, Any] | None = None
        hold = len(self._text)
        for i, rule in enumerate(self._rules):
            found = self.next_region(rule, ended)
            if found is None:
                continue
            if found.partial or (rule.region.grows and not ended and found.end() == len(self._text)):
                hold = min(hold, found.start())
                continue
            key = (found.start(), -found.end(), _RANKS.get(rule.region.kind, 2), i)
            if best is None or key < best[0]:
                best = key, rule, found
        if best is not None and (best[0][0] < hold or ended):
            return self._enter(best[1], best[2])
        if hold <= self._at:
            return None
        behind = self._text[max(self._at, self._own) : hold]
        said = self._say(self._reading.outside, hold)
        if behind and not behind.isspace():
            self._blank = self._behind_call = False
        return said or None

    def next_region(self, rule: _Rule, ended: bool) -> Any:
        """The next place where a region begins, or may begin."""
        at = max(self._at, self.barred.get(id(rule), 0))
        if rule.region.behind_calls:
            return rule.opens.match(self._text, self._at, partial=not ended) if self._behind_call else None
        while (found := rule.opens.search(self._text, at, partial=not ended)) is not None and rule.region.bare:
            before = self._text[max(self._at, self._own) : found.start()]
            lead = self._text[found.start() :]
            lead = lead[: len(lead) - len(lead.lstrip())]
            own_line = "\n" in lead or self._text[found.start() - 1 : found.start()] == "\n"
            if own_line or (self._blank and (not before or before.isspace())) or found.start() == len(self._text):
                break
            at = max(found.start() + 1, found.end())
        return found

    def _enter(self, rule: _Rule, found: Any) -> list[Said]:
        said = self._say(self._reading.outside, found.start())
        if said and not said[0].text.isspace():
            self._blank = self._behind_call = False
        if rule.reader is None:
            self._at = found.end()
            if rule.region.kind == "nothing" and rule.closes is None:
                return said
        groups = {name: text for name, text in found.groupdict().items() if text is not None}
        self._scan = body = found.start("body") if "body" in groups else found.end()
        self._open = _Open(rule, found.start(), body, groups)
        return said

    def _within_text(self, ended: bool) -> list[Said] | None:
        """Text of the open region, up to its end."""
        assert self._open is not None
        rule, kind = self._open.rule, self._open.rule.region.kind
        found = None if rule.closes is None else rule.closes.search(self._text, self._at, partial=not ended)
        if found is None:
            return self._say(kind, len(self._text)) or None
        if found.partial or (rule.region.grows and not ended and found.end() == len(self._text)):
            return self._say(kind, found.start()) or None
        said = self._say(kind, found.start())
        self._at, self._open = found.end(), None
        return said

    def _within_call(self, ended: bool) -> list[Said] | None:
        """The calls of the open region, complete or as they stream. Text that is no call is read again as another
        region."""
        open_ = self._open
        assert open_ is not None
        said = self._arguments(open_)
        whole = self._whole_calls(open_, ended)
        if whole is None:
            return said or None
        if open_.arguments is not None and self._at == open_.start:  # it was cut off
            self._at, self.cuts_call = len(self._text), True
        return [*said, *whole]

    def _arguments(self, open_: _Open) -> list[Said]:
        """The arguments that have come of a call whose answer is bound."""
        reader, body = open_.rule.reader, self._text[open_.body :]
        if not self._reading.bound or reader is None:
            return []
        if open_.arguments is None:
            open_.arguments = reader.begun(body, open_.groups)
            if open_.arguments is None or open_.arguments.name not in self._known:
                open_.arguments = None
                return []
        stream, start = open_.arguments, self._base + open_.start
        is_first, text = not stream.taken, stream.take(body).translate(self._reading.marks.shown)
        if is_first:
            return [Said("call", "", start, start, Call(stream.name, text, stream.call_id))]
        return [Said("arguments", text, start, start)] if text else []

    def _whole_calls(self, open_: _Open, ended: bool) -> list[Said] | None:
        """The calls of the open region once it has ended."""
        reader = open_.rule.reader
        assert reader is not None
        try:
            if open_.rule.closes is None:
                new, self._scan = self._text[self._scan :], len(self._text)
                if not ended and not _CLOSERS.intersection(new) and 2 * len(new) < len(self._text) - open_.body:
                    return None  # the value does not end here; one that is malformed is noticed as it doubles
                length = reader.length(self._text[open_.body :])
                if length is not None:
                    return self._called(reader, open_.body + length, open_.body + length)
            elif (end := self._closed(reader, ended)) is not None:
                return self._called(reader, *end)
            if not ended:
                return None
            length = reader.length(self._text[open_.body :])  # a value that is whole needs no end
            if length is None or self._text[open_.body + length :].strip():
                raise NoCallError("it has no end")
            return self._called(reader, open_.body + length, len(self._text))
        except (NoCallError, UnfinishedCallError, RecursionError):
            if open_.arguments is not None and not ended:  # what was said of it stays
                return None
            self.barred[id(open_.rule)] = max(open_.body + ("body" in open_.groups), open_.start + 1)
            self._open = None
            return []

    def _closed(self, reader: PreparedReader, ended: bool) -> tuple[int, int] | None:
        """The first end of the call that lies in none of its strings. None: it has not come."""
        assert self._open is not None
        closes, grows = self._open.rule.closes, self._open.rule.region.grows
        while (found := closes.search(self._text, self._scan, partial=not ended)) is not None:
            self._scan = found.start()
            if found.partial or (grows and not ended and found.end() == len(self._text)):
                return None
            try:
                reader.read(self._text[self._open.body : found.start()], self._open.groups, self._known)
            except UnfinishedCallError:
                self._scan = max(found.end(), found.start() + 1)
                continue
            return found.start(), found.end()
        return None

    def _called(self, reader: PreparedReader, end: int, after: int) -> list[Said]:
        assert self._open is not None
        calls = reader.read(self._text[self._open.body : end], self._open.groups, self._known)
        if self._open.rule.region.bare and any(call.name not in self._known for call in calls):
            raise NoCallError("no such function is offered")
        calls = calls if self._open.arguments is None else calls[1:]
        start, self._at, self._open = self._at, after, None
        self._behind_call = self._blank = True
        return [Said("call", "", self._base + start, self._base + after, call) for call in calls]


def joined(parts: Iterable[Said]) -> list[Said]:
    """Texts of one kind that follow one another as one."""
    found: list[Said] = []
    for part in parts:
        last = found[-1] if found else None
        if last and last.call is part.call is None and (last.kind, last.end) == (part.kind, part.start):
            found[-1] = Said(part.kind, last.text + part.text, last.start, part.end)
        else:
            found.append(part)
    return found
