"""Cascades, heads in the pool and a draft whose place is chosen, through the real service: plain decoding's text.

``benchmarks/specs/methods-service.yaml`` does the same with every method, over more prompts.
"""

from __future__ import annotations

import pytest
from tests.cluster.ray.conftest import ON_RAY
from tests.support.local import plain_results

from paceline.client import Client
from paceline.drafters.catalogue import method_named
from paceline.embedded import DRAFT_DIR, HEAD_DIRS, TARGET_DIR
from paceline.types import Mode, Result, SamplingParams, SpeculationParams
from paceline_bench.processes import ServiceProcess

pytestmark = ON_RAY

MODEL = {"dtype": "float32", "device": "cpu", "compile": False}
PROMPTS = ("def read_file(path):", "import os\n\nclass Reader:\n    def __init__(self, path):\n        self.path = ")
WAITS = SpeculationParams(mode=Mode.SEQUENTIAL)
"""A draft is waited for, however busy this machine is."""


def configuration(name: str) -> dict:
    """That of docs/methods.md, with the checkpoints of the package, eager."""
    method = method_named(name)
    is_head = method.kind == "head"
    model = HEAD_DIRS[method.options["method"]] if is_head else DRAFT_DIR
    tree = method.configuration(str(TARGET_DIR), str(model))
    tree["target_config"]["engine_kwargs"] = MODEL | {"adaptive": False}
    if is_head:
        tree["draft_config"]["engine_kwargs"] |= {"dtype": "float32", "device": "cpu"}
    else:
        tree["draft_config"]["engine_kwargs"]["drafters"][0]["options"] = MODEL
    return tree


def pooled(result: Result) -> int:
    """Draft tokens of the draft in the pool."""
    return result.speculation.drafted - result.speculation.head_drafted


def prompts(max_tokens: int) -> list[tuple[str, SamplingParams]]:
    return [
        (prompt, SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, ignore_eos=True))
        for temperature in (0.0, 1.0)
        for seed, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["cascade, vertical", "EAGLE-3, in the pool"])
def test_a_drafter_of_the_pool_is_served_and_the_text_is_that_of_plain_decoding(name):
    asked = prompts(24)
    with ServiceProcess(configuration(name)) as service, Client(service.address) as client:
        results = [client.generate(prompt, sampling, speculation=WAITS).result for prompt, sampling in asked]
    assert [(r.token_ids, r.text) for r in results] == [(r.token_ids, r.text) for r in plain_results(TARGET_DIR, asked)]
    counted = [result.speculation for result in results]
    assert all(each.head_drafted == each.lookup_drafted == 0 for each in counted)
    assert 0 < sum(each.accepted for each in counted) < sum(each.drafted for each in counted)


def test_a_draft_model_whose_place_is_chosen_is_in_both_and_the_text_is_that_of_plain_decoding():
    tree = method_named("draft model, overlapped").configuration(str(TARGET_DIR), str(DRAFT_DIR))
    tree["target_config"]["engine_kwargs"] = MODEL
    tree["draft_config"]["engine_kwargs"] = MODEL | {"placement": "auto"}
    asked = prompts(64)
    with ServiceProcess(tree) as service, Client(service.address) as client:
        results = [client.generate(prompt, sampling, speculation=WAITS).result for prompt, sampling in asked]
        for _ in range(30):  # when a draft pays is the target's to judge: it may take several requests
            if any(pooled(result) for result in results):
                break
            results = [client.generate(*one, speculation=WAITS).result for one in asked]
        (target,) = client.server_info().pools["target"]
    assert [(r.token_ids, r.text) for r in results] == [(r.token_ids, r.text) for r in plain_results(TARGET_DIR, asked)]
    assert any(pooled(result) for result in results)
    assert "draft_model" in target.controller, "a head, too"
