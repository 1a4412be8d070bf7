"""lm-eval: tasks of log-likelihood and of generated text, with the server's tokenizer."""

from __future__ import annotations

import json

import lm_eval
import pytest

from conftest import MODEL, URL

ROWS = [{"text": "The model reads", "choices": [" a book", " zebra crossing"], "answer": 0} for _ in range(3)]


@pytest.fixture
def task(tmp_path):
    """The settings of a task whose data are in a file."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return {
        "task": "rows",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }


def evaluated(task, **options):
    given = {"model": MODEL, "base_url": f"{URL}/v1/completions", "num_concurrent": 1, "max_retries": 1}
    return lm_eval.simple_evaluate(
        model="local-completions",
        model_args={**given, "tokenizer_backend": "remote", "tokenized_requests": True, **options},
        tasks=[task],
        bootstrap_iters=0,
    )["results"]["rows"]


def test_choices_are_told_apart_by_their_log_likelihoods(task):
    kind = {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "answer"}
    found = evaluated({**task, **kind, "metric_list": [{"metric": "acc"}]})
    assert found["acc,none"] == 1.0


def test_text_is_generated_until_a_stop_string(task):
    kind = {"output_type": "generate_until", "generation_kwargs": {"until": ["."], "max_gen_toks": 12}}
    found = evaluated({**task, **kind, "doc_to_target": "{{choices[0]}}", "metric_list": [{"metric": "exact_match"}]})
    assert 0 <= found["exact_match,none"] <= 1
