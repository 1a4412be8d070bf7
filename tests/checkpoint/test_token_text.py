"""The bytes of tokens, and incremental text that never breaks a character and loses no space."""

import contextlib
import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from paceline.checkpoint.token_text import ByteDetokenizer, TokenBytes, WindowDetokenizer
from paceline.checkpoint.tokenizer import Tokenizer

FFFD = "\N{REPLACEMENT CHARACTER}"
TEXT = "a b  中文 🙂 é\u2581\n"
SPECIAL = ("<s>", "</s>")


def made(vocab, decoder, **model):
    backend = Backend(models.BPE(vocab=vocab, merges=[], **model))
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return Tokenizer("made", PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def byte_level():
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return made(alphabet, decoders.ByteLevel())


def pieces(*further, metaspace=False):
    """As SentencePiece models have it: words with a leading mark, and bytes for the rest."""
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    for piece in ["▁", "▁hi", "a", "b", "中", "▁b", FFFD, "▁▁"]:
        vocab[piece] = len(vocab)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *further]
    if metaspace:
        parts = [decoders.ByteFallback(), decoders.Metaspace()]
    return made(vocab, decoders.Sequence(parts), unk_token="<unk>", byte_fallback=True)


BYTES = byte_level()
STRIPPED = pieces(decoders.Strip(" ", 1, 0))
BARE = pieces()
META = pieces(metaspace=True)
TOKENIZERS = {"byte_level": BYTES, "stripped": STRIPPED, "bare": BARE, "metaspace": META}


def encoded(tokenizer, text):
    """A token for each character that has one, and a token for each byte of the others."""
    if tokenizer is BYTES:
        cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        return [BYTES.vocab[c] for part, _ in cut for c in part]
    ids = []
    for character in text.replace(" ", "▁"):
        found = tokenizer.vocab.get(character)
        ids += [found] if found is not None else [tokenizer.vocab[f"<0x{b:02X}>"] for b in character.encode()]
    return ids


def stream(tokenizer, token_ids, prompt=(), kind="bytes", special=False):
    if kind == "bytes":
        detokenizer = tokenizer.detokenizer(prompt, special=special)
        assert isinstance(detokenizer, ByteDetokenizer)
    else:
        detokenizer = WindowDetokenizer(functools.partial(tokenizer.decode, special=special), prompt)
    return [detokenizer.add(token_id) for token_id in token_ids] + [detokenizer.flush()]


@pytest.mark.parametrize("kind", ["bytes", "windows"])
@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(text=st.text(alphabet=TEXT, max_size=20), prompt=st.text(alphabet="def 中🙂é", min_size=1, max_size=8))
def test_streamed_text_is_the_text(name, kind, text, prompt):
    tokenizer = TOKENIZERS[name]
    text = text if name == "byte_level" else text.replace("\u2581", " ")
    prompt = prompt if kind == "bytes" else "a b"  # windows may begin inside a character of the prompt
    parts = stream(tokenizer, encoded(tokenizer, text), encoded(tokenizer, prompt), kind)
    assert "".join(parts) == text
    assert all(FFFD not in part for part in parts)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(data=st.data())
def test_text_among_special_tokens_is_that_of_the_whole_sequence(name, data):
    """Shown or hidden, with or without a prompt: what ``decode`` makes of all tokens, where they are valid."""
    tokenizer = TOKENIZERS[name]
    ends = [tokenizer.vocab[special] for special in SPECIAL]
    piece = st.text(alphabet="a b中🙂", min_size=1, max_size=4).map(lambda text: encoded(tokenizer, text))
    runs = data.draw(st.lists(piece | st.sampled_from([[end] for end in ends]), max_size=12))
    cut = data.draw(st.integers(0, len(runs)))
    prompt, answer = ([i for run in part for i in run] for part in (runs[:cut], runs[cut:]))
    for special in (False, True):
        whole = tokenizer.decode([*prompt, *answer], special=special)
        before = tokenizer.decode(prompt, special=special)
        assert "".join(stream(tokenizer, answer, prompt, special=special)) == whole[len(before) :]


