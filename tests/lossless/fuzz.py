"""The differential fuzzer: random sessions, beside random others, in random company of faults, against plain decoding.

Each case is a value: a target, its sessions, and what happens meanwhile. ``check`` runs it and compares every session
with its own plain decoding: tokens, finish reason, chunks, log probabilities. hypothesis draws the cases, and shrinks
one that fails to the least that still does. Commands:

    python -m tests.lossless.fuzz [SESSIONS] [--seed N] [--targets NAME ...]
    python -m tests.lossless.fuzz --case '{"target": ...}'
"""

import argparse
import atexit
import functools
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from tests.faults.pump import LINKS, RATES, FaultyPump
from tests.lossless.test_engines import PROCESSORS
from tests.lossless.test_structured import form_of
from tests.lossless.test_trees import any_subtrees
from tests.support.models import EOS, noisy_copy, pair, prompt, random_model
from tests.support.pump import Request, plain_reference
from tests.support.schemas import json_grammars

from paceline.checkpoint.grammar import Grammars
from paceline.config import LocalConfig
from paceline.drafters.colocated import DraftModelHead
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.local import LocalPipeline
from paceline.model.features import OUT, Features
from paceline.model.loading import LoadedModel, prepare
from paceline.target.heads.mounted import MountedHead
from paceline.types import Acceptance, Mode, Result, SamplingParams, SpeculationParams

EAGER = ("llama", "gemma3", "gpt2", "llama bfloat16", "llama int8")
COMPILED = ("compiled", "compiled, hints", "compiled, states")
"""One bfloat16 model. All are compared with the plain text of the first."""
RANKS = ("two ranks", "two ranks, sharded head")
TARGETS = (*EAGER, *COMPILED, *RANKS)
KINDS = tuple(kind for kind in RATES if kind != "corrupt")
LONGEST_RUN = 60
"""Tokens of the longest output."""


@dataclass(frozen=True)
class Ask:
    """One session, or several of one prompt."""

    prompt_seed: int = 0
    num_prompt_tokens: int = 3
    max_tokens: int = 4
    temperature: float = 0.0
    seed: int = 0
    choices: int = 1
    """Sessions of this prompt, each with a seed of its own."""
    processor: str = "none"
    form: int | None = None
    """Structured output, by its number (``test_structured.form_of``)."""
    mode: Mode = Mode.OVERLAPPED
    acceptance: Acceptance = Acceptance.COUPLED
    max_draft_tokens: int = 4
    resumed: int = 0
    """Tokens that the client has already, of a stream that broke."""

    @property
    def has_one_text(self) -> bool:
        """False: under the rejection rule the text depends on the draft."""
        return self.acceptance is Acceptance.COUPLED or self.temperature == 0


@dataclass(frozen=True)
class Case:
    """A run of the service."""

    target: str = "llama"
    asks: tuple[Ask, ...] = ()
    seed: int = 0
    """Of the order in which everything happens."""
    pages: int = 48
    max_step_tokens: int = 64
    most_subtree: int = 0
    """Nodes of a session that a step verifies at most, siblings included; 0: what the engine chooses."""
    adaptive: bool = True
    head: bool = False
    """A draft model in the target as well."""
    faults: tuple[tuple[Literal["to_target", "from_target", "to_draft", "from_draft"], str], ...] = ()
    target_dies: tuple[int, ...] = ()
    """Ticks in which the target dies: its sessions migrate to another one."""
    draft_dies: tuple[int, ...] = ()
    """Ticks in which the draft dies, to come back ten ticks later."""


_CASES = TypeAdapter(Case)


