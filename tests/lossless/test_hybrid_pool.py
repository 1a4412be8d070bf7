"""Block drafters in the draft pool, for a target with linear layers, trained on its states and fed by them.

The text is that of plain decoding through rejections, subtrees, preemptions, prefix hits and migrations.
"""

from __future__ import annotations

import functools
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lossless.test_hybrids import _matches_without_states
from tests.lossless.test_methods import loaded, pump_of
from tests.lossless.test_trees import any_subtrees
from tests.model.families import checkpoint
from tests.model.test_linear import _states_of_speculated_rows
from tests.support.hybrids import hybrid_config, poison
from tests.support.models import letters_tokenizer
from tests.support.pump import Pump, Request, assert_continued, assert_same, plain_reference, requests_for
from tests.support.rings import nightly
from tests.support.training import options_for, silent

from paceline.checkpoint.files import Checkpoint
from paceline.config import ServiceConfig
from paceline.drafters.catalogue import method_named
from paceline.drafters.training.features import states
from paceline.drafters.training.options import HeadForm, Schedule
from paceline.drafters.training.run import train_head
from paceline.errors import EngineError
from paceline.messages import States
from paceline.model.loading import load_pretrained
from paceline.target.states_link import StatesLink

pytestmark = pytest.mark.slow

DEPTHS, LENGTH = 4, 40
METHODS = {"dflash": "DFlash, DFlash 2, in the pool", "dspark": "DSpark, in the pool"}
_MODEL = {"dtype": "float32", "device": "cpu"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-Next that likes to go on with the third next letter, so that a head can learn it in seconds."""
    folder, tokenizer = tmp_path_factory.mktemp("target"), letters_tokenizer()
    model = checkpoint(hybrid_config("qwen3_next", tie_word_embeddings=False))
    ids = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in string.ascii_lowercase]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
                weight *= 0.1
        embedding = model.get_input_embeddings().weight.normal_(generator=torch.Generator().manual_seed(0))
        rows = model.lm_head.weight.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.05)
        rows[ids[3:] + ids[:3]] = embedding[ids] / 8
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["dflash", *nightly(["dspark"])])
def head(target: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A head that was trained from nothing on the target's own states; its folder has the name of its method."""
    form = HeadForm(request.param, depths=DEPTHS, num_layers=1, num_anchors=16, boundaries=(1, 2), rank=8)
    out, schedule = tmp_path_factory.mktemp("head") / request.param, Schedule(160, batch_rows=4, learning_rate=4e-3)
    sizes = {"texts": 100, "rows": 64, "length": 40, "temperatures": (0.0, 1.0)}
    report = train_head(options_for(form, target, out, schedule, **sizes), silent)
    assert report.figures[0].greedy.accepted_per_round(DEPTHS) > 0.4
    return out


def requests_of(temperature: float, max_tokens: int = 24) -> dict[str, Request]:
    """Letters that end before, at and behind ends of chunks and pages; three share a page."""
    draw = random.Random(3)
    first = draw.choices(range(10, 36), k=64)
    lengths = [*((None, n) for n in (15, 16, 47, 63, 65, 79)), *((first, n) for n in (1, 5, 30))]
    prompts = [[*(shared or ()), *draw.choices(range(10, 36), k=length)] for shared, length in lengths]
    options = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}
    return requests_for(prompts, **options, max_draft_tokens=DEPTHS)


@functools.cache
def reference_of(target: Path, temperature: float) -> dict[str, Any]:
    return plain_reference(loaded(str(target), None), requests_of(temperature))