@pytest.mark.parametrize("kind", ["bytes", "windows"])
def test_a_space_behind_a_hidden_token_stays(kind):
    vocab = STRIPPED.vocab
    answer = [vocab["▁hi"], vocab["</s>"], vocab["▁b"], vocab["</s>"], vocab["</s>"], vocab["▁hi"]]
    assert "".join(stream(STRIPPED, answer, [vocab["a"]], kind)) == " hi b hi"
    assert "".join(stream(STRIPPED, answer, [vocab["<s>"]], kind)) == "hi b hi", "the first one begins the text"


@given(token_ids=st.lists(st.integers(0, 257), max_size=40))
def test_any_tokens_stream_as_their_bytes(token_ids):
    whole = b"".join(b"" if i in BYTES.token_bytes.special_ids else BYTES.token_bytes(i) for i in token_ids)
    text = "".join(stream(BYTES, token_ids))
    assert whole.decode("utf-8", "replace").startswith(text)
    assert len(whole) - len(whole.decode("utf-8", "ignore").encode()) or text == whole.decode()


@pytest.mark.parametrize("kind", ["bytes", "windows"])
def test_an_incomplete_character_is_withheld_and_then_dropped(kind):
    first, *rest = encoded(BYTES, "🙃")
    assert rest
    assert stream(BYTES, [first], kind=kind) == ["", ""]
    assert "".join(stream(BYTES, [first, *rest], kind=kind)) == "🙃"
    assert stream(BYTES, [first, *rest], kind=kind)[0] == ""


@pytest.mark.parametrize("kind", ["bytes", "windows"])
def test_bytes_that_never_complete_do_not_withhold_for_ever(kind):
    broken = encoded(BYTES, "🙃")[0]
    parts = stream(BYTES, [broken] * 40 + encoded(BYTES, "ok"), kind=kind)
    assert any(parts[:40])
    assert "".join(parts).endswith("ok")


def test_a_character_that_the_prompt_began_belongs_to_the_answer():
    first, *rest = encoded(BYTES, "🙃")
    assert "".join(stream(BYTES, rest, [first])) == "🙃"


def test_a_token_whose_text_is_the_replacement_character_is_not_withheld():
    token = STRIPPED.vocab[FFFD]
    assert stream(STRIPPED, [token, token], [STRIPPED.vocab["a"]]) == [FFFD, FFFD, ""]
    assert STRIPPED.token_bytes(token) == FFFD.encode()


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(text=st.text(alphabet=TEXT, max_size=20), data=st.data())
def test_a_whole_token_begins_at_its_place(name, text, data):
    """Of any tokens, broken characters among them."""
    tokenizer = TOKENIZERS[name]
    ids = encoded(tokenizer, text) + data.draw(st.lists(st.sampled_from(sorted(tokenizer.vocab.values())), max_size=8))
    detokenizer = tokenizer.detokenizer([tokenizer.vocab["a"]] if "a" in tokenizer.vocab else [0])
    token_bytes, places, parts = tokenizer.token_bytes, [], []
    for token_id in ids:
        places.append(detokenizer.place(token_id))
        parts.append(detokenizer.add(token_id))
    whole = "".join(parts)
    for token_id, place in zip(ids, places, strict=True):
        own = b"" if token_id in token_bytes.special_ids else token_bytes(token_id)
        with contextlib.suppress(UnicodeDecodeError):  # a part of a character
            assert whole[place:].startswith(own.decode())
    assert sorted(places) == places


def test_a_decoder_that_looks_at_neighbours_is_read_in_windows():
    assert not TokenBytes({"type": "WordPiece", "prefix": "##", "cleanup": True}, str).exact
    assert not TokenBytes({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}, str).exact
    assert not TokenBytes({}, str).exact
    assert all(tokenizer.token_bytes.exact for tokenizer in TOKENIZERS.values())


def test_a_token_that_only_looks_like_a_byte_is_text():
    known = TokenBytes({"type": "ByteFallback"}, str)
    assert known.of("<0xE2>") == b"\xe2"
    assert [known.of(token) for token in ("<0xZZ>", "<0x1>", "<0x+1>")] == [b"<0xZZ>", b"<0x1>", b"<0x+1>"]
