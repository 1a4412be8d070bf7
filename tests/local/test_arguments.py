"""What LocalPipeline is given: mistakes are refused by name, before anything is started for them."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.support.fakes import Idle
from tests.support.letters import Letters

from paceline.checkpoint.files import Checkpoint
from paceline.config import LocalConfig, TargetModel
from paceline.errors import InvalidRequestError, PromptTooLongError
from paceline.local import LocalGeneration, LocalPipeline
from paceline.messages import OpenSession, Outcome, SessionFailed
from paceline.types import Cause, FinishReason, Round, SamplingFields, SamplingParams, SpeculationParams

CONTEXT = 64


class Speller(Idle):
    """A target that writes "to return", one letter per round; a session of seed 13 is at fault."""

    def __init__(self, emit: Any) -> None:
        super().__init__()
        self._emit = emit

    def receive(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if isinstance(message, OpenSession) and message.sampling.seed == 13:
                self._emit([SessionFailed(message.session_id, 0, "nothing is allowed", request_at_fault=True)])
            elif isinstance(message, OpenSession):
                letters = b"to return"[: message.sampling.max_tokens]
                for i, letter in enumerate(letters):
                    reason = FinishReason.LENGTH if i == len(letters) - 1 else None
                    at = len(message.token_ids) + i
                    round_ = Round(0, 0, Cause.DISABLED)
                    self._emit([Outcome(message.session_id, 0, at, (letter,), (0.0,), round_, reason)])


@pytest.fixture(scope="module")
def pipeline() -> Iterator[LocalPipeline]:
    with LocalPipeline(
        LocalConfig(target=TargetModel(path="scripted"), worker="thread", pin_cores=False),
        target_factory=Speller,
        tokenizer=Letters(),  # type: ignore[arg-type]
        checkpoint=Checkpoint("scripted", CONTEXT, (), 128),
    ) as started:
        yield started


def test_a_text_is_one_stop_string(pipeline: LocalPipeline) -> None:
    assert pipeline.generate("abc", stop="return").result.text == "to "
    assert pipeline.generate("abc", stop=["return"]).result.text == "to "
    assert pipeline.generate("abc", stop=["xyz", "o"]).result.text == "t"
    for none in ((), [], None):
        assert pipeline.generate("abc", stop=none).result.text == "to return"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (b"return", "stop is b'return': text or a sequence of texts"),
        (5, "stop is 5: text or a sequence of texts"),
        ("", r"stop\[0\] is '': text of at least one character"),
        (["a", ""], r"stop\[1\] is ''"),
        (["a", b"b"], r"stop\[1\] is b'b'"),
        ([3], r"stop\[0\] is 3"),
    ],
)
def test_other_stop_strings_are_refused(pipeline: LocalPipeline, stop: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        pipeline.generate("abc", stop=stop)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (b"abc", "the prompt is bytes"),
        (7, "neither text nor a sequence of token ids"),
        (["a", 7], "prompt 1 of 2: .*neither text nor a sequence of token ids"),
        (["a", ""], "prompt 1 of 2: .*holds no token"),
        (["a", "x" * 65], "prompt 1 of 2: .*65 bytes: at most 64 can fit"),
        ([1.5], "neither text nor a sequence of token ids"),
        ([500], "holds token id 500: 0 to 127 are allowed"),
        ("", "holds no token"),
        ([], "holds no token"),
    ],
)
def test_other_prompts_are_refused(pipeline: LocalPipeline, prompt: Any, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text):
        pipeline.generate(prompt)


def test_the_default_length_ends_with_the_context(pipeline: LocalPipeline) -> None:
    result = pipeline.generate("x" * (CONTEXT - 4)).result
    assert (result.text, result.finish_reason) == ("to r", FinishReason.LENGTH)


def test_a_length_that_is_asked_for_must_fit(pipeline: LocalPipeline) -> None:
    with pytest.raises(PromptTooLongError, match="60 tokens and max_tokens is 128: together at most 64 fit the model"):
        pipeline.generate("x" * 60, SamplingParams(max_tokens=128))
    with pytest.raises(PromptTooLongError, match="60 tokens and min_tokens is 9: together at most 64 fit"):
        pipeline.generate("x" * 60, SamplingParams(min_tokens=9))
    with pytest.raises(PromptTooLongError, match="64 tokens: at most 63 leave room"):
        pipeline.generate("x" * 64)
    with pytest.raises(PromptTooLongError, match="65 bytes: at most 64 can fit"):
        pipeline.generate("x" * 65)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(bad_words=tuple((i,) for i in range(128))),
        SamplingParams(allowed_token_ids=(5, 6, 5), bad_words=((5,), (6,))),
        SamplingParams(allowed_token_ids=(127,), stop_token_ids=(127,), min_tokens=1),
        SamplingParams(logit_bias={i: float("-inf") for i in range(127)}, bad_words=((127,),)),
        SamplingParams(logit_bias={i: float("-inf") for i in range(127)}, stop_token_ids=(127,), min_tokens=1),
    ],
)
def test_options_that_forbid_every_token_are_refused(pipeline: LocalPipeline, sampling: SamplingParams) -> None:
    with pytest.raises(InvalidRequestError, match="forbid every token: at least one of 128 must be allowed"):
        pipeline.generate("abc", sampling)


def test_what_only_the_engine_sees_is_the_request_s_fault_too(pipeline: LocalPipeline) -> None:
    with pytest.raises(InvalidRequestError, match="nothing is allowed"):
        _ = pipeline.generate("abc", SamplingParams(seed=13)).result


@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": True},
        {"temperature": False},
        {"max_tokens": True},
        {"seed": True},
        {"stop_token_ids": (1, True)},
        {"logit_bias": {1: True}},
    ],
)
def test_true_and_false_are_not_numbers(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))} (is|holds) (true|false): neither true nor false"):
        SamplingParams(**fields)
    assert SamplingParams(ignore_eos=True).ignore_eos
    with pytest.raises(ValueError, match="max_draft_tokens is true: neither true nor false"):
        SpeculationParams(max_draft_tokens=True)


def test_a_list_of_prompts_gives_their_results_in_its_order(pipeline: LocalPipeline) -> None:
    results = pipeline.generate(["abc", "d", "ef"] * 30, max_tokens=4)
    assert [result.text for result in results] == ["to r"] * 90
    assert [result.usage.prompt_tokens for result in results] == [3, 1, 2] * 30
    (alone,) = pipeline.generate([(97, 98)], stop="return")
    assert (alone.text, alone.usage.prompt_tokens) == ("to ", 2)


def test_nothing_of_a_list_is_begun_if_a_prompt_is_wrong_and_nothing_goes_on_after_a_failure(
    pipeline: LocalPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, begun = LocalPipeline.submit, []

    def noted(self: LocalPipeline, *args: Any, **kwargs: Any) -> LocalGeneration:
        begun.append(submit(self, *args, **kwargs))
        return begun[-1]

    monkeypatch.setattr(LocalPipeline, "submit", noted)
    with pytest.raises(InvalidRequestError, match="prompt 1 of 2"):
        pipeline.generate(["abc", ""])
    assert not begun
    with pytest.raises(InvalidRequestError, match="nothing is allowed"):
        pipeline.generate(["abc", "d"], seed=13)
    assert len(begun) == 2
    assert all(generation.done for generation in begun)


def test_sampling_may_be_given_by_its_fields_but_not_in_both_forms(pipeline: LocalPipeline) -> None:
    assert pipeline.generate("abc", max_tokens=2).result.text == "to"
    with pytest.raises(InvalidRequestError, match="sampling is given, and so is top_k: give one or the other"):
        pipeline.generate("abc", SamplingParams(), top_k=3)
    with pytest.raises(InvalidRequestError, match="top_p is 2"):
        pipeline.generate("abc", top_p=2)
    with pytest.raises(InvalidRequestError, match="max_token"):
        pipeline.generate("abc", max_token=2)  # type: ignore[call-arg]


def test_the_keywords_are_the_fields_of_sampling() -> None:
    assert list(SamplingFields.__annotations__) == list(SamplingParams.model_fields)
