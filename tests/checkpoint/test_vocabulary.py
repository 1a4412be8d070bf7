"""The tokens that two tokenizers share, and texts of one in the tokens of the other."""

from pathlib import Path

import pytest
from tests.support.models import letters_tokenizer
from tests.support.vocabularies import other_vocabulary
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from paceline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from paceline.checkpoint.vocabulary import SharedVocabulary, require_tokens
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.errors import TokenizerMismatchError

TEXTS = ("def f(x):\n    return [y for y in x if y]\n", "naïve — 東京 🙂 \tend", " begins with a space", "")


@pytest.fixture(scope="module")
def target() -> Tokenizer:
    return load_tokenizer(str(TARGET_DIR))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(str(other_vocabulary(tmp_path_factory.mktemp("other"))))


def sentencepiece_like(*, eos: str = "</s>") -> Tokenizer:
    """Spaces are ▁, one is put before every text, and unknown bytes are <0x..>, as Llama's tokenizer has them."""
    words = [eos, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("▁", "d"), ("▁d", "e"), ("▁de", "f"), ("r", "e"), ("i", "n"), ("▁", "in"), ("▁", "▁")]
    vocab = {word: i for i, word in enumerate(dict.fromkeys([*words, *("".join(merge) for merge in merges)]))}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    strip = decoders.Strip(content=" ", left=1)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens([AddedToken(eos, special=True)])
    return Tokenizer("sentencepiece", PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos))


def test_shared_tokens_stand_for_the_same_text(target: Tokenizer, other: Tokenizer) -> None:
    shared = SharedVocabulary(target, other)
    assert len(shared.draft_ids) == other.vocab_size == 3000
    assert len(set(shared.draft_ids.values())) == 3000
    assert all(target.decode([a], special=True) == other.decode([b], special=True) for a, b in shared.draft_ids.items())
    assert sum(a != b for a, b in shared.draft_ids.items()) > 2900


@pytest.mark.parametrize("text", TEXTS)
def test_a_context_is_cut_as_the_drafts_tokenizer_cuts_its_text(target: Tokenizer, other: Tokenizer, text: str) -> None:
    for draft in (other, sentencepiece_like()):
        shared = SharedVocabulary(target, draft)
        assert shared.encode(target.encode(text)) == list(
            draft.encode(text.removeprefix(" ") if draft is not other else text)
        )
        back = SharedVocabulary(draft, target)
        assert draft.decode(shared.encode(target.encode(text))) == text.removeprefix(" " if draft is not other else "")
        assert target.decode(back.encode(draft.encode(text))).removeprefix(" ") == text.removeprefix(" ")


def test_further_tokens_have_the_text_of_the_target_token_by_token(target: Tokenizer, other: Tokenizer) -> None:
    """Characters that the target cuts in the middle of included: the draft sees the same bytes."""
    for draft in (other, sentencepiece_like()):
        shared = SharedVocabulary(target, draft)
        for text in TEXTS[:2]:
            ids = shared.encode(target.encode("x")) + [
                draft_id for token_id in target.encode(text) for draft_id in shared.encode([token_id], start=False)
            ]
            assert draft.decode(ids) == "x" + text


def test_special_tokens_are_shared_by_name_and_ends_by_role(target: Tokenizer) -> None:
    draft = sentencepiece_like()
    shared = SharedVocabulary(target, draft)
    assert shared.draft_ids[target.eos_token_ids[0]] == draft.eos_token_ids[0]
    prompt = (*target.eos_token_ids, *target.encode("in"))
    assert shared.encode(prompt)[0] == draft.eos_token_ids[0]
    named = SharedVocabulary(target, sentencepiece_like(eos="<|endoftext|>"))
    assert named.draft_ids[target.eos_token_ids[0]] == 0


def test_the_same_tokens_need_no_translation(target: Tokenizer) -> None:
    draft = load_tokenizer(str(DRAFT_DIR))
    assert require_tokens(target, draft, "same") is None
    assert require_tokens(target, draft, "shared") is None


def test_what_is_shared_is_measured(target: Tokenizer, other: Tokenizer) -> None:
    shared = require_tokens(target, other, "shared")
    assert shared is not None
    assert 0.9 <= shared.overlap.mass < 1
    assert str(shared.overlap).startswith("3000 tokens of the target's 4096 and the draft's 3000, which are 9")


def test_what_does_not_fit_is_refused_with_the_reason(target: Tokenizer, other: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(TokenizerMismatchError, match="or set vocabulary to shared to propose the tokens that both"):
        require_tokens(target, other, "same")
    few = load_tokenizer(str(other_vocabulary(tmp_path, num_tokens=300)))
    with pytest.raises(TokenizerMismatchError, match=r"share too little: 300 tokens of .* which are [1-8]\d\.\d % of"):
        require_tokens(target, few, "shared")
    letters = Tokenizer("letters", letters_tokenizer())
    with pytest.raises(TokenizerMismatchError, match="and 75 tokens are needed"):
        require_tokens(target, letters, "shared")
