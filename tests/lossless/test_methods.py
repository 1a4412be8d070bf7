"""The cells of docs/methods.md: each method alone, built from its configuration, gives the text of plain decoding.

The fast ring runs each column at least once, the slow ring every method at least once and one across ranks, the nightly
ring all cells.
"""

import functools
import importlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.drafters.head_files import VOCAB, made, write_exit, write_target
from tests.drafters.test_plugins import installed
from tests.lossless.methods import CASES, ROWS, Column, methods_page, refusal, row_of, with_options
from tests.lossless.test_engines import PROCESSORS
from tests.lossless.test_trees import any_subtrees
from tests.support.models import letters_tokenizer
from tests.support.mutants import mutant
from tests.support.pump import Pump, Request, assert_same
from tests.support.rings import nightly, slow
from tests.support.vocabularies import other_vocabulary

from paceline.checkpoint.files import Checkpoint
from paceline.checkpoint.grammar import Grammars
from paceline.config import LocalConfig, ServiceConfig, TargetSetup
from paceline.config.methods import HEADS
from paceline.draft.build import build_draft_engine
from paceline.drafters.catalogue import METHODS, Method, Place, method_named
from paceline.drafters.heads.drafter import HeadDrafter
from paceline.drafters.protocol import Candidates, Leaf
from paceline.drafters.suffix import SuffixDrafter
from paceline.embedded import DRAFT_DIR, TARGET_DIR
from paceline.local import LocalPipeline
from paceline.model.device import resolve
from paceline.model.loading import LoadedModel, load_model
from paceline.target import engine as target_engine
from paceline.target.control.allocation import Allocation
from paceline.target.mount import bind_heads, features_of, load_heads, load_link, open_heads, open_link
from paceline.types import (
    PAGE_SIZE,
    Acceptance,
    FinishReason,
    Mode,
    Result,
    SamplingParams,
    SpeculationParams,
    StructuredOutput,
)

assert installed  # a fixture: the package of docs/own-drafters.md

MODEL = {"dtype": "float32", "device": "cpu", "compile": False}
MAX_TOKENS, DRAFT_TOKENS = 20, 5
PUMP: dict[str, Any] = {"pages": 48, "max_step_tokens": 128, "max_model_len": 512, "tree_budget": 64}

TEXT = '''class Point:
    """A point."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
        return "Point(%r, %r)" % (self.x, self.y)

    def __eq__(self, other):
        return self.x == other.x and self.y == other.y

    def __hash__(self):
        return hash((self.x, self.y))


class Line:
    """A line."""

    def __init__(self, x, y):
        self.x = x
        self.y = y
'''
RECORDS = "".join(
    f'{{"name": "{name}", "value": {value}}}\n'
    for name, value in (("left", 10), ("right", 20), ("left_end", 10), ("right_end", 20), ("left", 12), ("right", 10))
)
FORMS = {True: r'\{"name": "[a-z_]{1,12}", "value": [0-9]{1,3}\}', False: "[a-p]{6,24}"}
"""By whether the target is the embedded one: one more record, or some of the letters."""
ENDS = ("\n    def __repr__(self):\n        return", "\n    def __eq__(self, other):\n", "\n    def __hash__(self")
"""Prompts have one beginning of more than a page, and repeat themselves."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for synthetic checkpoints."""
    return tmp_path_factory.mktemp("methods")


def pard(folder: Path) -> Path:
    """The embedded draft, which was never taught what its pard token means: it is right about the first token alone."""
    shutil.copytree(DRAFT_DIR, folder, dirs_exist_ok=True)
    config = json.loads((DRAFT_DIR / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"spd_type": "pard", "pard_token": 1}), encoding="utf-8")
    return folder


def exit_head(folder: Path) -> Path:
    """One of the embedded target at layer 6 that changes its states a little, so that some tokens are as without it."""
    return write_exit(folder, 384, 8, 6, scale=0.1)


MAKERS: dict[str, Callable[[Path], Path]] = {"other_vocabulary": other_vocabulary, "pard": pard, "exit": exit_head}


def sources(method: Method, folder: Path) -> tuple[str, str | None]:
    """Directories of the target and of the method's checkpoint."""
    model = row_of(method).model
    kind, _, name = (model or "").rpartition(":")
    if kind == "made":
        return "paceline/embedded-target", str(MAKERS[name](folder / name))
    if kind != "synthetic":
        return "paceline/embedded-target", model
    head = made(name)
    target, path = folder / f"target-{head.target}", folder / name
    if not target.exists():
        write_target(target, head.target)
        letters_tokenizer(VOCAB).save_pretrained(target)  # a pipeline has one
    return str(target), str(path if path.exists() else head.write(path))


