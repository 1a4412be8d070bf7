"""Demanded calls in every form that can be: whatever the grammar allows is read back as calls with valid arguments."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
from types import SimpleNamespace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.models import EOS
from tests.support.schemas import json_tokenizer
from tests.web.chats import told
from tests.web.test_call_forms import drawn
from tokenizers import Tokenizer as Backend

from paceline.checkpoint.answer_formats import CALLS, format_of
from paceline.checkpoint.answers import Reading
from paceline.checkpoint.call_readers import ArgumentsStream
from paceline.checkpoint.grammar import Grammars
from paceline.checkpoint.tokenizer import JsonTokenizer, Tokenizer
from paceline.errors import InvalidRequestError
from paceline.web import call_forms
from paceline.web.arguments import Work
from paceline.web.call_forms import FORMS
from paceline.web.calls import bound_calls

REASONING = {"openai": "openai_gptoss"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "plan",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["rome", "oslo"]},
                    "days": {"type": "integer", "minimum": 0, "maximum": 9},
                    "far": {"type": "boolean"},
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
NAMES = sorted({*FORMS, "mistral"})


@functools.cache
def tokenizer(name: str, special: bool = True) -> Tokenizer:
    """Pieces of JSON, and the marks of a form as added tokens."""
    regions = format_of("", (), None, name, REASONING.get(name, "none")).regions
    text = "".join(pattern for one in regions for pattern in (one.opens, one.closes or "")).replace("\\", "")
    marks = dict.fromkeys(re.findall(r"(?<!\?P)<[^<>()?\n ]{3,40}>|\[[A-Z_]+\]", text))
    backend = Backend.from_str(json_tokenizer().backend_json())
    if special:
        backend.add_special_tokens(list(marks))
    else:
        backend.add_tokens(list(marks))
    return Tokenizer("marks", JsonTokenizer(backend, f"<{EOS}>"))


@functools.cache
def grammars(name: str, special: bool = True) -> Grammars:
    return Grammars(tokenizer(name, special), tokenizer(name, special).vocab_size, (EOS,))


def bound(name, choice="required", *, parallel=True, tools=TOOLS, writes=()):
    chat = SimpleNamespace(
        format=format_of("", (), None, name, REASONING.get(name, "none")), writes=lambda mark: mark in writes
    )
    return bound_calls(chat, tools, choice, parallel=parallel, in_reasoning=False)


def walk(name, form, seed, special=True):
    return drawn(grammars(name, special), tokenizer(name, special), form, seed)


def read(name, text):
    answers = format_of("", (), None, name, REASONING.get(name, "none"))
    return told(answers, text, TOOLS, added=tokenizer(name).added_tokens)


def pieces(name, text, cuts=()):
    """Content, and of each call its name and the pieces of its arguments, of an answer that comes in pieces."""
    answers = format_of("", (), None, name, REASONING.get(name, "none"))
    reading = Reading(answers.regions, tokenizer(name).added_tokens, outside=answers.outside, bound=True)
    parser, text = reading.parser(TOOLS), reading.marks.of_text(text)
    edges = [0, *(cut for cut in cuts if cut < len(text)), len(text)]
    said = [one for start, stop in itertools.pairwise(edges) for one in parser.feed(text[start:stop])]
    said += parser.feed("", ended=True)
    calls: list[tuple[str, list[str]]] = []
    for one in said:
        if one.call is not None:
            calls.append((one.call.name, [one.call.arguments]))
        elif one.kind == "arguments":
            calls[-1][1].append(one.text)
    return "".join(one.text for one in said if one.kind == "content"), calls


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('{}[]"\\\\aé'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('{}"\\\\a'), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text('{}"\\\\a'), _JSON, max_size=3), st.text('{}[]"\\\\ ,a'), st.lists(st.integers(0, 99)))
def test_arguments_end_with_their_object_whatever_its_strings_hold(arguments, behind, cuts):
    written = json.dumps(arguments)
    text = f'{{"name": "plan", "arguments": {written}{behind}'
    stream = ArgumentsStream("plan", "call-1", text.index(written))
    edges = sorted(min(cut + text.index(written), len(text)) for cut in cuts)
    assert "".join(stream.take(text[:edge]) for edge in [*edges, len(text)]) == written


WHOLE = {
    "pythonic",
    "llama4_pythonic",
    "gemma4",
    "granite",
    "jamba",
    "hunyuan_a13b",
    "phi4_mini_json",
    "mistral",
}
"""Forms of calls, besides those of elements, whose arguments are no JSON, or follow others in one list."""


@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_json_come_in_pieces_that_say_the_same(name):
    """Whatever the cuts, cut off or not: the pieces join to the same text, which is the arguments that were written."""
    in_pieces = name not in WHOLE and not isinstance(FORMS.get(name), call_forms.ElementForm)
    seen = 0
    for seed in range(3):
        text = walk(name, bound(name), f"{name} {seed}")
        if text is None:
            continue
        rng = random.Random(seed)
        end = len(text) if rng.random() < 0.7 else rng.randrange(len(text))
        for written in (text, text[:end]):
            content, whole = pieces(name, written)
            cuts = sorted(rng.sample(range(1, len(written)), min(5, len(written) - 1))) if len(written) > 1 else []
            for edges in (range(1, len(written)), cuts):
                other, calls = pieces(name, written, edges)
                assert other == content
                assert [(one, "".join(parts)) for one, parts in calls] == [(one, "".join(p)) for one, p in whole]
                seen += sum(len(parts) > 1 for _, parts in calls)
        read_calls = [(one, json.loads("".join(parts))) for one, parts in pieces(name, text)[1]]
        assert read_calls == read_spelled(name, text)[1] == read(name, text)[2]
    assert bool(seen) is in_pieces


def read_spelled(name, text):
    """The same where no mark came as its own token: ordinary tokens have spelled them all."""
    answers = format_of("", (), None, name, REASONING.get(name, "none"))
    reading = Reading(answers.regions, tokenizer(name, False).added_tokens, outside=answers.outside, bound=True)
    parser = reading.parser(TOOLS)
    said = [*parser.feed(text), *parser.feed("", ended=True)]
    content, calls = "".join(one.text for one in said if one.kind == "content"), []
    for one in said:
        if one.call is not None:
            calls.append((one.call.name, one.call.arguments))
        elif one.kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + one.text)
    return content, [(one, json.loads(arguments)) for one, arguments in calls]


def check_walks(name, form, seeds, least=1):
    """Every output is nothing but calls of the tools, with valid arguments; returns the numbers of calls."""
    found = []
    for seed in range(seeds):
        text = walk(name, form, f"{name} {seed}")
        if text is None:
            continue
        content, _, calls = read(name, text)
        assert calls, text
        assert not content.strip(), text
        for called, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[called])
        found.append(len(calls))
    assert len(found) >= least, "no output came to an end"
    return found


@pytest.mark.parametrize("name", NAMES)
def test_what_is_demanded_is_read_back_as_valid_calls(name):
    check_walks(name, bound(name), 4)
    assert {*check_walks(name, bound(name, parallel=False), 2)} == {1}
    named = bound(name, {"name": "now"})
    text = next(filter(None, (walk(name, named, seed) for seed in range(9))))
    assert read(name, text)[2] == [("now", {})], text


SPELLED = [name for name in NAMES if all(token.isascii() for token, _ in tokenizer(name).added_tokens.values())]
"""Forms whose marks the ordinary tokens of the vocabulary can spell: it lacks most bytes of other characters."""


@pytest.mark.parametrize("name", SPELLED)
def test_marks_that_are_text_may_be_spelled_by_any_tokens(name):
    """Marks that are added tokens, but not special, are text to a grammar: it lets ordinary tokens write them."""
    texts = [text for seed in range(6) if (text := walk(name, bound(name), f"{name} {seed}", special=False))]
    assert texts
    for text in texts:
        content, calls = read_spelled(name, text)
        assert not content.strip(), text
        for called, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[called])
        assert calls == read(name, text)[2] != [], text


def test_both_forms_of_mistral_are_written():
    for writes, mark in (((), "[TOOL_CALLS] ["), (("[ARGS]",), "[TOOL_CALLS]plan[ARGS]")):
        form = bound("mistral", {"name": "plan"}, writes=writes)
        texts = [text.lstrip() for seed in range(5) if (text := walk("mistral", form, seed))]
        assert {text[: len(mark)] for text in texts} == {mark}


FREE = [name for name in NAMES if name == "mistral" or FORMS[name].trigger is not None]


@pytest.mark.parametrize("name", FREE)
def test_one_call_at_most_is_one_and_text_may_come_before_it(name):
    form = bound(name, "auto", parallel=False)
    demanded = bound(name, parallel=False)
    text = next(filter(None, (walk(name, demanded, seed) for seed in range(9))))
    matcher = grammars(name).matcher
    ids = tokenizer(name).encode("so ")
    matcher(form, [*ids, *tokenizer(name).encode(text.lstrip())])
    with pytest.raises(InvalidRequestError):
        matcher(form, [*ids, *tokenizer(name).encode(text.strip() + "\n" + text.strip())])


def test_what_cannot_be_bound_is_refused_by_name():
    for name in sorted({*NAMES} - {*FREE}):
        with pytest.raises(
            InvalidRequestError, match=f"parallel_tool_calls is false, but .* form {name}, .* free text"
        ):
            bound(name, "auto", parallel=False)
    for name in sorted({*CALLS} - {*NAMES}):
        with pytest.raises(InvalidRequestError, match=f"tool_choice is 'required', but .* form {name}, which cannot"):
            bound(name)
    tool = {"type": "function", "function": {"name": "a-b", "parameters": {}}}
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]\.function\.name is 'a-b'"):
        bound("pythonic", tools=[tool])


def _forgets_the_end(monkeypatch):
    form = FORMS["kimi_k2"]
    wrong = call_forms.JsonForm("<|tool_call_begin|>NAME<|tool_call_argument_begin|>", "", opens=form.opens)
    monkeypatch.setitem(FORMS, "kimi_k2", wrong)


def _puts_the_name_elsewhere(monkeypatch):
    monkeypatch.setitem(FORMS, "deepseek_v3", FORMS["deepseek_v31"])


@pytest.mark.parametrize(("name", "mutant"), [("kimi_k2", _forgets_the_end), ("deepseek_v3", _puts_the_name_elsewhere)])
def test_a_mistake_is_caught_by_the_walks(name, mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, jsonschema.ValidationError)):
        check_walks(name, bound(name), 4)


def test_every_form_states_json_as_the_parsers_read_it():
    """Names and keys are quoted as JSON where they stand in JSON."""
    tag = FORMS["hermes"].tag({"name": 'a"b', "parameters": {}}, 0, Work(), free=False)
    assert json.dumps('a"b') in json.dumps(tag["content"]["elements"][1]["value"]).encode().decode("unicode_escape")
