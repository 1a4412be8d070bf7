"""A session that moves to another target with its KV pages: the text of one that has never moved.

The pages go from engine to engine as bytes, as ``HostMemoryMover`` sends them (``tests/runtime/test_page_mover.py``).
"""

from __future__ import annotations

import copy
import functools
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lossless.test_near_ties import near_ties
from tests.support.hybrids import hybrid
from tests.support.models import noisy_copy, pair, prompt, random_model
from tests.support.mutants import Mutant, mutant
from tests.support.pump import Clock
from tests.support.rings import slow
from transformers import AutoModelForCausalLM

from paceline.checkpoint.files import Checkpoint
from paceline.messages import OpenSession, Outcome
from paceline.model.kv_cache import LayerSpec, page_hash
from paceline.model.loading import LoadedModel, prepare
from paceline.model.runner import ModelRunner
from paceline.target import origin as origin_module
from paceline.target import pages as pages_module
from paceline.target.engine import TargetEngine
from paceline.target.origin import Origin, file_digest, origin_of
from paceline.target.pages import PageStore
from paceline.target.session import TargetSession
from paceline.types import PAGE_SIZE, Mode, SamplingParams, SpeculationParams

OUTPUT = 80


class Engine:
    """A target engine alone, and the texts of its sessions."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        pages: int = 40,
        proven: bool = True,
        budget: int = 100,
        origin: Origin | None = None,
    ) -> None:
        self.texts: dict[str, list[int]] = {}
        self.engine = TargetEngine(
            model.runner(pages),
            self._take,
            max_sessions=8,
            max_step_tokens=budget,
            max_model_len=1024,
            batch_invariant="yes" if proven else "untested",
            origin=origin,
            clock=Clock(),
        )

    def _take(self, messages: Sequence[Any]) -> None:
        for message in messages:
            if isinstance(message, Outcome):
                self.texts[message.session_id] += message.token_ids

    def open(self, opened: OpenSession) -> None:
        self.texts[opened.session_id] = list(opened.token_ids)
        self.engine.receive([opened])

    def step(self) -> bool:
        worked = self.engine.step()
        self.engine.check_integrity()
        return worked

    def finish(self) -> dict[str, list[int]]:
        while self.engine.num_sessions:
            assert self.step()
        return self.texts


@dataclass(frozen=True)
class Asked:
    """What a session asks for."""

    length: int
    seed: int
    salt: str = ""

    def opened(self, name: str, context: Sequence[int] = (), epoch: int = 1) -> OpenSession:
        own = prompt(self.seed, self.length)
        sampling = SamplingParams(max_tokens=OUTPUT, temperature=float(self.seed % 2), seed=self.seed, ignore_eos=True)
        speculation = SpeculationParams(mode=Mode.OVERLAPPED, max_draft_tokens=4)
        context = tuple(context) or tuple(own)
        return OpenSession(name, epoch, context, len(own), self.seed, sampling, speculation, cache_salt=self.salt)


SESSIONS = {f"s{i}": Asked(length, i) for i, length in enumerate((3, 62, 63, 64, 65, 127, 130, 300))}


def move(source: PageStore, target: PageStore, opened: OpenSession, group: int = 2) -> int:
    """Moves what can be moved of a session's context, a group of pages at a time; returns the number of pages."""
    wanted = target.wanted(opened.token_ids, opened.cache_salt)
    if wanted is None:
        return 0
    hashes = source.held(opened.token_ids, opened.cache_salt, wanted.identity, wanted.first)
    num_moved = 0
    for start in range(0, len(hashes), group):
        contents = source.read(hashes[start : start + group])
        written = target.write(wanted, wanted.first + start, contents)
        assert written in (0, len(contents))
        num_moved += written
    target.settle(wanted)
    return num_moved


def texts_of(model: LoadedModel) -> dict[str, list[int]]:
    """The texts of all sessions without a move, each alone."""
    texts = {}
    for name, asked in SESSIONS.items():
        engine = Engine(model)
        engine.open(asked.opened(name))
        texts |= engine.finish()
    return texts


