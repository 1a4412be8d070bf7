"""Structured output: under any form the tokens are those of plain decoding, and what is complete has that form.

Grammars are compiled by the production code; models have random weights, so that next to nothing of what they would
say by themselves is allowed.
"""

import functools
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tests.lossless.test_exact import Enumerated, distance, enumerate_choices, honest_draft
from tests.lossless.test_reference import loaded, model_of
from tests.lossless.test_reference import random_model as reference_model
from tests.lossless.test_trees import any_subtrees
from tests.support.models import EOS, VOCAB, noisy_copy, pair, prompt
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_same, in_mode, plain_reference
from tests.support.rings import nightly, slow
from tests.support.schemas import json_grammars, json_tokenizer, schema

from paceline.checkpoint.grammar import Matcher
from paceline.core.processors import Row, SamplerState
from paceline.core.reference import speculative_decode
from paceline.core.sampling import process
from paceline.core.tree import Proposal
from paceline.core.verification import verify
from paceline.types import Acceptance, FinishReason, Mode, Result, SamplingParams, SpeculationParams, StructuredOutput

FORMS = {
    "object": StructuredOutput(json_object=True),
    "regex": StructuredOutput(regex=r"[a-f]{3,9}(-[0-9]{2})+"),
    "choice": StructuredOutput(choice=("red", "red green", "green\nblue", "caf\u00e9")),
    "lark": StructuredOutput(grammar='start: "<" item ("," item)* ">"\nitem: /[a-z]{1,3}/ | start'),
    "gbnf": StructuredOutput(grammar='root ::= "[" [0-9]+ (";" [0-9]+)* "]"'),
}
PROCESSORS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"logit_bias": {EOS: 3.0}, "min_p": 0.02, "allowed_token_ids": tuple({*range(300)} - {253, 260, 267})},
    {"bad_words": ((17, 18), (110,)), "top_k": 9},
)


def form_of(i: int) -> StructuredOutput:
    """The forms that are not JSON Schemas come first."""
    others = [*FORMS.values()]
    return others[i] if i < len(others) else StructuredOutput(json_schema=schema(i))


def requests_of(count: int, temperature: float, **speculation: Any) -> dict[str, Request]:
    """One session for each form, with processors and proposals of several kinds."""
    found = {}
    for i in range(count):
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=48,
            seed=1000 + i,
            structured_output=form_of(i),
            **PROCESSORS[i % len(PROCESSORS)],
        )
        options = {"max_draft_tokens": (8, 3, 32)[i % 3]} | speculation
        found[f"form-{i}"] = Request(prompt(i, 3 + i), sampling, SpeculationParams(**options), eos_token_ids=(EOS,))
    return found