def configuration(method: Method, column: Column, folder: Path) -> ServiceConfig:
    """That of the page, with these checkpoints, and engines that are small and always ask for all tokens."""
    tree = method.configuration(*sources(method, folder))
    options = {**MODEL, "batch_invariant": "off", "adaptive": column is Column.TREE, "max_model_len": 512}
    engine = tree["target_config"].setdefault("engine_kwargs", {})
    engine |= options | row_of(method).options
    if method.place is Place.TARGET and method.needs_model and not row_of(method).trained:
        engine["heads"][0]["probe"] = False  # it predicts nothing
    if method.place is Place.POOL:
        drafts = tree["draft_config"].setdefault("engine_kwargs", {})
        drafts |= {"tree_step_tokens": 16, **(MODEL if method.kind == "model" else {})}
        if method.kind == "head":
            drafts |= {"dtype": MODEL["dtype"], "device": MODEL["device"]}
        if method.kind == "cascade":
            drafts["drafters"][0]["options"] = MODEL
    return ServiceConfig.parse(tree)


@functools.cache
def loaded(source: str, features: Any) -> LoadedModel:
    """A target that returns these states."""
    options = TargetSetup(source).options.model_copy(update=MODEL)
    return load_model(Checkpoint.open(source), options, None, resolve(options, None), features)


def pump_of(method: Method, config: ServiceConfig, **options: Any) -> Pump:
    """Both engines of a configuration in one thread. ``options``: other ones of the pump than ``PUMP``."""
    setup, draft_setup = config.target_setup(), config.draft_setup()
    checkpoint = Checkpoint.open(setup.source)
    opened, linked = open_heads(setup, checkpoint), open_link(setup, checkpoint)
    model = loaded(setup.source, features_of(opened, linked))
    heads = load_heads(setup, opened, checkpoint, model, None)
    link = None if linked is None else load_link(linked, model)
    drafter = None if draft_setup is None else build_draft_engine(draft_setup, lambda _: None).drafter
    pump = Pump(
        model,
        None,
        heads=heads,
        link=link,
        drafter=drafter,
        adaptive=setup.options.adaptive,
        grammars=Grammars.of(checkpoint, model.vocab_size),
        late=0.1,
        seed=1,
        **PUMP | options,
    )
    bind_heads(heads, pump.target.runner.cache)
    return pump


@functools.cache
def plain(source: str, temperature: float, column: Column) -> dict[str, Result]:
    """The target alone, a token at a time, with what this column's requests ask for."""
    model, grammars = loaded(source, None), Grammars.of(Checkpoint.open(source), loaded(source, None).vocab_size)
    requests = requests_of(source, column, temperature, Mode.PLAIN)
    return Pump(model, None, grammars=grammars, late=0.0, **PUMP).run(requests)


def requests_of(source: str, column: Column, temperature: float, mode: Mode) -> dict[str, Request]:
    """Three sessions; some text where the target has a tokenizer, else numbers that repeat themselves."""
    checkpoint, embedded = Checkpoint.open(source), source == str(TARGET_DIR)
    if embedded:
        texts = [RECORDS * (n + 1) for n in range(3)] if column is Column.GRAMMAR else [TEXT + end for end in ENDS]
        prompts = [list(checkpoint.tokenizer.encode(text)) for text in texts]
    else:
        prompts = [[2 + (i * i) % 37 for i in range(72)] + [40 + n] * 2 for n in range(3)]
    rule = Acceptance.REJECTION if column is Column.REJECTION else Acceptance.COUPLED
    options: dict[str, Any] = {"ignore_eos": True}
    if column is Column.PROCESSORS:
        options |= PROCESSORS["all"]
        options["allowed_token_ids"] = [i for i in options["allowed_token_ids"] if i < checkpoint.vocab_size]
    if column is Column.GRAMMAR:
        options = {"structured_output": StructuredOutput(regex=FORMS[embedded])}
    return {
        f"s{i}": Request(
            prompt,
            SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=i, **options),
            SpeculationParams(mode=mode, acceptance=rule, max_draft_tokens=DRAFT_TOKENS),
            eos_token_ids=checkpoint.eos_token_ids if column is Column.GRAMMAR else (),
        )
        for i, prompt in enumerate(prompts)
    }


def own(method: Method, results: Iterable[Result]) -> Counter[str]:
    """Tokens of the method that were ``drafted``, which means verified, and ``accepted``."""
    found: Counter[str] = Counter(drafted=0, accepted=0)
    for result in results:
        counted = result.speculation
        heads, lookups = (
            (counted.head_drafted, counted.head_accepted),
            (counted.lookup_drafted, counted.lookup_accepted),
        )
        if method.place is Place.POOL:
            parts = (counted.drafted - heads[0] - lookups[0], counted.accepted - heads[1] - lookups[1])
        else:
            parts = heads if method.kind else lookups
        found.update(drafted=parts[0], accepted=parts[1])
    return found