def moved(model: LoadedModel, cuts: Iterator[int], target: Engine | None = None) -> tuple[dict[str, list[int]], int]:
    """The texts of sessions that leave an engine for another one after some steps, and how many pages came along.

    ``target``: the other one; None: one with room for all.
    """
    source, target = Engine(model), target or Engine(model)
    for name, asked in SESSIONS.items():
        source.open(asked.opened(name))
    num_moved = 0
    for name, asked in SESSIONS.items():
        for _ in range(next(cuts)):
            source.step()
        opened = asked.opened(name, source.texts[name], epoch=2)
        if name in source.engine.sessions:  # it has not ended
            source.engine.close_session(source.engine.sessions[name])
            num_moved += move(source.engine.pages, target.engine.pages, opened)
            target.open(opened)
            target.step()
        else:
            target.texts[name] = source.texts[name]
    return target.finish(), num_moved


def cuts(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randint(0, 9)


MODELS: dict[str, Callable[[], LoadedModel]] = {
    "float32": lambda: pair("llama")[0],
    "bfloat16": lambda: pair("llama", torch.bfloat16)[0],
    "windows": lambda: pair("gemma3")[0],
    "near ties": lambda: prepare(near_ties("llama"), compile=False),
    "latents": lambda: prepare(near_ties("deepseek_v3"), compile=False),
    "entries": lambda: prepare(near_ties("deepseek_v4"), compile=False),
}


@functools.cache
def unmoved(name: str) -> dict[str, list[int]]:
    """``texts_of`` a model of ``MODELS``."""
    return texts_of(MODELS[name]())


@pytest.mark.parametrize("name", ["float32", "latents", *slow(["bfloat16", "windows", "near ties", "entries"])])
def test_texts_after_a_move_are_those_without(name: str) -> None:
    texts, num_moved = moved(MODELS[name](), cuts(1))
    assert num_moved >= 10
    assert texts == unmoved(name)


@pytest.mark.parametrize("seed", [2, *slow([3, 4, 5])])
def test_texts_are_the_same_where_moved_sessions_are_preempted(seed: int) -> None:
    model = MODELS["float32"]()
    target = Engine(model, pages=9)
    texts, num_moved = moved(model, cuts(seed), target)
    assert num_moved >= 2
    assert target.engine.stats.preemptions >= 1
    assert texts == unmoved("float32")


def test_a_moved_session_computes_what_is_missing_alone() -> None:
    model = pair("llama")[0]
    source, target = Engine(model), Engine(model)
    opened = SESSIONS["s7"].opened("s7")
    source.open(opened)
    while len(source.texts["s7"]) < 330:
        source.step()
    again = SESSIONS["s7"].opened("s7", source.texts["s7"][:330], epoch=2)
    assert move(source.engine.pages, target.engine.pages, again) == 5
    target.open(again)
    target.step()
    assert target.engine.stats.tokens_computed == 330 - 5 * PAGE_SIZE
    assert move(source.engine.pages, target.engine.pages, again) == 0, "they are here"


@pytest.mark.parametrize("seed", [1, *slow([2, 3])])
def test_pages_of_a_full_cache_come_as_far_as_there_is_room(seed: int) -> None:
    """Sessions that run are not disturbed, and of what had to make room nothing is used."""
    model = pair("llama")[0]
    source, target = Engine(model), Engine(model, pages=11)
    for engine in (source, target):
        engine.open(SESSIONS["s7"].opened("s7"))
        engine.finish()
    busy = Asked(400, 20 + seed)
    target.open(busy.opened("busy"))
    for _ in range(6):
        target.step()
    opened = Asked(310, seed).opened("new")
    source.open(opened)
    source.finish()
    context = source.texts["new"][:370]
    move_some(source.engine.pages, target.engine.pages, replace(opened, token_ids=tuple(context)))
    target.engine.check_integrity()
    target.open(Asked(310, seed).opened("new", context, epoch=2))
    texts = target.finish()
    alone = Engine(model)
    alone.open(busy.opened("busy"))
    assert texts["busy"] == alone.finish()["busy"]
    assert texts["new"] == source.texts["new"]


def move_some(source: PageStore, target: PageStore, opened: OpenSession) -> None:
    """Moves pages until one is refused."""
    wanted = target.wanted(opened.token_ids, opened.cache_salt)
    assert wanted is not None
    assert 0 < len(wanted.hashes) < len(opened.token_ids) // PAGE_SIZE, "there is room for all, or for none"
    hashes = source.held(opened.token_ids, opened.cache_salt, wanted.identity, wanted.first)
    for i in range(wanted.first, len(wanted.hashes)):
        if not target.write(wanted, i, source.read(hashes[i - wanted.first : i - wanted.first + 1])):
            break
    target.settle(wanted)


def test_pages_that_had_to_make_room_end_a_move() -> None:
    model = pair("llama")[0]
    source, target = Engine(model), Engine(model, pages=11)
    opened = SESSIONS["s7"].opened("s7")
    source.open(opened)
    source.finish()
    store = target.engine.pages
    wanted = store.wanted(opened.token_ids, "")
    assert wanted is not None
    contents = source.engine.pages.read(source.engine.pages.held(opened.token_ids, "", wanted.identity, 0))
    assert store.write(wanted, 0, contents[:2]) == 2
    cache = target.engine.runner.cache
    cache.release(cache.allocate(cache.num_pages))  # everything is evicted
    assert store.write(wanted, 2, contents[2:3]) == 0
    with pytest.raises(ValueError, match="pages are of 32768 bytes each, and 4 are wanted"):
        store.write(wanted, 0, [contents[0][:-1]])
    with pytest.raises(ValueError, match="4 are wanted"):
        store.write(wanted, 3, contents[:2])


# -- what is not given -------------------------------------------------------------------------------------------------


def held_by(source: Engine, target: Engine, asked: Asked, context: Sequence[int], salt: str | None = None) -> int:
    """The number of pages that ``source`` would give ``target``."""
    salt = asked.salt if salt is None else salt
    wanted = target.engine.pages.wanted(context, salt)
    return 0 if wanted is None else len(source.engine.pages.held(context, salt, wanted.identity, wanted.first))


def served(model: LoadedModel, asked: Asked, **options: Any) -> tuple[Engine, list[int]]:
    """An engine that has served a session, and the session's text."""
    engine = Engine(model, **options)
    engine.open(asked.opened("s"))
    return engine, engine.finish()["s"]


def test_pages_are_given_for_the_same_salt_alone() -> None:
    model, asked = pair("llama")[0], Asked(200, 1, "mine")
    source, text = served(model, asked)
    target = Engine(model)
    assert held_by(source, target, asked, text) == 4
    for other in ("", "yours", "min"):
        assert held_by(source, target, asked, text, other) == 0


def test_pages_are_given_to_the_same_checkpoint_alone() -> None:
    model, asked = pair("llama")[0], Asked(200, 1)
    source, text = served(model, asked)
    others = [pair("llama")[1], pair("llama", torch.bfloat16)[0], pair("qwen3")[0], last_layer_changed()]
    for other in others:
        assert held_by(source, Engine(other), asked, text) == 0
    assert held_by(source, Engine(model), asked, text) == 4
    assert held_by(source, Engine(model, proven=False), asked, text) == 0, "the bits were not tested"
    assert held_by(served(model, asked, proven=False)[0], Engine(model), asked, text) == 0


def test_pages_are_given_to_the_same_configuration_alone(tmp_path: Path) -> None:
    """A window that is longer than a page changes no bit of a probe, and the pages of longer contexts."""
    asked = Asked(300, 1)
    targets = []
    for name, window in (("one", 100), ("same", 100), ("other", 200)):
        random_model("llama").save_pretrained(tmp_path / name)
        file = tmp_path / name / "config.json"
        windowed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
        file.write_text(json.dumps(json.loads(file.read_text()) | windowed))
        model = prepare(AutoModelForCausalLM.from_pretrained(tmp_path / name), compile=False)
        targets.append((model, origin_of(Checkpoint.open(str(tmp_path / name)), model)))
    (one, origin), (same, as_before), (other, changed) = targets
    assert origin.numerics == as_before.numerics != changed.numerics
    ranks = origin_of(Checkpoint.open(str(tmp_path / "one")), one, ("native", "auto", 2, None))
    assert ranks.numerics != origin.numerics
    for each in (origin, as_before, changed, ranks):
        each.wait()
    source, text = served(one, asked, origin=origin)
    assert text != served(other, asked)[1]
    assert held_by(source, Engine(same, origin=as_before), asked, text) == 5
    assert held_by(source, Engine(other, origin=changed), asked, text) == 0
    assert held_by(source, Engine(other, origin=origin), asked, text) == 5, "a probe cannot tell"


def test_pages_are_given_to_the_same_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints differ in one number, in the middle of a file. Until files are read, no pages move."""
    give_to_the_same_weights(tmp_path, monkeypatch)


def test_a_digest_of_samples_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first bytes and the last ones."""
    monkeypatch.setattr(origin_module, "file_digest", lambda path: path.read_bytes()[:4096] + path.read_bytes()[-4096:])
    with pytest.raises(AssertionError):
        give_to_the_same_weights(tmp_path, monkeypatch)


def give_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moves pages between targets whose files are the same, and are not."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    model, asked, origins = pair("llama")[0], Asked(200, 1), []
    for name, number in (("one", 0), ("same", 0), ("other", 1)):
        (folder := tmp_path / name).mkdir()
        contents = bytearray(3 << 20)
        contents[(3 << 19) + 12345] = number
        (folder / "model.safetensors").write_bytes(contents)
        origins.append(Origin(b"facts", [folder / "model.safetensors"]))
    missing = Origin(b"facts", [tmp_path / "missing.safetensors"])
    for each in (*origins, missing):
        each.wait()
    one, same, other = origins
    source, text = served(model, asked, origin=one)
    assert held_by(source, Engine(model, origin=same), asked, text) == 4
    assert held_by(source, Engine(model, origin=other), asked, text) == 0
    assert Engine(model, origin=missing).engine.pages.wanted(text, "") is None
    assert held_by(served(model, asked, origin=missing)[0], Engine(model, origin=one), asked, text) == 0


def test_a_file_is_read_again_if_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    file, opened, read = tmp_path / "model.safetensors", [], Path.open

    def counted(path: Path, *args: Any, **options: Any) -> Any:
        opened.extend([path] if path == file else [])
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "open", counted)
    file.write_bytes(b"one")
    found = [file_digest(file), file_digest(file)]
    num_read = len([*opened])
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    found.append(file_digest(file))
    assert found[0] == found[1] != found[2]
    assert len(opened) - num_read == 2, "written and read"
    assert num_read == 2


