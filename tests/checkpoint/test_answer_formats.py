"""The forms of reasoning and calls: what each answer says, in whatever pieces it comes, by tokens and spelled out."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from tests.support.mutants import mutant
from tests.web.chats import told

from paceline.checkpoint import answers, call_readers
from paceline.checkpoint.answer_formats import CALL_PARSERS, REASONING_PARSERS, format_of
from paceline.config.service import ReasoningParser, ToolCallParser

PARAMETERS = {
    "a": {"type": "string"},
    "n": {"type": "integer"},
    "o": {"type": "object"},
    "b": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"properties": PARAMETERS}}} for name in "fg"]
F, G = ("f", {"a": "x"}), ("g", {"n": 3})
DS = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
DSML = "｜DSML｜"


def hermes(*bodies):
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


OTHER = '{"name": "g", "arguments": {"n": 3}}'

ANSWERS = [
    (*row["forms"], row["answer"], row["content"], row["reasoning"], [*map(tuple, row["calls"])])
    for row in yaml.safe_load((Path(__file__).parent / "golden" / "answers.yaml").read_text(encoding="utf-8"))
]
"""Form of calls, of reasoning, the answer, its content, its reasoning, its calls."""
IDS = [f"{i} {one[0]} {one[1]}" for i, one in enumerate(ANSWERS)]


def marks_of(text, special):
    """The marks of an answer as added tokens, as a tokenizer has them."""
    found = re.findall(rf'<\|"\|>|<[^<>\n "]{{3,40}}>|\[/?[A-Z_]+\]|{DSML}', text)
    return {i: (mark, special) for i, mark in enumerate(dict.fromkeys(found))}


def pieces(text, rng):
    """Places of random cuts, several in one place now and then."""
    return sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, len(text) + 1)))


@pytest.mark.parametrize("row", ANSWERS, ids=IDS)
def test_each_form_is_read_by_tokens_and_by_text_in_whatever_pieces(row):
    calls, reasoning, text, *wanted = row
    answers_ = format_of("", (), None, calls, reasoning)
    special = marks_of(text, True)
    if any(mark in str(wanted) for mark, _ in special.values()):  # its text is a part of the answer
        special = {}
    for added in ({}, marks_of(text, False), special):
        for cuts in ((), range(1, len(text)), *(pieces(text, random.Random(i)) for i in range(3))):
            assert told(answers_, text, TOOLS, added=added, cuts=cuts) == tuple(wanted)


@pytest.mark.parametrize("row", ANSWERS, ids=IDS)
def test_a_cut_answer_does_not_depend_on_its_pieces_and_invents_no_call(row):
    calls, reasoning, text, _, _, made = row
    answers_, rng = format_of("", (), None, calls, reasoning), random.Random(text)
    for added in ({}, marks_of(text, False)):
        for at in range(0, len(text), 7):
            whole = told(answers_, text[:at], TOOLS, added=added)
            assert told(answers_, text[:at], TOOLS, added=added, cuts=pieces(text[:at], rng)) == whole
            assert whole[2] == made[: len(whole[2])]


BAD = [
    '{"name": "f", "arguments": {"a": }',
    '{"name": "f", "arguments": {"a": "x}',
    '{"name": 3}',
    "f(x)",
    '{"a": "<tool_call>", }',
]


@pytest.mark.parametrize("bad", BAD)
def test_a_call_that_cannot_be_read_loses_no_character_and_no_later_call(bad):
    answers_, text = format_of("", (), None, "hermes", "none"), f"So {hermes(bad)} then\n{hermes(OTHER)}."
    for added in ({}, {1: ("<tool_call>", False), 2: ("</tool_call>", False)}):
        content, _, made = told(answers_, text, TOOLS, added=added)
        assert made == [G]
        assert content == f"So {hermes(bad)} then."
        for seed in range(10):
            assert told(answers_, text, TOOLS, added=added, cuts=pieces(text, random.Random(seed)))[0] == content


def test_text_that_spells_a_token_is_no_mark():
    """Only where the tokenizer has the token: the text is typed after the marks were made code points."""
    reading = answers.Reading(
        format_of("", (), None, "hermes", "qwen3").regions, {5: ("<think>", False)}, outside="content"
    )
    parser = reading.parser(None)
    said = [*parser.feed("the tag <think> opens"), *parser.feed("", ended=True)]
    assert [(one.kind, one.text) for one in said] == [("content", "the tag <think> opens")]


BEGUN = [
    ("<|im_start|>assistant\n<think>\n", "hm</think>yes", "yes", "hm", []),
    ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "yes", "yes", "", []),
    ("<think>half", " of it</think>yes", "yes", " of it", []),
    ('so <tool_call>\n{"name": "f", "argu', 'ments": {"a": "x"}}\n</tool_call>', "", "", [F]),
    ('so <tool_call>\n{"name": "f", "argu', 'oops"', 'oops"', "", []),
    ("<|im_start|>assistant\n", "\n\nyes", "\n\nyes", "", []),
    ("<|im_start|>assistant", "yes", "yes", "", []),
    ("<thi", "nk>hm</think>yes", "yes", "hm", []),
]


@pytest.mark.parametrize(("begun", "text", *"crm"), BEGUN)
def test_what_the_prompt_has_begun_counts_and_is_not_said(begun, text, c, r, m):
    answers_ = format_of("", (), None, "hermes", "qwen3")
    for cuts in ((), range(1, len(text))):
        assert told(answers_, text, TOOLS, begun=begun, cuts=cuts) == (c, r, m)


def test_reasoning_that_is_implied_ends_where_the_prompt_has_closed_it_or_goes_on():
    answers_ = format_of("", (), None, "hermes", "deepseek_r1")
    assert told(answers_, "yes", TOOLS, begun="<think>\n\n</think>\n\n") == ("yes", "", [])
    assert told(answers_, "hm", TOOLS, begun="<think>\n") == ("", "hm", [])
    assert told(answers_, "yes", TOOLS, begun="so ", fresh=False) == ("yes", "", [])


def test_without_tools_all_that_looks_like_a_call_is_content():
    for calls, reasoning, text, *_ in ANSWERS:
        content, _, made = told(format_of("", (), None, calls, reasoning), text)
        assert made == []
        if '"x"' in text:
            assert '"x"' in content


FOUND = [
    ("{{ '<tool_call>' }}", (), ("hermes", None)),
    ("<think></think><tool_call>\n<function=", (), ("qwen3_coder", "qwen3")),
    ("", ("<think>", "</think>", "<tool_call>", "</tool_call>"), ("hermes", "qwen3")),
    ("<tool_call>", ("<|python_tag|>",), ("hermes", None)),
    ("", ("<|python_tag|>", "<|eom_id|>"), ("llama3_json", None)),
    ("", ("<|python_start|>", "<|python_end|>", "<|python_tag|>"), ("llama4_pythonic", None)),
    ("", ("[TOOL_CALLS]", "[THINK]", "[/THINK]"), ("mistral", "mistral")),
    ("", ("<|start|>", "<|channel|>", "<|message|>"), ("openai", "openai_gptoss")),
    (f"{DS[0]}```json{DS[2]}</think>", (DS[0],), ("deepseek_v3", "qwen3")),
    (f"{DS[0]}{DS[2]}</think>", (DS[0],), ("deepseek_v31", "qwen3")),
    (f"<{DSML}tool_calls>", (DSML,), ("deepseek_v4", None)),
    ("<arg_key><think>", (), ("glm45", "qwen3")),
    ("<think>", ("<|tool_calls_section_begin|>",), ("kimi_k2", "kimi_k2")),
    ("<minimax:tool_call><think>", (), ("minimax_m2", "qwen3")),
    ("", ("<|tool_call|>",), ("granite", None)),
    ("", ("<|tool_call>", "<tool_call|>"), ("gemma4", None)),
    ("plain", (), (None, None)),
]


@pytest.mark.parametrize(("template", "added", "forms"), FOUND)
def test_the_form_is_found_by_the_marks_of_template_and_tokens(template, added, forms):
    found = format_of(template, added, None)
    assert (found.calls, found.reasoning) == forms
    assert not found.named


def test_a_name_counts_before_marks_and_none_switches_off():
    response = {"start_anchor": "<", "fields": {"content": {}}}
    found = format_of("<tool_call><think>", (), response, "mistral", "none")
    assert (found.calls, found.reasoning, found.call_ids, found.named) == ("mistral", None, "mistral", True)
    assert format_of("<tool_call><think>", (), None, "none").calls is None
    assert format_of("<tool_call>", (), response).calls is None


def test_the_configuration_allows_every_form():
    assert {*get_args(ToolCallParser)} == {*CALL_PARSERS}
    assert {*get_args(ReasoningParser)} == {*REASONING_PARSERS}


def _ends_at_the_first_mark(monkeypatch):
    """The end of a call is looked for in its strings, too."""
    monkeypatch.setattr(call_readers, "UnfinishedCallError", call_readers.NoCallError)


def _gives_up_all(monkeypatch):
    """A call that is none takes the rest of the answer with it."""
    monkeypatch.setattr(
        answers.AnswerParser,
        "next_region",
        lambda self, rule, ended, real=answers.AnswerParser.next_region: (
            None if self.barred else real(self, rule, ended)
        ),
    )


def _decides_at_once(monkeypatch):
    """What may become a mark is not waited for."""
    feed = answers.AnswerParser.feed
    monkeypatch.setattr(answers.AnswerParser, "feed", lambda self, text, ended=False: feed(self, text, ended=True))


@mutant(answers.AnswerParser, "__init__")
def _says_the_prompt(init, self, *args, **more):
    """What the prompt has begun is a part of the answer."""
    init(self, *args, **more)
    self._own = 0


MUTANTS = [
    (_ends_at_the_first_mark, lambda: test_each_form_is_read_by_tokens_and_by_text_in_whatever_pieces(ANSWERS[4])),
    (_gives_up_all, lambda: test_a_call_that_cannot_be_read_loses_no_character_and_no_later_call(BAD[0])),
    (_decides_at_once, lambda: test_each_form_is_read_by_tokens_and_by_text_in_whatever_pieces(ANSWERS[0])),
    (_says_the_prompt, lambda: test_what_the_prompt_has_begun_counts_and_is_not_said(*BEGUN[4])),
]


@pytest.mark.parametrize(("mutant", "check"), MUTANTS)
def test_a_mistake_is_noticed(mutant, check, monkeypatch):
    check()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