def check_form(source: str, results: Iterable[Result]) -> None:
    """Raises AssertionError unless outputs that have ended are of the form that was asked for, and one has ended."""
    ended = [result.token_ids for result in results if result.finish_reason is FinishReason.STOP]
    assert ended
    for *token_ids, _ in ended:
        assert re.fullmatch(FORMS[source == str(TARGET_DIR)], Checkpoint.open(source).tokenizer.decode(token_ids))


def all_offers(patch: pytest.MonkeyPatch) -> None:
    """Every token that is offered is verified, whatever the steps were measured to take."""
    patch.setattr(Allocation, "allocate_draft_tokens", lambda self, offers, **options: [len(offer) for offer in offers])


def check(method: Method, column: Column, folder: Path) -> None:
    """Runs a cell; raises AssertionError if it does not do what the table says."""
    config, branches = configuration(method, column, folder), 0
    counted: Counter[str] = Counter()
    source, limits = config.target_setup().source, row_of(method).limits
    for temperature in row_of(method).temperatures:
        requests = requests_of(source, column, temperature, method.mode)
        with pytest.MonkeyPatch.context() as patch:
            if column is Column.TREE:
                any_subtrees(patch, most=8)
            pump = pump_of(method, config)
            if column is Column.PREFIX:
                first = next(iter(requests))
                pump.run({first: requests[first]})
            results = pump.run({name: r for name, r in requests.items() if name not in pump.results}, arrivals=0.2)
        assert pump.failures == {}
        assert not any(mounted.failure for mounted in pump.target.heads.mounted)
        if column is not Column.REJECTION or temperature == 0:
            asked = column if column in (Column.PROCESSORS, Column.GRAMMAR) else Column.COUPLED
            assert_same(results, plain(source, temperature, asked))
        if column is Column.GRAMMAR:
            check_form(source, results.values())
        if column is Column.PREFIX:
            assert pump.target.stats.cached_tokens >= 2 * PAGE_SIZE
            results = {name: r for name, r in results.items() if name != first}
        if column is not Column.REJECTION or column not in limits or temperature > 0:
            counted.update(own(method, results.values()))
        branches += pump.target.stats.branches
    if column is Column.TREE:
        assert (branches > 0) == (column not in limits)
    require_tokens(method, column, counted)


def check_ranks(method: Method, folder: Path) -> None:
    """The same of a target of two ranks, each a process: its plain text, and tokens of the method."""
    config = configuration(method, Column.RANKS, folder)
    counted: Counter[str] = Counter()
    setup, draft_setup = config.target_setup(), config.draft_setup()
    target = setup.options.model_dump(exclude_unset=True) | {"path": setup.source, "tensor_parallel_size": 2}
    draft: Any = draft_setup and draft_setup.options
    if draft_setup is not None and method.kind == "model":
        draft = {"path": draft_setup.source, **draft_setup.options.model_dump(exclude_unset=True)}
    local = LocalConfig(target=target, draft=draft, worker="thread", pin_cores=False)
    with pytest.MonkeyPatch.context() as patch:
        if not method.kind:
            all_offers(patch)
        with LocalPipeline(local) as pipeline:
            for temperature in row_of(method).temperatures:
                # In sequential mode a draft is waited for, however busy this machine is. Plain decoding comes last, as
                # heads have nothing for pages that plain sessions have filled.
                found = []
                for mode in (Mode.SEQUENTIAL if method.place is Place.POOL else Mode.OVERLAPPED, Mode.PLAIN):
                    running = [
                        pipeline.submit(list(r.prompt), r.sampling, r.speculation)
                        for r in requests_of(setup.source, Column.COUPLED, temperature, mode).values()
                    ]
                    found.append([generation.result for generation in running])
                assert [r.token_ids for r in found[0]] == [r.token_ids for r in found[1]]
                counted.update(own(method, found[0]))
    require_tokens(method, Column.RANKS, counted)


def require_tokens(method: Method, column: Column, counted: Counter[str]) -> None:
    """Raises AssertionError unless the method had tokens that were accepted, where it should have, and enough of them
    under the coupled rule."""
    if column is Column.REJECTION and column in row_of(method).limits:
        assert counted["drafted"] == 0
        return
    assert 0 < counted["accepted"] <= counted["drafted"]
    if column is Column.COUPLED:
        assert counted["accepted"] >= row_of(method).least * counted["drafted"]