def asks(target: str, longest: int = LONGEST_RUN) -> st.SearchStrategy[Ask]:
    """Sessions that a target can have, of at most ``longest`` tokens."""
    in_pump = target not in RANKS
    return st.builds(
        Ask,
        prompt_seed=st.integers(0, 3),
        num_prompt_tokens=st.one_of(st.integers(1, 20), st.integers(1, 20 + 2 * longest)),
        max_tokens=st.one_of(st.integers(1, min(12, longest)), st.integers(1, longest)),
        temperature=st.sampled_from((0.0, 1.0, 0.7, 1.6)),
        seed=st.integers(0, 50),
        choices=st.sampled_from((1, 1, 1, 1, 2, 8)),
        processor=st.sampled_from([*PROCESSORS]) if in_pump else st.sampled_from(["none", "top_p", "repetition"]),
        form=st.one_of(st.none(), st.integers(0, 40)) if in_pump else st.none(),
        mode=st.sampled_from((Mode.OVERLAPPED, Mode.SEQUENTIAL, Mode.PLAIN)),
        acceptance=st.sampled_from((Acceptance.COUPLED, Acceptance.COUPLED, Acceptance.REJECTION)),
        max_draft_tokens=st.sampled_from((4, 1, 8, 32)),
        resumed=st.one_of(st.just(0), st.integers(0, 20)) if in_pump else st.just(0),
    )


@st.composite
def cases(draw: st.DrawFn, targets: tuple[str, ...], most: int, longest: int) -> Case:
    """Runs of one of ``targets``, with at most ``most`` asks."""
    target = draw(st.sampled_from(targets))
    if target in RANKS:  # whose steps take ten times as long
        return Case(target, tuple(draw(st.lists(asks(target, min(longest, 24)), min_size=1, max_size=min(most, 3)))))
    sessions = tuple(draw(st.lists(asks(target, longest), min_size=1, max_size=most)))
    ticks = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 300)), max_size=3, unique=True).map(tuple)
    fault = st.tuples(st.sampled_from(LINKS), st.sampled_from(KINDS))
    return Case(
        target,
        sessions,
        seed=draw(st.integers(0, 10**6)),
        pages=draw(st.sampled_from((48, 14, 9))),
        max_step_tokens=draw(st.sampled_from((64, 48, 160))),
        most_subtree=draw(st.sampled_from((0, 6, 14, 30))),
        adaptive=draw(st.booleans()),
        head=draw(st.sampled_from((False, False, True))),
        faults=tuple(draw(st.lists(fault, max_size=2, unique=True))),
        target_dies=draw(ticks),
        draft_dies=draw(ticks),
    )


def check(case: Case) -> int:
    """Runs a case and returns the sessions compared. Raises AssertionError if one differs from its plain decoding."""
    return _check_ranks(case) if case.target in RANKS else _check_pump(case)


# -- one thread, a virtual clock, links that do harm ------------------------------------------------------------------


def _check_pump(case: Case) -> int:
    wanted = {
        f"{i}.{choice}": (ask, request_of(case.target, ask, choice))
        for i, ask in enumerate(case.asks)
        for choice in range(ask.choices)
    }
    target, draft = models(case.target)
    make_heads = (lambda: [_head(case.target)]) if case.head else list
    with pytest.MonkeyPatch.context() as patch:
        if case.most_subtree:
            any_subtrees(patch, case.most_subtree, case.seed)
        pump = _Pump(
            target,
            draft,
            seed=case.seed,
            faults={(link, kind): 0.3 * RATES[kind] for link, kind in case.faults},
            pages=case.pages,
            max_step_tokens=case.max_step_tokens,
            adaptive=case.adaptive,
            grammars=_grammars(),
            make_heads=make_heads,
        )
        pump.each_tick = functools.partial(_deaths, pump, case)
        results = pump.run({name: request for name, (_, request) in wanted.items()})
    assert not pump.failures, pump.failures
    compared = 0
    for name, (ask, request) in wanted.items():
        result = results[name]
        assert tuple(pump.chunks[name]) == result.token_ids, f"session {name}: chunks are not the result"
        if ask.has_one_text:
            _compare(name, result, plain(case.target, ask, int(name.partition(".")[2])), len(request.generated))
            compared += 1
    return compared


def _compare(name: str, result: Result, expected: Result, given: int) -> None:
    """A session whose first ``given`` tokens its client had already."""
    want = expected.token_ids[given:]
    at = next((i for i, (a, b) in enumerate(zip(result.token_ids, want, strict=False)) if a != b), None)
    assert at is None, f"session {name}: token {given + at} is {result.token_ids[at]} and in plain decoding {want[at]}"
    assert len(result.token_ids) == len(want), f"session {name}: {len(result.token_ids)} tokens for {len(want)}"
    assert result.finish_reason == expected.finish_reason, f"session {name}: {result.finish_reason}"
    for got, wanted in zip(result.logprobs, expected.logprobs[given:], strict=True):
        assert abs(got - wanted) < 1e-4, f"session {name}: log probability {got} for {wanted}"


