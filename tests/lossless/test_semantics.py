"""Parameters that end a text or describe it, through both engines: the same in every mode, and what users of other
servers expect."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.lossless.test_reference import model_of
from tests.router.sessions import PROMPT, decode, feed, make
from tests.support.models import EOS, VOCAB, pair, prompt, random_model
from tests.support.pump import Pump, Request, in_mode

from paceline.core import verification
from paceline.messages import OpenSession
from paceline.router.session import Session
from paceline.target.session import TargetSession
from paceline.types import FinishReason, LogprobsMode, Mode, Result, SamplingParams, SpeculationParams


def _run(requests: dict[str, Request], mode: Mode, seed: int = 1) -> dict[str, Result]:
    return Pump(*pair("llama"), seed=seed).run(in_mode(requests, mode))


# -- min_tokens and stop strings -------------------------------------------------------------------------------


def _first_stop(text: str, stops: Sequence[str], min_tokens: int) -> tuple[str, int]:
    """The obvious twin, a token being a character: the text, and how many tokens it takes.

    The first stop string that a token behind the first ``min_tokens`` completes ends the text where it begins.
    """
    for end in range(min_tokens + 1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], end
    return text, len(text)


CASES = {
    "text": st.text(alphabet="abc", min_size=1, max_size=30),
    "stops": st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    "sizes": st.lists(st.integers(1, 6), max_size=20),
    "min_tokens": st.integers(0, 12),
    "cut": st.integers(0, 30),
}


@given(**CASES)
@example("abcab", ["bca", "ab"], [1, 2, 2], 2, 0)  # "ab" comes within min_tokens and again behind it
@example("xabd", ["xabc", "ab"], [2, 2], 3, 0)  # withheld for the first, the second must not match in it
@example("abab", ["ba"], [2, 2], 2, 2)  # begins within min_tokens, ends behind it, across a chunk
def test_min_tokens_holds_back_stop_strings_wherever_chunks_end(text, stops, sizes, min_tokens, cut):
    """Also of a stream that broke after ``cut`` tokens and is continued."""
    session = make(stop=tuple(stops), min_tokens=min_tokens)
    session.open()
    chunks = feed(session, text, sizes)
    result = session.result
    expected, num_tokens = _first_stop(text, stops, min_tokens)
    assert (result.text, decode(result.token_ids)) == (expected, text[:num_tokens])
    assert "".join(chunk.text for chunk in chunks) == expected
    assert (result.finish_reason is FinishReason.STOP) == (result.matched_stop in stops) == (expected != text)
    cut = min(cut, num_tokens - 1)
    again = Session(
        "s", PROMPT, SamplingParams(min_tokens=min_tokens, seed=1), SpeculationParams(), decode=decode, stop=stops,
        generated_token_ids=tuple(text[:cut].encode()),
    )  # fmt: skip
    again.open()
    feed(again, text[cut:], sizes)
    assert decode(again.result.token_ids) == text[cut:num_tokens]
    assert expected.endswith(again.result.text)
    assert again.result.matched_stop == result.matched_stop


def _stopped(min_tokens: int) -> dict[str, Request]:
    """Sampled sessions; half of all tokens are stop strings, and the end of sequence is likely."""
    singles = tuple(chr(0x4E00 + i) for i in range(0, VOCAB, 2) if i != EOS)
    pairs = tuple(chr(0x4E00 + i) + chr(0x4E00 + j) for i in range(1, VOCAB, 8) for j in range(1, VOCAB, 8))
    return {
        f"s{i}": Request(
            prompt(i, 6 + 5 * i),
            SamplingParams(temperature=1.0, seed=i, max_tokens=24, min_tokens=min_tokens, logit_bias={EOS: 3.0}),
            SpeculationParams(max_draft_tokens=(4, 8)[i % 2]),
            eos_token_ids=(EOS,),
            stop=singles if i % 2 else pairs,
        )
        for i in range(8)
    }


def test_stop_strings_and_min_tokens_are_the_same_in_every_mode() -> None:
    """Nothing ends within the first 12 tokens, and every mode ends where plain decoding does."""
    requests = _stopped(12)
    plain = _run(requests, Mode.PLAIN)
    assert all(len(r.token_ids) > 12 for r in plain.values())
    assert {r.finish_reason for r in plain.values()} >= {FinishReason.STOP}
    assert any(isinstance(r.matched_stop, str) for r in plain.values())
    for mode in (Mode.SEQUENTIAL, Mode.OVERLAPPED):
        for name, result in _run(requests, mode).items():
            other = plain[name]
            assert (result.text, result.token_ids) == (other.text, other.token_ids), (mode, name)
            assert (result.finish_reason, result.matched_stop) == (other.finish_reason, other.matched_stop)
    assert min(len(r.token_ids) for r in _run(_stopped(0), Mode.PLAIN).values()) < 12


def test_stop_strings_that_min_tokens_does_not_hold_back_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: only the ids of end-of-sequence tokens are held back."""
    init = Session.__init__

    def forgetful(self, *args, **options):
        init(self, *args, **options)
        self._num_decided = 1000

    monkeypatch.setattr(Session, "__init__", forgetful)
    assert min(len(r.token_ids) for r in _run(_stopped(12), Mode.PLAIN).values()) < 12