FAST = {
    ("draft model, overlapped", Column.PROCESSORS),
    ("n-grams", Column.PREFIX),
    ("prompt lookup", Column.COUPLED),
    ("prompt lookup", Column.REJECTION),
    ("MTP", Column.TREE),
    ("MTP", Column.GRAMMAR),
    ("MLP speculator", Column.COUPLED),
    ("EAGLE", Column.PREFIX),
    ("P-EAGLE", Column.REJECTION),
    ("EAGLE-3, in the pool", Column.PREFIX),
    ("DFlash, DFlash 2, in the pool", Column.REJECTION),
}
SLOW = {("MTP", Column.RANKS), ("n-grams", Column.GRAMMAR)}
SLOW |= {(name, Column.TREE) for name in ROWS.keys() - {name for name, _ in FAST}}
FAST |= {(name, column) for name, row in ROWS.items() for column in row.refused}


def in_rings(cases: Iterable[tuple[str, Column]]) -> list[Any]:
    """The cases with the mark of their ring."""
    cases = list(cases)
    rest = [case for case in cases if case not in FAST | SLOW]
    return [*(c for c in cases if c in FAST), *slow(c for c in cases if c in SLOW), *nightly(rest)]


@pytest.mark.parametrize(("name", "column"), in_rings(CASES))
def test_a_cell_is_what_the_table_says(name: str, column: Column, files: Path, request: pytest.FixtureRequest) -> None:
    method = method_named(name)
    if method.kind == "plugin":
        request.getfixturevalue("installed")
    if column in row_of(method).refused:
        assert refusal(with_options(method, row_of(method).refused[column])) in methods_page()
    elif column is Column.RANKS:
        check_ranks(method, files)
    else:
        check(method, column, files)


def test_every_method_has_a_row_and_every_kind_of_the_configuration_is_a_method() -> None:
    assert ROWS.keys() <= {method.name for method in METHODS}
    assert all(row_of(method).model or not method.needs_model for method in METHODS)
    kinds = {place: {method.kind for method in METHODS if method.place is place} - {""} for place in Place}
    assert kinds[Place.TARGET] == HEADS.keys()
    expected = refusal({"draft_config": {"kind": "none"}}).partition("must be ")[2]
    assert kinds[Place.POOL] == set(re.findall(r"'(\w+)'", expected))


# -- mutants: what a row would look like that has stopped working ----------------------------------------------------


@mutant(HeadDrafter, "expand")
def _wrong_tokens(expand: Any, self: HeadDrafter, leaves: Any) -> Candidates:
    """The head's candidates are those of another token."""
    found = expand(self, leaves)
    return replace(found, token_ids=(found.token_ids + 1777) % self.vocab_size)


@mutant(HeadDrafter, "expand")
def _raises(_: Any, self: HeadDrafter, leaves: Any) -> Candidates:
    """The head fails and is switched off; the text stays right."""
    raise RuntimeError("broken")


@mutant(target_engine, "decide")
def _accepts_anything(decide: Any, logits: Any, rows: Any, proposals: Any, rules: Any) -> Any:
    """The first token of each proposal is accepted as it is."""
    verdicts = decide(logits, rows, proposals, rules)
    return [
        replace(v, num_accepted=1, token_ids=(p.token_ids[0], v.token_ids[0]), logprobs=v.logprobs[:1] * 2)
        if len(p) and not v.num_accepted
        else v
        for v, p in zip(verdicts, proposals, strict=True)
    ]


def _one_position_late(patch: pytest.MonkeyPatch, drafter: Any) -> None:
    """The candidates of a leaf are those of the position behind it."""
    expand = drafter.expand

    def mutant(self: Any, leaves: Sequence[Leaf]) -> Candidates:
        first = expand(self, leaves).token_ids[:, 0].tolist()
        later = [replace(leaf, path=(*leaf.path, token)) for leaf, token in zip(leaves, first, strict=True)]
        found: Candidates = expand(self, later)
        return found

    patch.setattr(drafter, "expand", mutant)


@pytest.mark.parametrize("name", slow(["plugin", "suffixes, in the target"]))
def test_a_drafter_that_is_one_position_late_is_noticed(name, files, installed, monkeypatch) -> None:
    """Its text stays plain's and some of its tokens are accepted, but too few."""
    plugin = importlib.import_module("my_drafters").Bigrams
    _one_position_late(monkeypatch, plugin if name == "plugin" else SuffixDrafter)
    with pytest.raises(AssertionError):
        check(method_named(name), Column.COUPLED, files)


@pytest.mark.parametrize("mutant", [_wrong_tokens, _raises, _accepts_anything], ids=lambda m: m.__name__.strip("_"))
def test_a_row_that_stops_working_is_noticed(mutant: Any, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(method_named("MTP"), Column.COUPLED, files)