class _Pump(FaultyPump):
    """A faulty pump whose targets all have the same options, heads and grammars."""

    def __init__(self, *models: Any, make_heads: Callable[[], list[MountedHead]], **options: Any) -> None:
        super().__init__(*models, heads=make_heads(), **options)
        self._make_heads = make_heads

    def heads_again(self) -> list[MountedHead]:
        return self._make_heads()


def _deaths(pump: FaultyPump, case: Case) -> None:
    """What the dead have sent arrives if their tick is even."""
    if pump.now in case.target_dies:
        pump.kill_target(keeps_talking=pump.now % 2 == 0)
    if pump.now in case.draft_dies and not pump.draft_dead:
        pump.kill_draft(keeps_talking=pump.now % 2 == 0)
    elif pump.now - 10 in case.draft_dies and pump.draft_dead:
        pump.restart_draft()


def request_of(target: str, ask: Ask, choice: int) -> Request:
    """The request of one of an ask's choices."""
    text = plain(target, ask, choice).token_ids if ask.resumed else ()
    generated = text[: min(ask.resumed, len(text) - 1)] if text else ()
    return replace(_whole(target, ask, choice), generated=generated)


def _whole(target: str, ask: Ask, choice: int) -> Request:
    options = dict(PROCESSORS[ask.processor])
    if "min_tokens" in options:
        options["min_tokens"] = min(options["min_tokens"], ask.max_tokens)
    if ask.form is not None:
        options = {key: value for key, value in options.items() if key in ("top_k", "top_p", "repetition_penalty")}
        options["structured_output"] = form_of(ask.form)
    sampling = SamplingParams(
        temperature=ask.temperature, max_tokens=ask.max_tokens, seed=1000 * ask.seed + choice, **options
    )
    speculation = SpeculationParams(mode=ask.mode, acceptance=ask.acceptance, max_draft_tokens=ask.max_draft_tokens)
    return Request(prompt(ask.prompt_seed, ask.num_prompt_tokens), sampling, speculation, eos_token_ids=(EOS,))


@functools.lru_cache(4096)
def plain(target: str, ask: Ask, choice: int) -> Result:
    """The plain decoding of one session alone. Of all compiled graphs it is that of the bare one."""
    bare = COMPILED[0] if target in COMPILED else target
    request = _whole(target, replace(ask, acceptance=Acceptance.COUPLED), choice)
    return plain_reference(models(bare)[0], {"alone": request}, grammars=_grammars())["alone"]


@functools.cache
def models(target: str) -> tuple[LoadedModel, LoadedModel]:
    """A target and its draft."""
    family, _, kind = target.partition(" ")
    if target in COMPILED:
        options: dict[str, Any] = {}
        if target == "compiled, hints":
            options = {"callback_boundary": 1}
        elif target == "compiled, states":
            options = {"features": Features((0, 1, OUT), every_position=False)}
        model = prepare(random_model("llama", dtype=torch.bfloat16), compile=True, **options)
        return model, pair("llama", torch.bfloat16)[1]
    if kind == "int8":
        from tests.model.test_quantized import loaded

        return loaded(torch.float32, "int8"), pair("llama")[1]
    return pair(family, torch.bfloat16 if kind == "bfloat16" else torch.float32)


@functools.cache
def _second_draft(family: str, dtype: torch.dtype) -> LoadedModel:
    return prepare(noisy_copy(random_model(family), 0.05, 5).to(dtype), compile=False)


def _head(target: str) -> MountedHead:
    family = "llama" if target in COMPILED else target.partition(" ")[0]
    model = _second_draft(family, models(target)[1].dtype)
    drafter = DraftModelHead(model.runner(96), max_leaves=8, max_prefill_tokens=64, top_m=64)
    return MountedHead("head", drafter, num_tokens=5)


@functools.cache
def _grammars() -> Grammars:
    return json_grammars()


# -- two ranks in processes of their own ------------------------------------------------------------------------------