# -- log probabilities, before and after the processors ----------------------------------------------------------

PROCESSED = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3, "logit_bias": {15: 1.5}}
SAMPLED = {"scaled": {"temperature": 0.6}, "plain": {"temperature": 1.0}, "processed": PROCESSED, "greedy": {}}


def _logprob_requests(mode: LogprobsMode) -> dict[str, Request]:
    return {
        name: Request(prompt(i, 9), SamplingParams(max_tokens=12, seed=i, logprobs_mode=mode, **sampling))
        for i, (name, sampling) in enumerate(SAMPLED.items())
    }


def _largest_error(mode: Mode) -> float:
    """Largest distance of raw log probabilities to those of transformers' forward over the whole text."""
    requests = _logprob_requests(LogprobsMode.RAW)
    worst = 0.0
    for name, result in _run(requests, mode).items():
        text = [*requests[name].prompt, *result.token_ids]
        logits = model_of(random_model("llama"))(text)[len(requests[name].prompt) - 1 : -1]
        expected = logits.log_softmax(-1)[range(len(result.token_ids)), result.token_ids]
        worst = max(worst, float((torch.tensor(result.logprobs) - expected).abs().max()))
    return worst


@pytest.mark.parametrize("mode", Mode)
def test_raw_log_probabilities_are_the_models_own(mode: Mode) -> None:
    assert _largest_error(mode) < 1e-4
    raw, processed = (_run(_logprob_requests(kind), mode) for kind in LogprobsMode)
    for name, result in raw.items():
        assert result.token_ids == processed[name].token_ids, "the mode changes no token"
        is_same = name in ("plain", "greedy")  # nothing but temperature 1 acts
        assert (result.logprobs == processed[name].logprobs) == is_same, name


def test_raw_log_probabilities_of_processed_rows_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the option is ignored."""
    monkeypatch.setattr(verification, "with_logprobs", lambda verdicts, *rest: verdicts)
    assert _largest_error(Mode.OVERLAPPED) > 0.1


@pytest.mark.parametrize(
    ("sampling", "is_drawn_from_parts"),
    [
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "logprobs_mode": "raw_logprobs"}, False),
        ({"temperature": 1.0, "logprobs_mode": "raw_logprobs"}, True),
        ({"logprobs_mode": "raw_logprobs"}, True),
        ({"temperature": 1.0, "top_k": 5}, False),
    ],
)
def test_tokens_are_drawn_from_parts_of_the_vocabulary_only_where_that_says_everything(sampling, is_drawn_from_parts):
    """Ranks of a replica draw from their own parts; truncation and raw log probabilities need whole rows."""
    params = SamplingParams(seed=1, **sampling)
    message = OpenSession("s", 0, (1, 2), 2, 1, params, SpeculationParams())
    session = TargetSession(message, vocab_size=VOCAB, max_len=64, device="cpu", now=0.0)
    assert session.picks == is_drawn_from_parts


# -- bad words ------------------------------------------------------------------------------------------------------


def test_bad_words_match_across_the_end_of_the_prompt() -> None:
    """As in transformers: what the prompt begins the output must not end."""
    model = model_of(random_model("llama"))
    text = prompt(3, 8)
    first = int(model(text)[-1].argmax())
    forbidden = SamplingParams(max_tokens=4, bad_words=((text[-1], first),))
    for mode in Mode:
        results = _run({"free": Request(text, SamplingParams(max_tokens=4)), "not": Request(text, forbidden)}, mode)
        assert results["free"].token_ids[0] == first
        assert results["not"].token_ids[0] == int(model(text)[-1].topk(2).indices[1])