def check_forms(requests: dict[str, Request], results: dict[str, Result]) -> int:
    """Checks that complete outputs have their form; returns how many are complete."""
    num_complete = 0
    for name, result in results.items():
        form, token_ids = requests[name].sampling.structured_output, result.token_ids
        assert form is not None
        if result.finish_reason is not FinishReason.STOP:
            assert len(token_ids) == 48, name
            continue
        num_complete += 1
        assert token_ids[-1] == EOS
        text = json_tokenizer().decode(token_ids[:-1])
        if form.regex is not None:
            assert re.fullmatch(form.regex, text), text
        elif form.choice:
            assert text in form.choice
        elif form.grammar is not None:
            assert re.fullmatch(r"<.*>|\[[0-9;]+\]", text), text
            assert text.count("<") == text.count(">")
        else:
            checker = jsonschema.Draft202012Validator(
                json.loads(form.text), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            checker.validate(json.loads(text))
    return num_complete


def run(requests: dict[str, Request], **options: Any) -> Pump:
    """Both engines over the requests, to the end."""
    target, draft = pair("llama")
    pump = Pump(target, draft, grammars=json_grammars(), draft_pages=40, **options)
    pump.run(requests)
    assert not pump.failures
    return pump


@functools.cache
def _alone(i: int, temperature: float) -> Result:
    requests = {f"form-{i}": requests_of(i + 1, temperature)[f"form-{i}"]}
    return plain_reference(pair("llama")[0], requests, grammars=json_grammars())[f"form-{i}"]


def reference(count: int, temperature: float) -> dict[str, Result]:
    """Each of ``requests_of`` alone, by plain decoding."""
    return {f"form-{i}": _alone(i, temperature) for i in range(count)}


@pytest.mark.parametrize(
    ("temperature", "count"), [(1.0, 20), *slow([(0.0, 20)]), *nightly([(0.0, 200), (0.7, 200), (1.0, 200)])]
)
def test_any_form_gives_the_tokens_of_plain_decoding(temperature, count, monkeypatch) -> None:
    """Chains, then subtrees, among preemptions, late nodes and other sessions; every complete output has its form."""
    requests, expected = requests_of(count, temperature), reference(count, temperature)
    assert check_forms(requests, expected) >= count // 2
    chains = run(requests, seed=1, pages=24)
    assert_same(chains.results, expected)
    assert sum(result.speculation.accepted for result in chains.results.values()) > 3 * count
    any_subtrees(monkeypatch)
    trees = run(requests, seed=2, pages=24)
    assert_same(trees.results, expected)
    assert trees.target.stats.branches > count


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


_NUMBER = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 999}}
_THOUGHT = _tag("<4>", {"type": "any_text"}, "<5>")
_CALLS = [_tag("<6>a", _NUMBER, "<8>"), _tag("<6>b", {"type": "regex", "pattern": "[a-f]{1,4}"}, "<8>")]
TAGS = {
    "alone": {"type": "tags_with_separator", "tags": _CALLS, "separator": ", ", "at_least_one": True},
    "after a thought": {"type": "sequence", "elements": [_THOUGHT, {"type": "const_string", "value": "so"}, *_CALLS]},
    "in free text": {"type": "triggered_tags", "triggers": ["<6>"], "tags": _CALLS},
    "in characters": {
        "type": "triggered_tags",
        "triggers": ["[", "{"],
        "tags": [_tag("[", _NUMBER, "]"), _tag("{", _NUMBER, "}")],
    },
}
TAGGED = r"<6>(a[0-9]{1,3}|b[a-f]{1,4})<8>"
_UNTIL_LENGTH = {"in free text": rf"([^<]|{TAGGED})*", "in characters": r"([^\[{]|\[[0-9]{1,3}\]|\{[0-9]{1,3}\})*"}
WHOLE = {"alone": rf"{TAGGED}(, {TAGGED})*", "after a thought": rf"<4>[^<]*<5>so({TAGGED}){{2}}", **_UNTIL_LENGTH}


def tagged_requests() -> dict[str, Request]:
    """Structural tags, with a bias to what opens and closes their parts."""
    found = {}
    for i, (name, node) in enumerate(TAGS.items()):
        bias = {4: 4.0, 5: 6.0, 6: 5.0, EOS: 5.0} | dict.fromkeys(json_tokenizer().encode("[{"), 4.0)
        form = StructuredOutput(structural_tag={"format": node})
        sampling = SamplingParams(
            temperature=1, max_tokens=48, seed=50 + i, structured_output=form, logit_bias=bias, top_p=(1.0, 0.95)[i % 2]
        )
        found[name] = Request(prompt(i, 4 + i), sampling, SpeculationParams(), eos_token_ids=(EOS,))
    return found


def test_structural_tags_give_the_tokens_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = tagged_requests()
    expected = plain_reference(pair("llama")[0], requests, grammars=json_grammars())
    for name, result in expected.items():
        if result.finish_reason is FinishReason.STOP:
            text = json_tokenizer().decode(result.token_ids[:-1], special=True)
            assert re.fullmatch(WHOLE[name], text, re.DOTALL), (name, text)
    assert sum(result.finish_reason is FinishReason.STOP for result in expected.values()) >= 2
    assert_same(run(requests, seed=1, pages=24).results, expected)
    any_subtrees(monkeypatch)
    assert_same(run(requests, seed=2, pages=24).results, expected)
    _always_allows_the_end(monkeypatch)  # the mutant
    wrong = Pump(*pair("llama"), seed=8, grammars=json_grammars(), draft_pages=40)
    results = wrong.run(requests)
    assert wrong.failures or any(results[name].token_ids != one.token_ids for name, one in expected.items())


