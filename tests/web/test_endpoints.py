"""Small endpoints and names: tokenizing, model names, CORS, HEAD, load, prompts with a gap, forbidden words."""

import asyncio

import pytest
from tests.security.conftest import digest, write_keys
from tests.web.chats import RESPONSE, Bytes, Scripted
from tests.web.support import MODEL, call, edge_over, events, served
from tests.web.test_fields import Tokenizer as WithTemplate
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from paceline.checkpoint.answer_formats import of_response
from paceline.checkpoint.chat import ChatTemplate
from paceline.checkpoint.tokenizer import JsonTokenizer, Tokenizer
from paceline.config import ServerConfig
from paceline.errors import InvalidRequestError
from paceline.router.admission import TargetInfo
from paceline.security.keys import KeyRing
from paceline.web import prompts
from paceline.web.prompts import filling, truncated, word_ids

CODER = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


def byte_level(*added, opening=None):
    """A byte-level tokenizer with added tokens, and one that it puts before each prompt."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    vocab["Ġa"] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(one, special=True) for one in (*added, *([opening] if opening else []))])
    if opening is not None:
        pair = (opening, backend.token_to_id(opening))
        backend.post_processor = processors.TemplateProcessing(single=f"{opening} $A", special_tokens=[pair])
    return Tokenizer("byte level", JsonTokenizer(backend, None))


class Characters(Bytes):
    def get_vocab(self):
        return {chr(i): i for i in range(10, 256)}

    def convert_ids_to_tokens(self, ids):
        return [chr(i) for i in ids]


@pytest.fixture(scope="module")
def scripted():
    service = Scripted()
    service.says = "yes<2>"
    service.info = TargetInfo(Tokenizer("characters", Characters()), 4000, (7,))
    chat = ChatTemplate(WithTemplate(), None, of_response(RESPONSE))
    named = {"aliases": ("small", "other"), "system_fingerprint": "fp_1"}
    with served(edge_over(service, chat=chat, force_include_usage=True, **named)) as at:
        yield service, at


def test_texts_are_tokenized_as_vllm_does(url, pipeline):
    tokenizer = pipeline.info.tokenizer
    ids = list(tokenizer.encode("lazy dog"))
    status, _, body = call(f"{url}/tokenize", {"model": MODEL, "prompt": "lazy dog", "return_token_strs": True})
    assert status == 200, body
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), pipeline.info.max_model_len)
    assert len(body["token_strs"]) == len(ids)
    assert call(f"{url}/tokenize", {"prompt": "lazy"})[2]["token_strs"] is None
    assert call(f"{url}/detokenize", {"tokens": ids})[2] == {"prompt": tokenizer.decode(ids, special=True)}
    assert call(f"{url}/detokenize", {"tokens": []})[2] == {"prompt": ""}
    bare = call(f"{url}/tokenize", {"prompt": "lazy dog", "add_special_tokens": False})[2]["tokens"]
    assert bare == tokenizer.encode_text("lazy dog")


@pytest.mark.parametrize("tokens", [[-1], [10**9], [2**70], ["a"], 3, [True]])
def test_ids_that_no_token_has_are_refused(url, tokens):
    status, _, body = call(f"{url}/detokenize", {"tokens": tokens})
    assert (status, body["error"]["message"][:6]) == (400, "tokens")


def test_chats_are_tokenized_as_they_are_answered(scripted):
    service, at = scripted
    given = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"thinking": True}}
    tokens = call(f"{at}/tokenize", given)[2]["tokens"]
    call(f"{at}/v1/chat/completions", given)
    assert tokens == list(service.requests[-1].prompt)
    shorter = call(f"{at}/tokenize", given | {"add_generation_prompt": False})[2]["tokens"]
    assert tokens[: len(shorter)] == shorter != tokens
    for wrong in ({}, given | {"prompt": "x"}, given | {"add_special_tokens": True}, {"messages": []}):
        assert call(f"{at}/tokenize", wrong)[0] == 400


def test_a_model_may_have_several_names(scripted):
    _, at = scripted
    for name in (MODEL, "small", "other"):
        body = call(f"{at}/v1/completions", {"model": name, "prompt": "a"})[2]
        assert (body["model"], body["system_fingerprint"]) == (name, "fp_1")
        assert call(f"{at}/v1/models/{name}")[2]["root"] == MODEL
    assert call(f"{at}/v1/completions", {"model": "", "prompt": "a"})[2]["model"] == MODEL
    assert [one["id"] for one in call(f"{at}/v1/models")[2]["data"]] == [MODEL, "small", "other"]
    status, _, body = call(f"{at}/v1/completions", {"model": "gpt", "prompt": "a"})
    assert (status, body["error"]["message"]) == (
        404,
        f"model is 'gpt': {MODEL!r} and 'small' and 'other' are served",
    )


def test_names_and_origins_are_one_or_a_list():
    assert ServerConfig(served_model_name="a").served_model_name == ("a",)
    assert ServerConfig(served_model_name=["a", "b"], cors_origins="*").cors_origins == ("*",)
    with pytest.raises(ValueError, match="at least one character"):
        ServerConfig(served_model_name=["a", ""])


def test_streams_may_end_with_their_counts_unasked(scripted, url):
    _, at = scripted
    asked = {"prompt": "a", "stream": True, "max_tokens": 2}
    assert events(f"{at}/v1/completions", asked)[-2]["usage"]["total_tokens"]
    assert "usage" not in events(f"{url}/v1/completions", asked)[-2]


@pytest.mark.parametrize("path", ["health", "ping", "version", "v1/models", "load", "openapi.json"])
def test_head_is_get_without_a_body(url, path):
    status, headers, body = call(f"{url}/{path}", method="HEAD")
    assert (status, body) == (200, b"")
    assert headers["content-type"] == call(f"{url}/{path}")[1]["content-type"]
    assert call(f"{url}/v1/completions", method="HEAD")[0] == 405


def test_the_load_counts_requests_in_progress(scripted):
    service, at = scripted
    assert call(f"{at}/load")[2] == {"server_load": 0}
    loads, run = [], service.run

    async def slow(*args):
        loads.append(await asyncio.to_thread(call, f"{at}/load"))
        async for item in run(*args):
            yield item

    service.run = slow
    try:
        call(f"{at}/v1/completions", {"prompt": "a"})
    finally:
        service.run = run
    assert loads[0][2] == {"server_load": 1}
    assert call(f"{at}/load")[2] == {"server_load": 0}


def preflight(at, origin):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    return call(f"{at}/v1/chat/completions", None, headers, "OPTIONS")


def test_pages_of_this_machine_may_call_unless_there_are_keys(url, pipeline, tmp_path):
    for origin, allowed in {
        "http://localhost:3000": True,
        "http://127.0.0.1": True,
        "https://evil.example": False,
        "http://localhost.evil.example": False,
    }.items():
        status, headers, _ = preflight(url, origin)
        assert (status == 200, "access-control-allow-origin" in headers) == (allowed, allowed), origin
        status, headers, _ = call(f"{url}/v1/models", headers={"Origin": origin})
        assert (status, headers.get("access-control-allow-origin")) == (200, origin if allowed else None)
    keys = KeyRing(write_keys(tmp_path / "keys.yaml", {"name": "alice", "sha256": digest("key")}))
    with served(edge_over(pipeline, keys=keys)) as at:
        assert "access-control-allow-origin" not in preflight(at, "http://localhost:3000")[1]
    with served(edge_over(pipeline, keys=keys, cors_origins=("https://chat.example",))) as at:
        assert preflight(at, "https://chat.example")[1]["access-control-allow-origin"] == "https://chat.example"
        assert "access-control-allow-origin" not in preflight(at, "http://localhost")[1]
        headers = call(f"{at}/v1/models", headers={"Origin": "https://chat.example"})[1]
        assert "x-paceline-ignored-fields" in headers["access-control-expose-headers"].lower()


def test_the_id_of_a_request_may_be_in_its_body(url):
    asked = {"prompt": "lazy", "max_tokens": 1, "request_id": "mine"}
    assert call(f"{url}/v1/completions", asked)[1]["x-request-id"] == "mine"
    assert call(f"{url}/v1/completions", asked, {"x-request-id": "first"})[1]["x-request-id"] == "first"
    for wrong in ("é", "a\nb", "x" * 257):
        status, _, body = call(f"{url}/v1/completions", asked | {"request_id": wrong})
        assert (status, body["error"]["message"][:10]) == (400, "request_id")


@pytest.mark.parametrize(
    ("seed", "expected"), [(-1, None), (-2, 2**64 - 2), (-(2**63), 2**63), (0, 0), (2**64 - 1, 2**64 - 1)]
)
def test_negative_seeds_count_from_the_end(scripted, seed, expected):
    service, at = scripted
    assert call(f"{at}/v1/completions", {"prompt": "a", "seed": seed})[0] == 200
    assert service.requests[-1].sampling.seed == expected


def test_no_other_log_probabilities_are_asked_for_by_zero(url):
    body = call(f"{url}/v1/completions", {"prompt": "lazy", "max_tokens": 2, "logprobs": 0})[2]
    logprobs = body["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 2
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]


def test_a_prompt_is_cut_on_the_side_that_is_asked_for(scripted):
    service, at = scripted
    for given, expected in {
        (("truncate_prompt_tokens", 3),): "fgh",
        (("truncate_prompt_tokens", 3), ("truncation_side", "right")): "abc",
        (("truncate_prompt_tokens", 99),): "abcdefgh",
        (("truncate_prompt_tokens", -1), ("max_tokens", 3996)): "efgh",
    }.items():
        status, _, body = call(f"{at}/v1/completions", {"prompt": "abcdefgh", **dict(given)})
        assert status == 200, body
        assert Bytes().decode(service.requests[-1].prompt) == expected
    call(f"{at}/v1/completions", {"prompt": [70, 71, 72], "truncate_prompt_tokens": 2})
    assert service.requests[-1].prompt == (71, 72)
    call(f"{at}/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "truncate_prompt_tokens": 4})
    assert len(service.requests[-1].prompt) == 4
    for wrong in (0, -2, 4001, "x"):
        status, _, body = call(f"{at}/v1/completions", {"prompt": "abc", "truncate_prompt_tokens": wrong})
        assert (status, body["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_what_opens_a_prompt_is_not_cut():
    tokenizer = byte_level(opening="<s>")
    text = "".join(chr(97 + i % 26) for i in range(5000))
    whole = tokenizer.encode(text)
    for num in (1, 2, 10, 5001, 6000):
        left = truncated(tokenizer, text, num, "left")
        assert len(left) == min(num, len(whole))
        assert left == (whole if num > len(text) else whole[-1:] if num == 1 else whole[:1] + whole[1 - num :])
        assert truncated(tokenizer, text, num, "right") == whole[:num]
    assert truncated(tokenizer, text, 3, "left", special=False) == whole[-3:]


def test_a_gap_is_filled_where_the_tokenizer_has_marks():
    tokenizer = byte_level(*CODER, opening="<s>")
    ids, ends = filling(tokenizer, "def f(", ") -> int", 100)
    assert tokenizer.decode(ids, special=True) == "<s><|fim_prefix|>def f(<|fim_suffix|>) -> int<|fim_middle|>"
    assert [tokenizer.decode([end], special=True) for end in ends] == ["<|fim_pad|>"]
    ids, _ = filling(tokenizer, tokenizer.encode_text("x"), "y", 100)
    assert tokenizer.decode(ids, special=True) == "<s><|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    mistral = byte_level("[SUFFIX]", "[PREFIX]")
    assert mistral.decode(filling(mistral, "a", "b", 9)[0], special=True) == "[SUFFIX]b[PREFIX]a"
    with pytest.raises(InvalidRequestError, match="suffix is 'b': this tokenizer has no tokens"):
        filling(byte_level(), "a", "b", 100)
    with pytest.raises(InvalidRequestError, match="at most"):
        filling(tokenizer, "a" * 10_000, "b", 10)


def test_the_text_after_a_gap_has_no_space_of_the_tokenizer():
    """Sentencepiece writes a space before each text: before the text after the gap it would be one too many."""
    marks = ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>")
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    for piece in ("▁", "a", "b", *marks):
        vocab[piece] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = Tokenizer("metaspace", JsonTokenizer(backend, None))
    assert tokenizer.token_strings(tokenizer.encode_text("ab")) == ["▁", "a", "b"]
    ids, ends = filling(tokenizer, "ab", "ba", 100)
    after = ids[ids.index(vocab["▁<SUF>"]) + 1 : ids.index(vocab["▁<MID>"])]
    assert "▁" not in "".join(tokenizer.token_strings(after))
    assert ends == (vocab["▁<EOT>"],)


def test_a_gap_over_http(scripted, url, monkeypatch):
    service, at = scripted
    form = ("before", "after")
    monkeypatch.setattr(prompts, "marks_of", lambda _: (form, {}, (77,)))
    assert call(f"{at}/v1/completions", {"prompt": "ab", "suffix": "cd"})[0] == 200
    request = service.requests[-1]
    assert (Bytes().decode(request.prompt), request.sampling.stop_token_ids) == ("abcd", (77,))
    assert call(f"{at}/v1/completions", {"prompt": "", "suffix": "cd"})[0] == 200
    for more in ({"echo": True}, {"truncate_prompt_tokens": 3}):
        status, _, body = call(f"{at}/v1/completions", {"prompt": "ab", "suffix": "cd"} | more)
        assert (status, body["error"]["param"]) == (400, "suffix")
    monkeypatch.undo()
    status, _, body = call(f"{url}/v1/completions", {"prompt": "ab", "suffix": "cd"})
    assert (status, body["error"]["param"]) == (400, "suffix")


def test_forbidden_words_are_forbidden_after_a_space_too():
    tokenizer = byte_level()
    bare, spaced = tokenizer.encode_text("a"), tokenizer.encode_text(" a")
    assert word_ids(tokenizer, ["a", [5, 6]]) == (tuple(bare), tuple(spaced), (5, 6))
    b = tuple(tokenizer.encode_text("b"))
    assert word_ids(tokenizer, [" b"]) == (b,)  # with a space it has one token more
    with pytest.raises(InvalidRequestError, match="bad_words holds ' '"):
        word_ids(tokenizer, [" "])


def test_a_forbidden_word_does_not_come(url):
    asked = {"prompt": "lazy", "max_tokens": 12, "ignore_eos": True}
    word = call(f"{url}/v1/completions", asked | {"logprobs": 0})[2]["choices"][0]["logprobs"]["tokens"][0]
    status, _, body = call(f"{url}/v1/completions", asked | {"bad_words": [word]})
    assert status == 200, body
    assert not body["choices"][0]["text"].startswith(word)
    for wrong in ("a", [""], [[]], [3]):
        status, _, body = call(f"{url}/v1/completions", asked | {"bad_words": wrong})
        assert (status, body["error"]["param"]) == (400, "bad_words"), body


def test_the_tokens_of_a_chat_are_at_the_top_of_its_answer(scripted):
    service, at = scripted
    asked = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True}
    body = call(f"{at}/v1/chat/completions", asked)[2]
    assert body["prompt_token_ids"] == list(service.requests[-1].prompt)
    first = events(f"{at}/v1/chat/completions", asked | {"stream": True})[0]
    assert first["prompt_token_ids"] == body["prompt_token_ids"]


def test_names_of_tools_are_refused_with_their_pattern(scripted):
    _, at = scripted
    tool = {"type": "function", "function": {"name": "no spaces"}}
    body = call(f"{at}/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [tool]})[2]
    assert body["error"]["message"].startswith("tools[0].function.name is 'no spaces'")
    assert "A-Za-z0-9_" in body["error"]["message"]


MUTANTS = {
    "the opening is cut": ("opening_tokens", lambda _: (), test_what_opens_a_prompt_is_not_cut),
    "a dummy space stays": (
        "tokens_within",
        lambda tokenizer, text: tokenizer.encode_text(text),
        test_the_text_after_a_gap_has_no_space_of_the_tokenizer,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mistakes_are_noticed(monkeypatch, mutant):
    name, wrong, check = MUTANTS[mutant]
    monkeypatch.setattr(prompts, name, wrong)
    with pytest.raises(AssertionError):
        check()
