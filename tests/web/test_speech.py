"""The parts of an answer by its tokens: the same in whatever chunks they come, and without a special token's text."""

import random
import re
from types import SimpleNamespace

import pytest
from tests.support import zoo

from paceline.checkpoint.answer_formats import format_of
from paceline.checkpoint.answers import Reading
from paceline.checkpoint.marks import Marks
from paceline.messages import Outcome
from paceline.router.session import Session
from paceline.types import Cause, FinishReason, Round, SamplingParams, SpeculationParams
from paceline.web.speech import Speech, ends_of

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
PIECES = (
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "\n",
        '{"name": "f", "arguments": {"a": "',
        '"}}',
        "é世🙂",
        " x ",
    ),
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|start|>assistant", "STOP", "ST"),
    *(
        "[TOOL_CALLS]",
        "f[ARGS]",
        '{"a": "x"}',
        "<function=f>",
        "<parameter=a>",
        "</parameter>",
        "</function>",
        "<",
        "{",
    ),
)


def spoken(tokenizer, reading, token_ids, sizes, *, stop=(), end=None, **sampling):
    """(content, reasoning, calls) of tokens that come in chunks of these sizes, through a session as a router has it.

    ``end``: an end-of-sequence token, with which the tokens end.
    """
    prompt = tuple(tokenizer.encode_text("x"))
    params = SamplingParams(max_tokens=4000, **sampling)
    eos = () if end is None else (end,)
    skips = params.skip_special_tokens
    detokenizer = tokenizer.detokenizer(prompt, special=not skips)
    session = Session(
        *("s", prompt, params, SpeculationParams()),
        decode=tokenizer.decode,
        detokenizer=detokenizer,
        stop=stop,
        eos_token_ids=eos,
    )
    session.open()
    speech = Speech(*(reading.parser(TOOLS), reading, tokenizer, prompt, ends_of(params, eos)), skips_special=skips)
    parts, at = [], 0
    while at < len(token_ids) and session.result is None:
        some = tuple(token_ids[at : at + next(sizes)])
        at += len(some)
        last = at == len(token_ids)
        reason = None if not last else FinishReason.LENGTH if end is None else FinishReason.STOP
        round_ = Round(len(some), len(some) - 1, Cause.HIT)
        message = Outcome("s", 0, len(prompt) + at - len(some), some, (0.0,) * len(some), round_, reason)
        session.on_target(message)
        for chunk in session.digest().chunks:
            parts += speech.take(chunk)
    parts += speech.finish()
    text = {kind: "".join(part.text for part in parts if part.kind == kind) for kind in ("content", "reasoning")}
    places = [place for part in parts for place in part.places]
    assert places == sorted(set(places))
    calls = []
    for part in parts:
        if part.kind == "tool_call":
            calls.append((part.name, part.text))
        elif part.kind == "tool_arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + part.text)
    return *text.values(), calls, session.result.text


def one_by_one():
    while True:
        yield 1


def at_random(rng):
    while True:
        yield rng.choice((1, 2, 3, 5, 8, 100))


def drawn(tokenizer, rng):
    """Tokens of marks, text and whatever else the vocabulary has."""
    ids = []
    for _ in range(rng.randint(1, 12)):
        if rng.random() < 0.8:
            ids += tokenizer.encode_text(rng.choice(PIECES))
        else:
            ids.append(rng.choice(range(tokenizer.vocab_size)))
    return ids


FORMATS = [("hermes", "qwen3"), ("openai", "openai_gptoss"), ("mistral", "deepseek_r1"), ("qwen3_coder", "none")]


@pytest.mark.parametrize("name", zoo.EVERY)
def test_what_is_said_does_not_depend_on_chunks_and_holds_no_special_token(name):
    tokenizer = zoo.tokenizer(name)
    special = [text for text, is_special in tokenizer.added_tokens.values() if is_special and len(text) > 4]
    for form in FORMATS:
        answers = format_of("", (), None, *form)
        readings = [
            Reading(answers.regions, tokenizer.added_tokens, outside=answers.outside, bound=bound)
            for bound in (False, True)
        ]
        for seed in range(14 if name in zoo.MADE else 4):
            reading = readings[seed % 2]
            rng = random.Random(f"{form} {seed}")
            ids, end = drawn(tokenizer, rng), None
            if rng.random() < 0.5:
                end = rng.choice((tokenizer.eos_token_ids[0], ids[-1]))
                ids = [one for one in ids if one != end] + [end]
            stop = ("STOP",) if rng.random() < 0.5 else ()
            whole = spoken(tokenizer, reading, ids, iter((len(ids),)), stop=stop, end=end)
            assert spoken(tokenizer, reading, ids, one_by_one(), stop=stop, end=end) == whole, (form, seed)
            assert spoken(tokenizer, reading, ids, at_random(rng), stop=stop, end=end) == whole, (form, seed)
            assert not any(text in part for text in special for part in (whole[0], whole[1], str(whole[2])))
            if "STOP" in whole[3] and stop:
                raise AssertionError("the text goes on behind its end")


def _takes_what_is_withheld(monkeypatch):
    """Text that may become a stop string is read at once."""
    take = Speech.take
    monkeypatch.setattr(Speech, "take", lambda self, chunk: (setattr(self, "num_allowed", 10**6), take(self, chunk))[1])


