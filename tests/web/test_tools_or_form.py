"""Tools together with a form of the answer: either calls or the form, behind the reasoning; by every face."""

import json

import jsonschema
import pytest
from tests.support.models import EOS
from tests.web.chats import SHORT
from tests.web.support import call
from tests.web.test_call_forms import grammars, template, tokenizer

from paceline.errors import InvalidRequestError
from paceline.types import StructuredOutput
from paceline.web import calls as binding
from paceline.web.calls import bound_calls

USER = [{"role": "user", "content": "hi"}]
ANSWER = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["rome", "oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "weather", "parameters": PARAMETERS, "strict": True}
CALL, CONTENT = {"6": 60}, {"6": -100}
"""Biases of a model of random weights for and against the mark that begins a call."""


def chats(answer):
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [json.loads(one["function"]["arguments"]) for one in message.get("tool_calls", ())]
    return message.get("reasoning_content", ""), message["content"], calls, choice["token_ids"]


def responses(answer):
    found = {item["type"]: item for item in answer["output"]}
    texts = [found[kind]["content"][0]["text"] if kind in found else None for kind in ("reasoning", "message")]
    calls = [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
    return texts[0] or "", texts[1], calls, answer["token_ids"]


def messages(answer):
    found = {block["type"]: block for block in answer["content"]}
    calls = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
    texts = [found[kind][kind] if kind in found else None for kind in ("thinking", "text")]
    return texts[0] or "", texts[1], calls, answer["token_ids"]


FACES = {
    "chat/completions": (
        chats,
        {"messages": USER, "max_tokens": 200, "tools": [{"type": "function", "function": FUNCTION}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}},
    ),
    "responses": (
        responses,
        {"input": "hi", "max_output_tokens": 200, "tools": [{"type": "function", **FUNCTION}]},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": ANSWER}}},
    ),
    "messages": (
        messages,
        {
            "messages": USER,
            "max_tokens": 200,
            "tools": [{"name": "weather", "input_schema": PARAMETERS, "strict": True}],
        },
        {"output_config": {"format": {"type": "json_schema", "schema": ANSWER}}},
    ),
}


def asked(at, face, bias, seed=0, **more):
    read, body, form = FACES[face]
    sampling = {"temperature": 1.0, "seed": seed, "logit_bias": SHORT | bias, "return_token_ids": True}
    status, _, answer = call(f"{at}/v1/{face}", body | form | sampling | more)
    assert status == 200, answer
    return read(answer)


@pytest.mark.parametrize("face", FACES)
def test_an_answer_is_a_call_or_has_the_form(at, face):
    for bias in (CALL, CONTENT, {}):
        _, content, calls, tokens = asked(at, face, bias)
        assert bool(calls) != bool(content)
        if calls:
            assert bias != CONTENT
            for arguments in calls:
                jsonschema.validate(arguments, PARAMETERS)
        else:
            assert bias != CALL
            jsonschema.validate(json.loads(content), ANSWER)
        assert tokens == asked(at, face, bias, speculation={"enabled": False})[3]
        assert tokens == asked(at, "chat/completions", bias)[3]


@pytest.mark.parametrize("bias", [CALL, CONTENT])
def test_reasoning_comes_first_and_is_free(at, bias):
    """The prompt opens it; the form alone follows it too."""
    thinks = {"chat_template_kwargs": {"thinking": True}, "max_tokens": 300}
    thoughts = []
    for seed in range(3):
        for tools in ({}, {"tools": []}):
            thought, content, calls, tokens = asked(at, "chat/completions", bias | {"5": 4}, seed, **thinks, **tools)
            assert 5 in tokens
            thoughts.append(thought)
            assert bool(calls) == (bias == CALL and not tools)
            if not calls:
                jsonschema.validate(json.loads(content), ANSWER)
    assert any(thoughts)


def test_an_answer_that_must_call_has_no_use_for_the_form(at):
    _, content, calls, _ = asked(at, "chat/completions", {}, tool_choice="required")
    assert not content
    assert calls
    _, content, calls, _ = asked(at, "chat/completions", {}, tool_choice="none")
    assert not calls
    jsonschema.validate(json.loads(content), ANSWER)


def allows(form, text):
    """True if the whole text is an answer of the form."""
    matcher = grammars().matcher(form)
    return matcher.append(tokenizer().encode(text)) and bool(matcher.masks([()])[0][EOS // 8] >> EOS % 8 & 1)


TOOL = {"type": "function", "function": {"name": "plan", "parameters": PARAMETERS}}
CALLS = {
    "qwen3_5": "<tool_call>\n<function=plan>\n<parameter=city>\nrome\n</parameter>\n</function>\n</tool_call>",
    "gemma4": '<|tool_call>call:plan{city:<|"|>rome<|"|>}<tool_call|>',
}
THOUGHTS = {"qwen3_5": "<think>so</think>\n\n", "gemma4": "<|channel>thought\nso<channel|>"}
CONTENTS = [
    (StructuredOutput(json_schema=ANSWER), '{"ok": true, "n": 3}', '{"ok": 1, "n": 3}'),
    (StructuredOutput(json_object=True), '{"a": [1]}', "[1]"),
    (StructuredOutput(regex="[ab]+"), "abab", "abc"),
    (StructuredOutput(choice=("yes", "no")), "no", "maybe"),
    (StructuredOutput(structural_tag={"format": {"type": "const_string", "value": "a"}}), "a", "b"),
    (
        StructuredOutput(
            structural_tag={
                "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
                "triggers": ["<f>"],
            }
        ),
        "see <f>3</f>",
        "see <f>x</f>",
    ),
]


@pytest.mark.parametrize(("content", "right", "wrong"), CONTENTS)
@pytest.mark.parametrize("model", CALLS)
def test_every_form_of_content_stands_beside_every_form_of_calls(speaking, model, content, right, wrong):
    form = bound_calls(template(model, speaking), [TOOL], "auto", content, parallel=True, in_reasoning=False)
    thought, called = THOUGHTS[model], CALLS[model]
    for text in (right, called, thought + right, thought + called):
        assert allows(form, text), text
    free = content.structural_tag is not None and "triggers" in content.structural_tag  # text of its own
    for text in (wrong, thought + wrong, *(() if free else (called + right, right + called, f"so {called}", ""))):
        assert not allows(form, text), text
    begun = bound_calls(template(model, speaking), [TOOL], None, content, parallel=True, in_reasoning=True)
    end = thought[thought.index("so") :]
    assert allows(begun, end + right)
    assert allows(begun, end + called)
    assert not allows(begun, right)


@pytest.mark.parametrize("model", CALLS)
def test_one_call_at_most_if_several_are_not_wanted(speaking, model):
    two = ("\n" if model == "qwen3_5" else "").join([CALLS[model]] * 2)
    for parallel in (True, False):
        form = bound_calls(
            template(model, speaking), [TOOL], "auto", CONTENTS[0][0], parallel=parallel, in_reasoning=False
        )
        assert allows(form, CALLS[model])
        assert allows(form, two) is parallel


def test_a_form_that_lets_text_through_is_noticed(speaking, monkeypatch):
    """The mutant: content is free beside calls."""
    monkeypatch.setattr(binding, "formats_of", lambda *_: [{"type": "regex", "pattern": "(?s:.*)"}])
    form = bound_calls(template("gemma4", speaking), [TOOL], "auto", CONTENTS[0][0], parallel=True, in_reasoning=False)
    assert allows(form, CONTENTS[0][2])


def test_a_grammar_beside_tools_is_refused(at, speaking):
    body = {"messages": USER, "tools": [TOOL], "structured_outputs": {"grammar": 'root ::= "a"'}}
    status, _, answer = call(f"{at}/v1/chat/completions", body)
    assert (status, answer["error"]["message"][:36]) == (400, "structured_outputs.grammar is given ")
    wrong = {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {}}}}}
    status, _, answer = call(f"{at}/v1/chat/completions", body | {"structured_outputs": None, "response_format": wrong})
    assert (status, "#/items has 'not'" in answer["error"]["message"]) == (400, True)
    large = StructuredOutput(regex="a" * 65_000)
    with pytest.raises(InvalidRequestError, match="too long to be bound"):
        bound_calls(template("gemma4", speaking), [TOOL] * 20, None, large, parallel=True, in_reasoning=False)