def test_what_is_more_than_pages_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of linear layers, layers of heads on the pages, parts of other ranks: the context is computed again."""
    asked, model = Asked(200, 1), pair("llama")[0]
    context = prompt(1, 200)
    assert Engine(hybrid()).engine.pages.wanted(context, "") is None
    with_head = Engine(model)
    with_head.engine.runner.cache.add_layers([LayerSpec(1, 8, 8)])
    assert with_head.engine.pages.wanted(context, "") is None
    source, text = served(model, asked)
    target = Engine(model)
    assert held_by(source, target, asked, text) == 4
    monkeypatch.setattr(pages_module, "RankRunner", ModelRunner)
    assert Engine(model).engine.pages.wanted(context, "") is None
    wanted = target.engine.pages.wanted(context, "")
    assert wanted is not None
    assert Engine(model).engine.pages.held(context, "", wanted.identity, 0) == []


def last_layer_changed() -> LoadedModel:
    """A checkpoint with one other number, which no key or value depends on."""
    model = copy.deepcopy(random_model("llama"))
    with torch.no_grad():
        model.get_output_embeddings().weight[17, 3] += 1e-3
    return prepare(model, compile=False)


def test_a_page_is_given_once_it_is_whole() -> None:
    """At every length of the context, for a router that knows more tokens than the target has computed."""
    model, asked = pair("llama")[0], Asked(100, 2)
    _, text = served(model, asked)
    source, target = Engine(model), Engine(model)
    source.open(asked.opened("s"))
    while source.engine.num_sessions:
        num_whole = source.engine.sessions["s"].num_computed // PAGE_SIZE
        assert held_by(source, target, asked, text) == num_whole
        source.step()


# -- mutants -----------------------------------------------------------------------------------------------------------


@mutant(PageStore, "read")
def the_order_of_pages_is_another(original: Any, *args: Any) -> list[bytes]:
    return original(*args)[::-1]  # type: ignore[no-any-return]


@mutant(pages_module, "fill_page")
def layers_are_swapped(original: Any, cache: Any, page: int, content: bytes) -> None:
    half = len(content) // 2
    original(cache, page, content[half:] + content[:half])


@mutant(PageStore, "held")
def the_first_page_comes_again(
    original: Any, store: Any, token_ids: Any, salt: str, identity: bytes, first: int
) -> Any:
    hashes = original(store, token_ids, salt, identity, 0)
    return [*hashes[:1], *hashes[:-1]][first:]


@mutant(PageStore, "exchange_identity")
def every_checkpoint_has_one_identity(original: Any, *args: Any) -> bytes:
    return b"the same"


@mutant(pages_module, "root_hash")
def the_salt_is_ignored(original: Any, salt: str, generation: int = 0) -> bytes:
    return original("mine", generation)  # type: ignore[no-any-return]


@mutant(TargetSession, "commit_rows")
def a_page_is_shared_before_its_last_row(original: Any, session: Any, cache: Any, num_computed: int) -> None:
    original(session, cache, num_computed)
    last = len(session.hashes)
    tokens = session.tokens[last * PAGE_SIZE : (last + 1) * PAGE_SIZE]
    if num_computed == (last + 1) * PAGE_SIZE - 1 and len(tokens) == PAGE_SIZE:
        cache.publish(session.pages[last], page_hash(session.hashes[-1] if last else session.root, tokens))


@pytest.mark.parametrize("wrong", [the_order_of_pages_is_another, layers_are_swapped, the_first_page_comes_again])
def test_wrong_contents_change_texts(wrong: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """In layers with a window, since others attend to all rows of whole pages in any order."""
    right = unmoved("windows")
    wrong(monkeypatch)
    texts, num_moved = moved(MODELS["windows"](), cuts(1))
    assert num_moved >= 10
    assert texts != right


def test_pages_of_another_checkpoint_change_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = pair("llama")[0], prepare(noisy_copy(random_model("llama"), 0.01), compile=False)
    right, num_moved = moved_from(model, other)
    assert num_moved == 0
    every_checkpoint_has_one_identity(monkeypatch)
    wrong, num_moved = moved_from(model, other)
    assert num_moved == 4
    assert wrong != right


def moved_from(model: LoadedModel, other: LoadedModel) -> tuple[list[int], int]:
    """The text of a session that goes on at ``model`` after one of ``other`` has computed the same context."""
    asked = Asked(290, 1)
    source, target = Engine(other), Engine(model)
    source.open(asked.opened("s"))
    source.finish()
    opened = asked.opened("s")
    num_moved = move(source.engine.pages, target.engine.pages, opened)
    target.open(opened)
    return target.finish()["s"], num_moved


def test_a_salt_that_is_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    the_salt_is_ignored(monkeypatch)
    with pytest.raises(AssertionError):
        test_pages_are_given_for_the_same_salt_alone()


def test_a_page_that_lacks_a_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    a_page_is_shared_before_its_last_row(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_page_is_given_once_it_is_whole()