def _check_ranks(case: Case) -> int:
    """All sessions at once, and then each alone in plain mode."""
    pipeline = _pipeline(case.target)

    def submit(ask: Ask, choice: int, mode: Mode) -> Any:
        request = _whole(case.target, ask, choice)
        sampling = request.sampling.model_copy(update={"ignore_eos": True})
        ids = [2 + token for token in request.prompt]
        return pipeline.submit(ids, sampling, request.speculation.model_copy(update={"mode": mode}))

    each = [(ask, choice) for ask in case.asks for choice in range(ask.choices)]
    together = [submit(ask, choice, ask.mode) for ask, choice in each]
    found = [generation.result for generation in together]
    compared = 0
    for number, ((ask, choice), result) in enumerate(zip(each, found, strict=True)):
        if ask.has_one_text:
            alone = submit(replace(ask, acceptance=Acceptance.COUPLED), choice, Mode.PLAIN)
            _compare(str(number), result, alone.result, 0)
            compared += 1
    return compared


@functools.cache
def _pipeline(target: str) -> LocalPipeline:
    """Lives until the process ends."""
    model = {"dtype": "float32", "device": "cpu", "compile": False, "max_model_len": 512}
    heads = [{"method": "mtp", "model": "paceline/embedded-mtp"}] if target.endswith("head") else []
    draft = None if heads else {"path": str(DRAFT_DIR), "dtype": "float32", "device": "cpu", "compile": False}
    options = {"path": str(TARGET_DIR), "tensor_parallel_size": 2, "heads": heads, "batch_invariant": "off", **model}
    pipeline = LocalPipeline(LocalConfig(target=options, draft=draft, worker="thread", pin_cores=False))
    pipeline.start()
    atexit.register(pipeline.stop)
    return pipeline


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass
class Totals:
    """What runs have compared."""

    cases: int = 0
    sessions: int = 0
    by_target: Counter[str] = field(default_factory=Counter)


class Found(AssertionError):
    """A case that differs, as small as it could be made."""

    def __init__(self, case: Case, error: BaseException) -> None:
        self.case = case
        command = f"python -m tests.lossless.fuzz --case '{_CASES.dump_json(case, exclude_defaults=True).decode()}'"
        super().__init__(f"{type(error).__name__}: {error}\n{command}")


def search(
    num_cases: int,
    number: int,
    targets: tuple[str, ...] = EAGER,
    totals: Totals | None = None,
    *,
    most: int = 7,
    longest: int = LONGEST_RUN,
) -> Totals:
    """Runs cases that ``number`` alone decides, each with at most ``most`` asks of ``longest`` tokens.

    Raises:
        Found: a case differs; with the smallest that does.
    """
    totals = totals or Totals()
    last: list[tuple[Case, BaseException]] = []

    @seed(number)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
    )
    @given(cases(targets, most, longest))
    def run(case: Case) -> None:
        try:
            compared = check(case)
        except Exception as error:
            last[:] = [(case, error)]
            raise
        totals.cases += 1
        totals.sessions += compared
        totals.by_target[case.target] += compared

    try:
        run()
    except Exception as error:
        if not last:
            raise
        raise Found(*last[0]) from error
    return totals


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sessions", type=int, nargs="?", default=1000, help="sessions to compare (default: 1000)")
    parser.add_argument("--seed", type=int, help="of the cases (default: another one in each run)")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, metavar="NAME", help=f"of {TARGETS}")
    parser.add_argument("--case", help="JSON of one case, to run again")
    options = parser.parse_args(arguments)
    if options.case is not None:
        print(f"{check(_CASES.validate_json(options.case))} sessions are those of plain decoding")
        return 0
    first = random.SystemRandom().randrange(10**6) * 10**4 if options.seed is None else options.seed
    logging.disable(logging.WARNING)  # faults are said there
    totals, started, number = Totals(), time.monotonic(), first
    print(f"seed {first}", flush=True)
    while totals.sessions < options.sessions:
        try:
            search(10, number, tuple(options.targets), totals)
        except Found as found:
            print(found, file=sys.stderr)
            return 1
        number += 1
        by_target = json.dumps(totals.by_target)
        print(f"{totals.cases} cases, {totals.sessions} sessions, {time.monotonic() - started:.0f} s: {by_target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
