"""Tokens of answers as the HTTP API shows them, over the tokenizers of published models: bytes, places, names."""

import functools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import zoo
from tests.web.support import edge_over

from paceline.checkpoint.token_text import ByteDetokenizer
from paceline.messages import Outcome, PromptScores
from paceline.router.admission import TargetInfo
from paceline.router.session import Session
from paceline.types import (
    Cause,
    Chunk,
    FinishReason,
    PromptLogprobs,
    RequestLimits,
    Round,
    SpeculationParams,
    TokenLogprob,
)
from paceline.web.completions import Completion
from paceline.web.logprobs import token_logprobs
from paceline.web.schema import CompletionBody, read

TEXTS = st.text(alphabet="ab  .\n中🙂👩‍👧é\ufffd\u2581", min_size=1, max_size=8) | st.sampled_from(
    ["Hello world", " and 12 more", "<think>", "naïve “quotes”", "🏳️‍🌈", "\ufffd"]
)
NAMES = [*zoo.MADE, *zoo.QUICK]


@functools.cache
def special_ids(name):
    return sorted(zoo.tokenizer(name).token_bytes.special_ids)


@st.composite
def tokens(draw, name):
    """Tokens that spell texts, with special ones among them."""
    tokenizer = zoo.tokenizer(name)
    parts = draw(st.lists(TEXTS | st.sampled_from(special_ids(name)), min_size=1, max_size=6))
    return [i for part in parts for i in ([part] if isinstance(part, int) else tokenizer.encode_text(part))]


def said(name, prompt, token_ids, sizes, **options):
    """The whole answer of /v1/completions and the events of its stream, of a session that makes these tokens."""
    tokenizer = zoo.tokenizer(name)
    service = SimpleNamespace(info=TargetInfo(tokenizer, 10**6, ()), limits=RequestLimits())
    body = {"prompt": prompt, "logprobs": 2, "max_tokens": len(token_ids), **options}
    whole = Completion(edge_over(service), read(CompletionBody, body), "id")
    streamed = Completion(edge_over(service), read(CompletionBody, body | {"stream": True}), "id")
    (request,) = whole.requests
    prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
    session = Session(
        "s",
        prompt_ids,
        request.sampling,
        SpeculationParams(),
        decode=tokenizer.decode,
        detokenizer=tokenizer.detokenizer(prompt_ids),
    )
    session.open(draft_available=False)
    if request.sampling.prompt_logprobs is not None and len(prompt_ids) > 1:
        scores = tuple(TokenLogprob(-float(i), 1, ((i, -0.5),)) for i in range(1, len(prompt_ids)))
        session.on_target(PromptScores("s", 0, PromptLogprobs(1, scores)))
    at = len(prompt_ids)
    if not token_ids:  # one that is made in any case, and not sent
        session.on_target(Outcome("s", 0, at, (1,), (-1.0,), Round(0, 0, Cause.START), FinishReason.LENGTH))
    while token_ids:
        size = sizes.pop() if sizes else 1
        some, token_ids = tuple(token_ids[:size]), token_ids[size:]
        reason = None if token_ids else FinishReason.LENGTH
        top = (((some[0], -1.0), (some[0] + 1, -2.0)),) * len(some)
        round_ = Round(len(some) - 1, len(some) - 1, Cause.HIT)
        session.on_target(Outcome("s", 0, at, some, (-1.0,) * len(some), round_, reason, 0, top))
        at += len(some)
    actions = session.digest()
    items = [*actions.chunks, actions.result]
    for item in items:
        list(whole.take(0, item))
    return whole.body()["choices"][0], [event["choices"][0] for item in items for event in streamed.take(0, item)]


def assert_in_place(name, choice, events, prompt_ids, token_ids):
    tokenizer, text, columns = zoo.tokenizer(name), choice["text"], choice["logprobs"]
    assert "".join(event["text"] for event in events) == text
    shown = [event["logprobs"] for event in events if event["logprobs"]]
    assert {key: [one for part in shown for one in part[key]] for key in columns} == columns
    offsets = columns["text_offset"]
    assert len(offsets) == len(token_ids)
    assert offsets == sorted(offsets)
    hidden = tokenizer.token_bytes.special_ids
    for i, (token_id, token, offset) in enumerate(zip(token_ids, columns["tokens"], offsets, strict=True)):
        assert 0 <= offset <= len(text)
        if token.startswith("bytes:") or token_id in hidden:
            continue
        if i < len(prompt_ids) and not text[offset:].startswith(token):
            token = token.removeprefix(" ")  # that of the first word of the prompt
        assert text[offset:].startswith(token), (i, token, offset)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_a_token_begins_at_its_place_in_the_text(name, data):
    """Drafted or not, behind any prompt, with the prompt in the text or not."""
    tokenizer = zoo.tokenizer(name)
    answer = data.draw(tokens(name))
    prompt = data.draw(st.sampled_from(["Say: ", "x"]) | tokens(name))
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=10))
    prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    choice, events = said(name, prompt, list(answer), list(sizes))
    assert_in_place(name, choice, events, [], answer)
    echoed, events = said(name, prompt, list(answer), list(sizes), echo=True)
    assert_in_place(name, echoed, events, prompt_ids, [*prompt_ids, *answer])
    assert echoed["text"].endswith(choice["text"])
    if isinstance(prompt, str):
        assert echoed["text"] == prompt + choice["text"]
    none, _ = said(name, prompt, [], [], echo=True)
    assert none["text"] + choice["text"] == echoed["text"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(data=st.data())
def test_the_bytes_of_tokens_join_to_the_text(name, data):
    """With special tokens, whose text is their name; and without, to the text that is sent."""
    tokenizer = zoo.tokenizer(name)
    answer, prompt = data.draw(tokens(name)), list(tokenizer.encode("Say: x"))
    chunk = Chunk(tuple(answer), (-1.0,) * len(answer), (False,) * len(answer), (), None)
    joined = [bytes(entry["bytes"]) for entry in token_logprobs(chunk, tokenizer)]
    before = len(tokenizer.decode(prompt, special=True))
    assert b"".join(joined).decode() == tokenizer.decode([*prompt, *answer], special=True)[before:]
    hidden = tokenizer.token_bytes.special_ids
    shown = b"".join(own for own, token_id in zip(joined, answer, strict=True) if token_id not in hidden)
    choice, _ = said(name, prompt, list(answer), [])
    assert shown.decode() == choice["text"]


def test_parts_of_a_character_have_names_of_their_own():
    first, *rest = zoo.tokenizer("byte_level").encode_text("🙂")
    choice, _ = said("byte_level", "x", [first, *rest], [])
    assert choice["logprobs"]["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0]
    by_id, _ = said("byte_level", "x", [first], [], return_tokens_as_token_ids=True)
    assert by_id["logprobs"]["tokens"] == [f"token_id:{first}"]
    assert by_id["logprobs"]["top_logprobs"] == [{f"token_id:{first}": -1.0, f"token_id:{first + 1}": -2.0}]


def test_counting_names_instead_of_text_is_noticed(monkeypatch):
    monkeypatch.setattr(ByteDetokenizer, "place", lambda self, token_id: self.num_chars + 1)
    with pytest.raises(AssertionError):
        test_a_token_begins_at_its_place_in_the_text.hypothesis.inner_test("byte_level", _Chosen("ab", "Say: "))


class _Chosen:
    """Data of a property that draws these."""

    def __init__(self, answer, prompt):
        self._values = [zoo.tokenizer("byte_level").encode_text(answer), prompt, []]

    def draw(self, _):
        return self._values.pop(0)