def _does_not_know_the_ends(monkeypatch):
    """The last token is a token like others."""
    monkeypatch.setattr("tests.web.test_speech.ends_of", lambda *_: frozenset())


def _shows_marks(monkeypatch):
    """A special token that becomes content is shown."""
    monkeypatch.setattr(Marks, "shown", property(lambda self: self.spelled, lambda self, value: None), raising=False)


MISTAKES = [
    (_takes_what_is_withheld, lambda: test_a_stop_string_within_a_mark_or_a_call_ends_the_answer_there()),
    (_does_not_know_the_ends, lambda: test_the_mark_that_ended_the_answer_ends_its_call()),
    (_shows_marks, lambda: test_what_ended_the_answer_is_no_text_of_it("special_marks", "<pad>")),
]


@pytest.mark.parametrize(("mutant", "check"), MISTAKES)
def test_a_mistake_is_noticed(mutant, check, monkeypatch):
    check()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check()


def reading_of(tokenizer, calls="hermes", reasoning="qwen3"):
    answers = format_of("", (), None, calls, reasoning)
    return Reading(answers.regions, tokenizer.added_tokens, outside=answers.outside)


@pytest.mark.parametrize("end", ["</think>", "<tool_call>", "</tool_call>", "<pad>"])
@pytest.mark.parametrize("name", ["plain_marks", "special_marks"])
def test_what_ended_the_answer_is_no_text_of_it(name, end):
    """An end within a thought, within a call and in the content; a token that is a mark, and one that is none."""
    tokenizer = zoo.tokenizer(name)
    reading, end_id = reading_of(tokenizer), tokenizer.encode_text(end)[-1]
    for text in ("<think>hm", "so", '<tool_call>{"name": "f", "argu'):
        shown = text if name == "plain_marks" else text.replace("<tool_call>", "")
        wanted = ("", "hm", []) if text.startswith("<think>") else (shown, "", [])
        if end in text:  # it would have ended the answer
            continue
        ids = [*tokenizer.encode_text(text), end_id]
        assert spoken(tokenizer, reading, ids, one_by_one(), end=end_id)[:3] == wanted
        ended = spoken(tokenizer, reading, ids, one_by_one(), stop_token_ids=(end_id,), end=end_id)
        assert ended[:3] == wanted


def test_the_mark_that_ended_the_answer_ends_its_call():
    tokenizer = zoo.tokenizer("plain_marks")
    for form, call in (("hermes", '{"name": "f"}'), ("glm45", "f\n<arg_key>a</arg_key><arg_value>x</arg_value>")):
        ids = tokenizer.encode_text(f"<tool_call>{call}</tool_call>")
        content, _, calls, _ = spoken(tokenizer, reading_of(tokenizer, form), ids, one_by_one(), end=ids[-1])
        assert (content, [name for name, _ in calls]) == ("", ["f"])


def test_a_stop_string_within_a_mark_or_a_call_ends_the_answer_there():
    tokenizer = zoo.tokenizer("plain_marks")
    reading = reading_of(tokenizer)
    for text, stop, wanted in (
        ("<think>hm STOP", "STOP", ("", "hm ", [])),
        ("so <tool_call>", "tool", ("so <", "", [])),
        ('<tool_call>{"name": "f", "x": 1}', '"x"', ('<tool_call>{"name": "f", ', "", [])),
        ("a</think>b", "nk", ("a</thi", "", [])),
    ):
        ids = tokenizer.encode_text(text)
        for sizes in (one_by_one(), iter((len(ids),)), at_random(random.Random(text))):
            assert spoken(tokenizer, reading, ids, sizes, stop=(stop,))[:3] == wanted


def test_special_tokens_are_shown_where_they_are_asked_for():
    tokenizer = zoo.tokenizer("special_marks")
    ids = [*tokenizer.encode_text("<think>hm</think>so<|im_start|>"), tokenizer.eos_token_ids[0]]
    nothing = Reading((), {}, outside="content")
    shown = {i: (text, False) for i, (text, _) in tokenizer.added_tokens.items()}
    parted = Reading(format_of("", (), None, "hermes", "qwen3").regions, shown, outside="content")
    for sizes in (one_by_one(), iter((len(ids),))):
        said = spoken(tokenizer, nothing, ids, sizes, end=ids[-1], skip_special_tokens=False)
        assert said[0] == said[3] == "<think>hm</think>so<|im_start|>"
    said = spoken(tokenizer, parted, ids, one_by_one(), end=ids[-1], skip_special_tokens=False)
    assert said[:2] == ("so<|im_start|>", "hm")


def test_ids_of_calls_have_the_form_that_templates_demand():
    tokenizer = zoo.tokenizer("plain_marks")
    reading = reading_of(tokenizer)
    ids = tokenizer.encode_text('<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>')
    text = tokenizer.decode(ids)
    for form, pattern in (
        ("random", r"call_[0-9a-f]{24}"),
        ("mistral", r"[A-Za-z0-9]{9}"),
        ("kimi", r"functions\.f:[01]"),
    ):
        speech = Speech(reading.parser(TOOLS), reading, tokenizer, (), (), form)
        chunk = SimpleNamespace(token_ids=tuple(ids), text=text)
        found = [part.call_id for part in (*speech.take(chunk), *speech.finish()) if part.kind == "tool_call"]
        assert len({*found}) == 2
        for one in found:
            assert re.fullmatch(pattern, one)