@pytest.mark.parametrize("temperature", [1.0, *slow([0.0])])
def test_sequential_and_rejection_have_the_form_too(temperature: float) -> None:
    """Rejection draws other tokens above temperature 0, of the same law, as the exact test below shows."""
    requests, expected = requests_of(8, temperature), reference(8, temperature)
    assert_same(run(in_mode(requests, Mode.SEQUENTIAL), seed=3).results, expected)
    rejection = requests_of(8, temperature, acceptance=Acceptance.REJECTION)
    pump = run(rejection, seed=4)
    assert check_forms(rejection, pump.results) > 1
    assert sum(result.speculation.accepted for result in pump.results.values()) > 15
    if temperature == 0:
        assert {n: r.token_ids for n, r in pump.results.items()} == {n: r.token_ids for n, r in expected.items()}


def test_a_draft_that_knows_no_grammars_changes_nothing() -> None:
    requests = requests_of(6, 1.0)
    target, draft = pair("llama")
    pump = Pump(target, draft, seed=5, grammars=json_grammars())
    assert pump.draft is not None
    pump.draft._grammars = None
    assert_same(pump.run(requests), reference(6, 1.0))


@pytest.mark.parametrize("k", [0, 5])
def test_the_engines_give_the_tokens_of_the_reference(k: int) -> None:
    requests = {name: request for name, request in requests_of(5, 1.0).items() if name != "form-0"}
    pump = Pump(loaded("target"), loaded("good"), seed=6, pages=96, draft_pages=96, grammars=json_grammars())
    results = pump.run(requests)
    target = reference_model("llama")
    for name, request in requests.items():
        sampling = request.sampling
        assert sampling.structured_output is not None
        assert sampling.seed is not None
        grammar = json_grammars().matcher(sampling.structured_output)
        own = speculative_decode(
            model_of(target),
            model_of(noisy_copy(target, 0.05)),
            request.prompt,
            sampling,
            seed=sampling.seed,
            k=k,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            grammar=grammar,
        )
        assert results[name].token_ids == tuple(own), name


def test_a_session_that_goes_on_elsewhere_keeps_its_form() -> None:
    requests, expected = requests_of(8, 1.0), reference(8, 1.0)
    broken = {
        name: Request(r.prompt, r.sampling, r.speculation, r.eos_token_ids, generated=expected[name].token_ids[: 2 + i])
        for i, (name, r) in enumerate(requests.items())
        if len(expected[name].token_ids) > 2 + i
    }
    assert len(broken) > 5
    pump = run(broken, seed=7)
    for name, request in broken.items():
        assert request.generated + pump.results[name].token_ids == expected[name].token_ids, name


def test_a_beginning_of_another_form_is_refused() -> None:
    request = requests_of(3, 0.0)["form-2"]
    wrong = Request(request.prompt, request.sampling, request.speculation, (EOS,), generated=(110, 111))
    pump = Pump(pair("llama")[0], None, grammars=json_grammars())
    pump.run({"wrong": wrong})
    assert "not the beginning of one that structured_output.choice allows" in pump.failures["wrong"]


