"""Calls in Qwen 3.5's XML and Gemma 4's objects: what is bound is what their templates write and their parsers read."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace

import jsonschema
import pytest
from openai import OpenAI
from tests.support.models import EOS
from tests.support.rings import slow
from tests.support.schemas import json_tokenizer
from tests.web.chats import SHORT, of_template, told
from tests.web.support import MODEL, call, edge_over, served
from tokenizers import Tokenizer as Backend
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as TEMPLATES

from paceline.checkpoint import call_readers, structural_tag
from paceline.checkpoint.chat import ChatTemplate
from paceline.checkpoint.grammar import Grammars
from paceline.checkpoint.tokenizer import JsonTokenizer, Tokenizer
from paceline.errors import InvalidRequestError
from paceline.web import arguments as argument_formats
from paceline.web import chat as chats
from paceline.web.calls import bound_calls

MODELS = ("qwen3_5", "gemma4")
SPECIALS = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|im_end|>")
USER = [{"role": "user", "content": "hi"}]


@functools.cache
def tokenizer(special: bool = True) -> Tokenizer:
    """Pieces of JSON; with Gemma's marks as special tokens, as in its vocabulary."""
    backend = Backend.from_str(json_tokenizer().backend_json())
    if special:
        backend.add_special_tokens(list(SPECIALS))
    return Tokenizer("marks", JsonTokenizer(backend, f"<{EOS}>"))


@functools.cache
def grammars(special: bool = True) -> Grammars:
    return Grammars(tokenizer(special), 300 + special * len(SPECIALS), (EOS,))


def template(model, speaking):
    (response,) = [response for types, response in TEMPLATES.items() if model in types]
    return of_template(speaking[1]._tokenizer, response)


def tool(properties, *, required=(), name="plan", **more):
    parameters = {"type": "object", "properties": properties, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def bound(model, speaking, tools, choice="required", parallel=False):
    return bound_calls(template(model, speaking), tools, choice, parallel=parallel, in_reasoning=False)


def parsed(model, speaking, text, tools):
    _, _, calls = told(template(model, speaking).format, text, tools)
    return [{"name": name, "arguments": arguments} for name, arguments in calls]


def written(model, name, arguments):
    """A call as the chat template of the model writes it."""
    if model == "qwen3_5":
        lines = [f"<tool_call>\n<function={name}>\n"]
        for key, value in arguments.items():
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            lines.append(f"<parameter={key}>\n{text}\n</parameter>\n")
        return "".join([*lines, "</function>\n</tool_call>"])
    inner = ",".join(f"{key}:{_argument(arguments[key])}" for key in sorted(arguments, key=str.lower))
    return f"<|tool_call>call:{name}{{{inner}}}<tool_call|>"


def _argument(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_argument(value[key])}" for key in sorted(value, key=str.lower)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_argument, value)) + "]"
    return json.dumps(value)


