"""A draft of another vocabulary: its candidates are those of its model on the same text, as far as both have them."""

import math

import pytest
import torch
from tests.support.mutants import mutant
from tests.support.vocabularies import other_vocabulary

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.vocabulary import SharedVocabulary
from paceline.config import DraftModel, LocalConfig, ServiceConfig, TargetModel
from paceline.core.processors import SamplerState
from paceline.drafters.model import ModelDrafter
from paceline.drafters.protocol import Leaf
from paceline.drafters.translation import Translation
from paceline.embedded import TARGET_DIR
from paceline.errors import ResourceExhaustedError, TokenizerMismatchError
from paceline.local import LocalPipeline
from paceline.model.loading import load_pretrained, prepare
from paceline.preflight.service import check_service
from paceline.types import SamplingParams

PROMPT = "import os\n\nclass Foo:\n    def __init__(self, "
VOCAB = 4096


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(other_vocabulary(tmp_path_factory.mktemp("other")))


@pytest.fixture(scope="module")
def checked(folder: str):
    """Text in the target's tokens in, the log probabilities of the target's tokens by transformers out."""
    model = load_pretrained(Checkpoint.open(folder), torch.float32)
    target, draft = Checkpoint.open(str(TARGET_DIR)).tokenizer, Checkpoint.open(folder).tokenizer
    by_text = {draft.decode([i], special=True): i for i in range(3000)}

    def log_q(own: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([own]), use_cache=False).logits[0, -1]
        expected = torch.full((VOCAB,), -math.inf)
        for token_id in range(VOCAB):
            text = target.decode([token_id], special=True)
            if "\N{REPLACEMENT CHARACTER}" not in text and text in by_text:
                expected[token_id] = logits[by_text[text]]
        return expected.log_softmax(-1)

    return log_q


def drafter_of(folder: str, *, max_len: int = 1024) -> tuple[ModelDrafter, SharedVocabulary]:
    loaded = prepare(load_pretrained(Checkpoint.open(folder), torch.float32), compile=False)
    shared = SharedVocabulary(Checkpoint.open(str(TARGET_DIR)).tokenizer, Checkpoint.open(folder).tokenizer)
    translation = Translation(shared, VOCAB, loaded.vocab_size)
    sizes = {"max_leaves": 8, "max_prefill_tokens": 64, "top_m": 16, "max_len": max_len}
    return ModelDrafter(loaded.runner(16), translation=translation, **sizes), shared


def walk(folder: str, log_q) -> None:
    """A session that hits, misses by a shared token, and misses by one that the draft lacks."""
    drafter, shared = drafter_of(folder)
    target, draft = Checkpoint.open(str(TARGET_DIR)).tokenizer, Checkpoint.open(folder).tokenizer
    prompt = target.encode(PROMPT)
    lacking = [i for i in range(VOCAB) if i not in shared.draft_ids][:3]
    own = list(draft.encode(PROMPT))
    sampler = SamplerState(SamplingParams(temperature=1.0), 1, prompt, vocab_size=VOCAB)
    drafter.open("s", prompt, sampler)
    while drafter.prefill():
        pass

    def compare(leaf: Leaf, text: list[int]) -> int:
        candidates = drafter.expand([leaf])
        drafter.check_integrity()
        expected = log_q(text)
        ids, values = candidates.token_ids[0], candidates.log_q[0]
        kept = expected[ids] - expected[ids].logsumexp(0)  # the largest, renormalized
        assert torch.allclose(values, kept, atol=1e-4)
        assert values[0] == values.max()
        assert set(expected.topk(4).indices.tolist()) <= set(ids.tolist())
        return int(ids[0])

    first = compare(Leaf("s", 0, (), ()), own)
    second = compare(Leaf("s", 1, (1,), (first,)), [*own, shared.draft_ids[first]])
    sampler.append([first, second])
    drafter.advance("s", [first, second], [1, 2], [])  # a hit
    own += [shared.draft_ids[first], shared.draft_ids[second]]
    compare(Leaf("s", 2, (), ()), own)
    missed = next(i for i in shared.draft_ids if i > 300)
    sampler.append([missed])
    drafter.advance("s", [missed], [3], [])
    own.append(shared.draft_ids[missed])
    compare(Leaf("s", 3, (), ()), own)
    sampler.append(lacking)
    drafter.advance("s", lacking, [4, 5, 6], [])  # their text is cut by the draft's tokenizer
    own += draft.encode(target.decode(lacking))
    third = compare(Leaf("s", 6, (), ()), own)
    compare(Leaf("s", 7, (7,), (third,)), [*own, shared.draft_ids[third]])
    nothing = drafter.expand([Leaf("s", 8, (7, 8), (third, lacking[0]))])  # of another drafter of a cascade
    assert not nothing.log_q.isfinite().any()
    drafter.check_integrity()