def test_the_rejection_rule_keeps_the_law_of_the_constrained_target() -> None:
    """Every choice of draft and target of a round, with its probability; the draft is constrained, or is not."""
    form = StructuredOutput(regex="[ab]{1,2}c?")
    token = {text: json_tokenizer().encode(text)[0] for text in "abcx"}
    known = torch.full((VOCAB,), -math.inf, dtype=torch.float64)
    known[[*token.values(), EOS]] = 0.0

    def logits(seed: int, context: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *context)) % 2**31)
        return known + torch.randn(VOCAB, generator=generator, dtype=torch.float64)

    def log_p(seed: int, context: tuple[int, ...], bound: bool = True) -> torch.Tensor:
        params = SamplingParams(temperature=1.0, structured_output=form if bound else None)
        grammar = json_grammars().matcher(form) if bound else None
        state = SamplerState(params, 0, (10,), eos_token_ids=(EOS,), vocab_size=VOCAB, grammar=grammar)
        return process(logits(seed, context)[None], [Row(state, context)]).scores[0].log_softmax(-1)

    def texts(context: tuple[int, ...] = (), weight: float = 1.0) -> dict[tuple[int, ...], float]:
        if EOS in context or len(context) == 3:
            return {context: weight}
        law: dict[tuple[int, ...], float] = {}
        for token_id, value in enumerate(log_p(1, context).tolist()):
            if value > -math.inf:
                law |= texts((*context, token_id), weight * math.exp(value))
        return law

    for bound in (True, False):

        def round_(choose: Callable[..., int], bound: bool = bound) -> tuple[int, ...]:
            drafted: tuple[int, ...] = ()
            qs: tuple[Any, ...] = ()
            while len(drafted) < 2 and EOS not in drafted:
                token_id, q = honest_draft(choose, log_p(2, drafted, bound), 1.0, 2)
                drafted, qs = (*drafted, token_id), (*qs, q)
            params = SamplingParams(temperature=1.0, structured_output=form)
            grammar = json_grammars().matcher(form)
            state = SamplerState(params, 0, (10,), eos_token_ids=(EOS,), vocab_size=VOCAB, grammar=grammar)
            contexts = [drafted[:i] for i in range(len(drafted) + 1)]
            rows = torch.stack([logits(1, context) for context in contexts])
            processed = process(rows, [Row(state, context) for context in contexts])
            verdict = verify(processed, [Proposal(drafted, qs)], [Acceptance.REJECTION], Enumerated(choose))[0]
            emitted = verdict.token_ids
            return emitted[: emitted.index(EOS) + 1] if EOS in emitted else emitted

        law: dict[tuple[int, ...], float] = defaultdict(float)
        for emitted, weight in enumerate_choices(round_).items():
            for text, share in texts(emitted, weight).items():
                law[text] += share
        assert distance(law, texts()) < 2e-6


def _masks_children_by_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row below a draft token is given the tokens that were allowed in its place."""
    masks = Matcher.masks
    monkeypatch.setattr(Matcher, "masks", lambda self, suffixes: masks(self, [suffix[:-1] for suffix in suffixes]))


def _forgets_to_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft tokens of a step stay consumed."""

    class Stuck:
        def __init__(self, state: Any) -> None:
            self._state = state

        def __getattr__(self, name: str) -> Any:
            return getattr(self._state, name)

        def rollback(self, count: int) -> bool:
            return True

    make = Matcher.__init__

    def wrong(self: Matcher, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self._state = Stuck(self._state)

    monkeypatch.setattr(Matcher, "__init__", wrong)


def _forgets_what_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Matcher.append
    monkeypatch.setattr(Matcher, "append", lambda self, token_ids: append(self, token_ids[:-1]))


@mutant(Matcher, "masks")
def _always_allows_the_end(masks: Any, self: Matcher, suffixes: Any) -> Any:
    found = masks(self, suffixes)
    found[:, EOS // 8] |= np.uint8(1 << EOS % 8)
    return found


def _takes_siblings_for_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proposal, "suffixes", lambda self: [self.token_ids[:i] for i in range(len(self.token_ids) + 1)])


MUTANTS = [
    _masks_children_by_their_parent,
    _forgets_to_go_back,
    _forgets_what_was_committed,
    _always_allows_the_end,
    _takes_siblings_for_a_chain,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__.strip("_"))
def test_mutants_are_caught(mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some run: what is accepted differs from run to run."""
    requests, expected = requests_of(8, 1.0), reference(8, 1.0)
    any_subtrees(monkeypatch)
    mutant(monkeypatch)
    target, draft = pair("llama")

    def is_caught(seed: int) -> bool:
        pump = Pump(target, draft, seed=seed, grammars=json_grammars(), draft_pages=40, draft_steps=(2, 8))
        results = pump.run(requests)
        return bool(pump.failures) or any(results[name].token_ids != r.token_ids for name, r in expected.items())

    assert any(map(is_caught, range(6)))
