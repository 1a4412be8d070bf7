"""Tokenizers compared by content, and incremental text that never breaks a character."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.checkpoint import tokenizer as tokenizer_module
from paceline.checkpoint.tokenizer import (
    Tokenizer,
    encode_prompt,
    load_tokenizer,
    read_json_tokenizer,
    require_same_tokens,
)
from paceline.embedded import TARGET_DIR
from paceline.errors import ConfigError, InvalidRequestError, PromptTooLongError, TokenizerMismatchError

CORPUS = ["def read(path): return open(path).read()", "naïve café 中文 🙂🙂 end", "中 文 🙂 é"]


def byte_level(vocab_size=300, corpus=CORPUS, special="<|endoftext|>", name="bytes"):
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    return Tokenizer(name, PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special))


BYTES = byte_level()


def test_equal_content_is_accepted_and_differing_content_refused_with_both_names():
    require_same_tokens(BYTES, byte_level(name="again"))
    for other in (
        byte_level(name="other", corpus=["something else entirely, with other merges " * 3]),
        byte_level(name="other", special="<eos>"),
        byte_level(name="other", vocab_size=290),
    ):
        with pytest.raises(TokenizerMismatchError) as caught:
            require_same_tokens(BYTES, other)
        for part in ("'bytes'", "'other'", BYTES.fingerprint, other.fingerprint):
            assert part in str(caught.value)


def test_fingerprint_does_not_depend_on_roles():
    backend = BYTES._tokenizer.backend_tokenizer
    other = Tokenizer("roles", PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|endoftext|>"))
    assert other.fingerprint == BYTES.fingerprint


def test_a_folder_without_tokenizer_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="no tokenizer could be loaded from") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


DIRECT = load_tokenizer(str(TARGET_DIR))
TRANSFORMERS = Tokenizer("transformers", AutoTokenizer.from_pretrained(TARGET_DIR))


@given(text=st.text() | st.text(alphabet="def <|endoftext|>\n中é"))
def test_the_json_tokenizer_equals_that_of_transformers(text):
    assert read_json_tokenizer(str(TARGET_DIR)) is not None
    assert DIRECT.encode(text) == TRANSFORMERS.encode(text)
    assert DIRECT.decode(DIRECT.encode(text)) == TRANSFORMERS.decode(TRANSFORMERS.encode(text))


def test_the_json_tokenizer_has_the_facts_of_transformers():
    require_same_tokens(DIRECT, TRANSFORMERS)
    assert DIRECT.vocab_size == TRANSFORMERS.vocab_size
    assert DIRECT.eos_token_ids == TRANSFORMERS.eos_token_ids


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"}),
        ("tokenizer_config.json", {"add_bos_token": False}),
        ("tokenizer_config.json", {"extra_special_tokens": ["<|x|>"]}),
        ("tokenizer_config.json", {"pad_token": "<|pad|>"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<|x|>"}}}),
        ("tokenizer.json", {"post_processor": None}),
        ("tokenizer.json", {"truncation": {"max_length": 5}}),
        ("config.json", {"model_type": "qwen2"}),
    ],
)
def test_a_tokenizer_that_needs_more_than_its_json_is_left_to_transformers(tmp_path, file, change):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, tmp_path)
    assert read_json_tokenizer(str(tmp_path)) is not None
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | change))
    assert read_json_tokenizer(str(tmp_path)) is None


# -- prompts that cannot fit -------------------------------------------------------------------------------------------


class Watched(Tokenizer):
    """Notes how many characters were tokenized."""

    num_chars = 0

    def encode(self, text):
        self.num_chars += len(text)
        return super().encode(text)


def watched():
    return Watched("watched", DIRECT._tokenizer)


@given(text=st.text() | st.text(alphabet="def <|endoftext|>\n    中é\u0301"))
def test_no_token_stands_for_more_bytes_than_the_longest_one(text):
    for tokenizer in (DIRECT, BYTES):
        assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.max_token_bytes


def test_a_text_of_more_bytes_than_can_fit_is_refused_before_it_is_tokenized():
    tokenizer, limit = watched(), 100 * DIRECT.max_token_bytes
    with pytest.raises(PromptTooLongError, match=rf"{limit + 1} bytes: at most {limit} can fit .* of 100 tokens"):
        encode_prompt(tokenizer, "x" * (limit + 1), 100)
    assert tokenizer.num_chars == 0


def test_a_dense_text_is_refused_when_a_part_of_it_is_too_long():
    """Bytes that are tokens of their own: the whole would be 46 times the context."""
    tokenizer = watched()
    text = "\x01\x02" * (10_000 * DIRECT.max_token_bytes // 2)
    with pytest.raises(PromptTooLongError, match=r"at least .* tokens: at most 9999 leave room"):
        encode_prompt(tokenizer, text, 10_000)
    assert tokenizer.num_chars <= 65536 < len(text)


def test_a_long_text_of_long_tokens_fits(monkeypatch):
    """Sparse parts are counted in pieces, and the whole is tokenized as it always was."""
    monkeypatch.setattr(tokenizer_module, "MAX_PIECE_CHARS", 512)
    tokenizer = watched()
    text = " " * 4000
    length = len(DIRECT.encode(text)) + 1
    assert len(text) > 8 * length + 512
    assert encode_prompt(tokenizer, text, length) == DIRECT.encode(text)
    assert tokenizer.num_chars == 2 * len(text)


@pytest.mark.parametrize("length", [100, 2048, 2049, 70_000])
def test_long_and_short_texts_are_tokenized_alike(length):
    text = ("def f(x):\n    return x + 1  # 中é\n" * 4000)[:length]
    assert DIRECT.encode(text) == tuple(DIRECT._tokenizer.backend_tokenizer.encode(text).ids)


def test_a_prompt_of_ids_is_checked_without_a_loop():
    with pytest.raises(PromptTooLongError, match="has 5000000 tokens: at most 99 leave room for a token"):
        encode_prompt(DIRECT, range(5_000_000), 100)
    for wrong in (-1, DIRECT.vocab_size):
        with pytest.raises(InvalidRequestError, match=f"holds token id {wrong}: 0 to {DIRECT.vocab_size - 1}"):
            encode_prompt(DIRECT, (1, wrong, 2), 100)
    assert encode_prompt(DIRECT, (1, 2), 3) == (1, 2)
    with pytest.raises(PromptTooLongError, match="2 tokens: at most 1 leave"):
        encode_prompt(DIRECT, (1, 2), 2)


HOSTILE = {
    "a template that names no token": (
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "zz", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
        "fails on it",
    ),
    "lists within each other": ("[" * 100_000, "recursion"),
    "an id that is no number": ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "invalid value"),
    "a pattern that is none": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        "unmatched parenthesis",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_its_fault(name, tmp_path):
    change, fault = HOSTILE[name]
    with pytest.raises(ConfigError, match=f"no tokenizer could be loaded from .*{fault}"):
        load_tokenizer(str(changed(tmp_path, change)))


def test_a_pattern_that_gives_up_on_a_text_ends_that_text_alone(tmp_path):
    """Oniguruma stops after a number of steps, and the library panics, which is no exception to Python."""
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    byte_level = json.loads((TARGET_DIR / "tokenizer.json").read_text())["pre_tokenizer"]
    change = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [pattern, byte_level]}}
    tokenizer = load_tokenizer(str(changed(tmp_path, change)))
    for encode in (tokenizer.encode, tokenizer.encode_text):
        with pytest.raises(InvalidRequestError, match=r"the tokenizer .* fails on it .*retry-limit"):
            encode("a" * 40 + "!")
        assert encode("ab ab")


def changed(folder, change):
    """A folder with the embedded target's tokenizer, in which ``change`` stands: another file, or some of its keys."""
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(TARGET_DIR / name, folder)
    data = json.loads((TARGET_DIR / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(change if isinstance(change, str) else json.dumps(data | change))
    return folder