def pool_of(target: Path, head: Path, **options: Any) -> Pump:
    """The target, and the head in the draft pool, as a configuration of both makes them. Free slots hold NaN."""
    tree = method_named(METHODS[head.name]).configuration(str(target), str(head))
    tree["target_config"].setdefault("engine_kwargs", {})
    tree["target_config"]["engine_kwargs"] |= {**_MODEL, "compile": False, "batch_invariant": "off", "adaptive": True}
    tree["draft_config"].setdefault("engine_kwargs", {})
    tree["draft_config"]["engine_kwargs"] |= _MODEL
    pump = pump_of(method_named(METHODS[head.name]), ServiceConfig.parse(tree), **options)
    poison(pump.target.runner)
    return pump


def accepted(pump: Pump) -> tuple[int, int]:
    """Draft tokens that were accepted, and verified."""
    rounds = [result.speculation for result in pump.results.values()]
    return sum(one.accepted for one in rounds), sum(one.drafted for one in rounds)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trained_head_in_the_pool_is_fed_by_the_states_of_a_hybrid(
    temperature: float, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlapped, with subtrees. A second target goes on with what the first has generated, as after a migration."""
    any_subtrees(monkeypatch, most=6)
    requests, reference = requests_of(temperature), reference_of(target, temperature)
    pump = pool_of(target, head, pages=9)
    assert_same(pump.run(requests), reference)
    stats, (right, drafted) = pump.target.stats, accepted(pump)
    assert pump.draft is not None
    assert pump.draft.stats.states == stats.states_sent > 0
    assert stats.preemptions > 0
    assert drafted > right > (60 if temperature == 0 else 20)
    other = pool_of(target, head, pages=30)
    assert_continued(other, requests, reference, (1, 15, 16, 17, 5, 19, 2, 8, 20))
    assert accepted(other)[0] > 0
    before = other.target.stats.cached_tokens
    assert other.run({"again": requests["s8"]})["again"].token_ids == reference["s8"].token_ids
    assert other.target.stats.cached_tokens > before


@pytest.mark.parametrize("mutant", [_matches_without_states, _states_of_speculated_rows])
def test_wrong_states_of_the_target_are_noticed(
    mutant: Callable[[pytest.MonkeyPatch], None], target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_subtrees(monkeypatch, most=6)
    reference = reference_of(target, 1.0)
    mutant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, EngineError)):
        assert_same(pool_of(target, head, pages=9).run(requests_of(1.0)), reference)


def fed(pump: Pump, target: Path) -> float:
    """Runs two sessions; the largest difference of the states that the head is sent from what transformers' are fused
    to, where these are about 1."""
    sent: dict[tuple[str, int], torch.Tensor] = {}

    def record(message: Any) -> list[Any]:
        if isinstance(message, States):
            rows = torch.frombuffer(bytearray(message.packed), dtype=torch.bfloat16).view(-1, message.width)
            sent.update({(message.session_id, message.position + i): row for i, row in enumerate(rows)})
        return [message]

    pump.tamper_draft, link = record, pump.target.link
    assert link is not None
    requests = {name: request for name, request in requests_of(1.0).items() if name in ("s1", "s7")}
    results = pump.run(requests)
    model = load_pretrained(Checkpoint.open(str(target)), torch.float32).eval()
    worst = 0.0
    for name, request in requests.items():
        text = [*request.prompt, *results[name].token_ids]
        with torch.no_grad():
            rows = torch.cat(states(model, torch.tensor([text]), link.wanted.boundaries), -1)[0].float()
            own = link._fuse(rows)
        own = own / own.square().mean().sqrt()
        found = torch.stack([sent[name, at] for at in range(len(text) - 6)]).float()
        found = found / found.square().mean().sqrt()
        worst = max(worst, float((found - own[: len(found)]).abs().max()))
    return worst


def test_the_head_is_fed_the_states_of_every_position(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of transformers, to the bits that are sent of them; those of the position before are noticed."""
    assert fed(pool_of(target, head), target) < 0.05
    keep = StatesLink.keep
    monkeypatch.setattr(StatesLink, "keep", lambda self, of, states: keep(self, of, states.roll(1, 0)))
    assert fed(pool_of(target, head), target) > 1