def test_candidates_are_those_of_the_draft_on_the_same_text(folder: str, checked) -> None:
    walk(folder, checked)


def _shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token has the logit of its neighbor."""
    logits = Translation.logits
    monkeypatch.setattr(Translation, "logits", lambda self, x: logits(self, x).roll(1, -1))


@mutant(Translation, "committed")
def _stale(committed, self, token_ids, node_ids):
    """Tokens that the draft lacks are left out of its context."""
    return [(own, node) for own, node in committed(self, token_ids, node_ids) if node >= 0]


def _untranslated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a leaf is given to the draft in the target's ids."""
    monkeypatch.setattr(Translation, "token", lambda self, token_id: token_id % 3000)


@pytest.mark.parametrize("mutant", [_shifted, _stale, _untranslated], ids=lambda m: m.__name__.strip("_"))
def test_mutants_are_caught(folder: str, checked, mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        walk(folder, checked)


def test_a_token_without_any_of_the_draft_is_passed_over(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A special token that the draft lacks: nothing to compute, nothing proposed, and then it goes on."""
    drafter, shared = drafter_of(folder)
    prompt = Checkpoint.open(str(TARGET_DIR)).tokenizer.encode(PROMPT)
    sampler = SamplerState(SamplingParams(), 1, prompt, vocab_size=VOCAB)
    drafter.open("s", prompt, sampler)
    while drafter.prefill():
        pass
    before = drafter.expand([Leaf("s", 0, (), ())])
    lacking = next(i for i in range(VOCAB) if i not in shared.draft_ids)
    monkeypatch.setattr(shared, "encode", lambda token_ids, start=True: [])
    drafter.advance("s", [lacking], [1], [])
    assert not drafter.expand([Leaf("s", 1, (), ())]).log_q.isfinite().any()
    drafter.check_integrity()
    drafter.advance("s", [int(before.token_ids[0, 0])], [2], [])
    assert drafter.expand([Leaf("s", 2, (), ())]).log_q.isfinite().any()
    drafter.check_integrity()


def test_a_context_that_the_draft_cannot_hold_is_refused(folder: str) -> None:
    """It may have more tokens than the target's; at the start, or when it has grown."""
    target = Checkpoint.open(str(TARGET_DIR)).tokenizer
    drafter, _ = drafter_of(folder, max_len=20)
    prompt = target.encode(PROMPT)
    sampler = SamplerState(SamplingParams(), 1, prompt, vocab_size=VOCAB)
    drafter.open("s", prompt, sampler)
    with pytest.raises(ResourceExhaustedError, match="holds 20"):
        drafter.advance("s", target.encode(PROMPT), range(1, 1 + len(prompt)), [])
    with pytest.raises(ResourceExhaustedError, match="holds 20"):
        drafter.open("t", prompt * 3, sampler)


def config_of(folder: str) -> LocalConfig:
    run = {"dtype": "float32", "compile": False}
    draft = DraftModel(path=folder, tree_step_tokens=8, **run)
    target = TargetModel(path=str(TARGET_DIR), batch_invariant="off", adaptive=False, **run)
    return LocalConfig(target=target, draft=draft, worker="thread", pin_cores=False)


def test_a_pipeline_refuses_it_unless_the_configuration_says_so(folder: str) -> None:
    with pytest.raises(TokenizerMismatchError, match="or set vocabulary to shared"):
        LocalPipeline(config_of(folder)).load()


def test_the_check_of_a_service_names_the_setting(folder: str) -> None:
    loading = {"model_id": "other", "model_source": folder}
    findings = check_service(ServiceConfig.parse({"draft_config": {"model_loading_config": loading}}), ports=False)
    assert any("set vocabulary to shared" in str(finding) for finding in findings)
    shared = {"draft_config": {"model_loading_config": loading, "engine_kwargs": {"vocabulary": "shared"}}}
    assert not [f for f in check_service(ServiceConfig.parse(shared), ports=False) if f.key.startswith("draft_config")]
