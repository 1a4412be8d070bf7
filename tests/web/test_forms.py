"""Structured output by OpenAI's and vLLM's names: what arrives, and that the answer has the form."""

import json
import re

import pytest
from tests.web.support import MODEL, call, refusal

from paceline.types import StructuredOutput

USER = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OF_SCHEMA = StructuredOutput(json_schema=SCHEMA)
NAMED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}

TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
FORMS = [
    ({"response_format": NAMED}, OF_SCHEMA),
    ({"response_format": {"type": "json_object"}}, StructuredOutput(json_object=True)),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}}, StructuredOutput(regex="a+")),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, OF_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "json_object": False}}, OF_SCHEMA),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutput(choice=("a", "b"))),
    ({"response_format": TAG}, StructuredOutput(structural_tag=TAG)),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, StructuredOutput(structural_tag=TAG)),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, StructuredOutput(grammar='root ::= "a"')),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_choice": ["a"]}, StructuredOutput(choice=("a",))),
    ({"json_schema": SCHEMA}, OF_SCHEMA),
    ({"json_schema": json.dumps(SCHEMA)}, OF_SCHEMA),
    ({"regex": "a+"}, StructuredOutput(regex="a+")),
    ({"grammar": 'root ::= "a"'}, StructuredOutput(grammar='root ::= "a"')),
    ({"ebnf": 'root ::= "a"'}, StructuredOutput(grammar='root ::= "a"')),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, OF_SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, OF_SCHEMA),
    ({"response_format": {"type": "json", "value": SCHEMA}}, OF_SCHEMA),
    ({"response_format": {"type": "regex", "value": "a+"}}, StructuredOutput(regex="a+")),
    ({"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}, StructuredOutput(grammar='root ::= "a"')),
    ({"structured_output": {"regex": "a"}}, StructuredOutput(regex="a")),
    ({}, None),
]


@pytest.mark.parametrize(("body", "form"), FORMS)
def test_a_chat_is_asked_for_the_form(scripted, body, form):
    service, at = scripted
    service.says = "x"
    status, _, answer = call(f"{at}/v1/chat/completions", {"messages": USER} | body)
    assert status == 200, answer
    assert service.requests[-1].sampling.structured_output == form


def test_a_response_is_asked_for_the_form_and_says_which(scripted):
    service, at = scripted
    service.says = "x"
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    status, _, answer = call(f"{at}/v1/responses", {"input": "hello", "text": {"format": form}})
    assert status == 200, answer
    assert answer["text"] == {"format": form}
    assert service.requests[-1].sampling.structured_output == OF_SCHEMA


def test_a_completion_has_the_form(url):
    asked = {"model": MODEL, "prompt": "the", "max_tokens": 30, "temperature": 1, "seed": 3}
    status, _, answer = call(f"{url}/v1/completions", asked | {"structured_outputs": {"regex": "(ab|cd){2,4}"}})
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch("(ab|cd){2,4}", choice["text"])


def test_a_form_that_cannot_be_compiled_is_refused_with_its_place(url):
    assert "#/items has 'not', a keyword that is not supported" in refusal(
        f"{url}/v1/completions", {"prompt": "the", "guided_json": {"items": {"not": {}}}}
    )