def takes(form, text, special=True):
    """True if the output may be this text, as a whole."""
    try:
        matcher = grammars(special).matcher(form, tokenizer(special).encode(text))
    except InvalidRequestError:
        return False
    (mask,) = matcher.masks([()])
    return bool(mask[EOS // 8] >> EOS % 8 & 1)


TRIP = {
    "city": {"type": "string"},
    "days": {"type": "integer", "minimum": 1, "maximum": 30},
    "far": {"type": "boolean"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "kind": {"$ref": "#/$defs/kind"},
    "stops": {"type": "array", "items": {"type": "object", "properties": {"at": {"type": "string", "maxLength": 9}}}},
}
TRIP_TOOL = tool(TRIP, required=["city", "days"], **{"$defs": {"kind": {"enum": ["train", "bus"]}}})
WHOLE = [
    {"city": "rome", "days": 3},
    {"city": "a < b </p", "days": 30, "far": True, "kind": "bus"},
    {"city": "x", "days": 1, "note": "two\nlines", "stops": [{"at": "oslo"}, {}]},
    {"city": "x", "days": 1, "stops": []},
]
WRONG = [
    {"city": "rome"},
    {"days": 3},
    {"city": "rome", "days": 31},
    {"city": "rome", "days": 3, "kind": "ship"},
    {"city": "rome", "days": 3, "stops": [{"at": "far too long"}]},
    {"city": "rome", "days": 3, "town": "rome"},
]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_what_the_template_writes_is_taken_and_read_back(model, special, speaking):
    form = bound(model, speaking, [TRIP_TOOL], parallel=True)
    texts = [written(model, "plan", arguments) for arguments in WHOLE]
    for text, arguments in zip(texts, WHOLE, strict=True):
        assert takes(form, text, special), text
        assert parsed(model, speaking, text, [TRIP_TOOL]) == [{"name": "plan", "arguments": arguments}]
    separator = "\n" if model == "qwen3_5" else ""
    assert takes(form, separator.join(texts[:2]), special)
    for arguments in WRONG:
        assert not takes(form, written(model, "plan", arguments), special), arguments
    assert not takes(form, "so", special)
    assert not takes(form, written(model, "other", WHOLE[0]), special)


@pytest.mark.parametrize("model", MODELS)
def test_one_call_is_one_and_free_text_may_come_before_a_free_one(model, speaking):
    one, two = (written(model, "plan", arguments) for arguments in WHOLE[:2])
    assert not takes(bound(model, speaking, [TRIP_TOOL]), f"{one}\n{two}")
    alone = bound(model, speaking, [TRIP_TOOL], choice="auto")
    assert takes(alone, "so")
    assert takes(alone, f"so {one}")
    assert takes(alone, written(model, "plan", {"town": "any"}))
    assert not takes(alone, one + two)
    strict = {"type": "function", "function": {**TRIP_TOOL["function"], "strict": True}}
    form = bound(model, speaking, [strict], choice="auto", parallel=True)
    assert takes(form, f"so {two}")
    assert not takes(form, written(model, "plan", {"town": "any"}))


SCHEMAS = [
    tool({}),
    tool({"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}}),
    tool({"b": {"enum": ["x", "y z"]}, "a": {"enum": [1, 2.5, True, None]}}, required=["b"]),
    tool({"a": {"const": "it"}, "b": {"const": 7}}, required=["a", "b"]),
    tool({"a": {"type": "string", "minLength": 1, "maxLength": 3}, "b": {"type": "string", "minLength": 2}}),
    tool({"a": {"anyOf": [{"type": "string", "maxLength": 1}, {"type": "null"}]}}, required=["a"]),
    tool(
        {"a": {"type": ["integer", "null"], "maximum": 9}, "b": {"$ref": "#/$defs/n"}},
        **{"$defs": {"n": {"enum": [5]}}},
    ),
    tool(
        {
            "o": {
                "type": "object",
                "properties": {"z": {"enum": ["q"]}, "Y": {"type": "number", "minimum": 0, "maximum": 1}},
                "required": ["z"],
            },
            "l": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 9},
                "minItems": 2,
                "maxItems": 3,
            },
            "m": {"type": "array", "items": {"enum": ["u", 1]}, "minItems": 1},
        },
        required=["l"],
    ),
    tool({"l": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}}),
]


def drawn(made, tokenizer, form, seed):
    """Text that the form allows, drawn token by token; None if it has no end within some hundred."""
    matcher, rng, output = made.matcher(form), random.Random(seed), []
    for _ in range(400):
        (mask,) = matcher.masks([tuple(output)])
        allowed = [i for i in range(made.vocab_size) if mask[i // 8] >> i % 8 & 1]
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return tokenizer.decode(output, special=True)
        output.append(rng.choice([i for i in allowed if i != EOS]))
    return None


def walks(model, speaking, special=True):
    """Checks that whatever may be written is read as arguments of the schema; returns how many outputs had an end."""
    ended = 0
    for i, one in enumerate(SCHEMAS):
        form = bound(model, speaking, [one])
        for seed in range(4):
            text = drawn(grammars(special), tokenizer(special), form, f"{i} {seed}")
            if text is None:
                continue
            ended += 1
            (call_,) = parsed(model, speaking, text, [one])
            jsonschema.validate(call_["arguments"], one["function"]["parameters"])
            assert call_["name"] == "plan", text
    return ended


@pytest.mark.parametrize("special", [True, *slow([False])])
@pytest.mark.parametrize("model", MODELS)
def test_whatever_is_allowed_is_read_as_arguments_of_the_schema(model, special, speaking):
    assert walks(model, speaking, special) >= 2 * len(SCHEMAS)


def _knows_no_references(monkeypatch):
    monkeypatch.setattr(call_readers, "resolved", lambda schema, root: schema)
    monkeypatch.setattr(call_readers, "types_of", lambda schema, root: (schema["type"],))


def _puts_no_commas(monkeypatch):
    monkeypatch.setattr(
        argument_formats._Function,
        "listed",
        lambda self, members, place: argument_formats.sequence(*(member for _, member in members)),
    )


def _lets_text_end_the_call(monkeypatch):
    monkeypatch.setattr(structural_tag, "pattern_without", lambda excludes: "/(?s:.*)/")


@pytest.mark.parametrize(("model", "mutant"), [("qwen3_5", _knows_no_references), ("gemma4", _puts_no_commas)])
def test_a_mistake_is_caught_by_the_walks(model, mutant, speaking, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, jsonschema.ValidationError)):
        walks(model, speaking)


@pytest.mark.parametrize("model", MODELS)
def test_text_that_would_end_the_call_is_caught(model, speaking, monkeypatch):
    """What is refused is what the parser would read as another call; the mutant allows it."""
    end = "</function>\n</tool_call>" if model == "qwen3_5" else "<tool_call|>"
    text = written(model, "plan", {"city": f"a{end}b", "days": 3})
    assert not takes(bound(model, speaking, [TRIP_TOOL]), text, special=False)
    _lets_text_end_the_call(monkeypatch)
    grammars.cache_clear()
    try:
        assert takes(bound(model, speaking, [TRIP_TOOL]), text, special=False)
        with pytest.raises((AssertionError, ValueError, LookupError)):
            assert parsed(model, speaking, text, [TRIP_TOOL])[0]["arguments"]["city"] == f"a{end}b"
    finally:
        grammars.cache_clear()


REFUSED = [
    ("qwen3_5", {"a": {"type": "string", "pattern": "^a"}}, "#/properties/a has 'pattern'"),
    ("qwen3_5", {"a": {"type": ["string", "integer"]}}, "#/properties/a allows both text and other values"),
    ("qwen3_5", {"a": {"enum": [" a"]}}, "#/properties/a allows ' a'"),
    ("gemma4", {"a": {"type": "string", "format": "date"}}, "#/properties/a has 'format'"),
    ("gemma4", {"a": {}}, "#/properties/a has no type"),
    ("gemma4", {"a-b": {"type": "null"}}, "#/properties/a-b is a name of signs"),
    ("gemma4", {"a": {"type": "array", "items": {"type": "null"}, "maxItems": 99}}, "#/properties/a asks for a length"),
    ("gemma4", {"a": {"$ref": "#"}}, "is nested too deep"),
    ("gemma4", {"a": {"$ref": "#/$defs/b"}}, "there is no such schema"),
    ("qwen3_5", {"a": {"enum": 3}}, "is no valid JSON Schema"),
]


@pytest.mark.parametrize(("model", "properties", "sentence"), REFUSED)
def test_what_cannot_be_bound_is_refused_with_its_place(model, properties, sentence, speaking):
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]\.function\.parameters") as caught:
        bound(model, speaking, [tool(properties)])
    assert sentence in str(caught.value)


def test_a_name_and_a_schema_of_other_keywords_are_refused(speaking):
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]\.function\.name is 'a-b'"):
        bound("gemma4", speaking, [tool({}, name="a-b")])
    with pytest.raises(InvalidRequestError, match="# requires 'b', which is none of its properties"):
        bound("qwen3_5", speaking, [tool({}, required=["b"])])
    with pytest.raises(InvalidRequestError, match="# has 'minProperties'"):
        bound("qwen3_5", speaking, [tool({}, minProperties=1)])


SPOKEN = [
    tool(
        {"days": {"type": "integer", "minimum": 0, "maximum": 9}, "city": {"enum": ["rome", "oslo"]}}, required=["city"]
    ),
    tool({"note": {"type": "string", "minLength": 1, "maxLength": 6}}, required=["note"], name="write"),
]


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_random_weights_calls_as_it_is_asked_by_the_tokens_of_plain_decoding(model, speaking):
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in SPOKEN}
    chat = template(model, speaking)
    answers = replace(chat.format, regions=tuple(one for one in chat.format.regions if one.kind != "reasoning"))
    chat = ChatTemplate(chat._tokenizer, None, answers)  # random weights would not end a thought
    options = {"logit_bias": SHORT, "return_token_ids": True}
    asked = {"model": MODEL, "messages": USER, "tools": SPOKEN, "temperature": 1.0, "max_tokens": 250}
    with (
        served(edge_over(speaking[0], chat=chat)) as at,
        OpenAI(base_url=f"{at}/v1", api_key="none", max_retries=0) as client,
    ):
        for seed, choice in enumerate(["required", {"type": "function", "function": {"name": "write"}}]):
            answer, plain = (
                client.chat.completions.create(
                    **asked,
                    seed=seed,
                    tool_choice=choice,
                    parallel_tool_calls=False,
                    extra_body=options | {"speculation": {"enabled": enabled}},
                )
                for enabled in (True, False)
            )
            (choice_,), (other,) = answer.choices, plain.choices
            assert choice_.token_ids == other.token_ids
            assert choice_.message.tool_calls, choice_
            (made,) = choice_.message.tool_calls
            assert choice == "required" or made.function.name == "write"
            jsonschema.validate(json.loads(made.function.arguments), schemas[made.function.name])


@pytest.mark.parametrize("model", MODELS)
def test_a_form_that_gets_lost_is_noticed(model, speaking, monkeypatch):
    """The mutant: nothing is bound, and such a model calls nothing."""
    monkeypatch.setattr(chats, "bound_calls", lambda *_, **__: None)
    body = {"messages": USER, "tools": SPOKEN, "tool_choice": "required", "seed": 0, "max_tokens": 12}
    with served(edge_over(speaking[0], chat=template(model, speaking))) as at:
        _, _, answer = call(f"{at}/v1/chat/completions", body)
    assert not answer["choices"][0]["message"].get("tool_calls")
