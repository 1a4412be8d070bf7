"""Prompts of files in their forms, and the task groups of the held-out text."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.tokenizer import load_tokenizer
from paceline.embedded import TARGET_DIR
from paceline.errors import ConfigError
from paceline_bench.dataset import Question, read_questions
from paceline_bench.prompts import MAX_TOKENS, MIN_TOKENS, choose, held_out_prompts, held_out_texts
from paceline_bench.tasks import GROUPS, group_after, group_lines


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def test_three_forms(tmp_path: Path) -> None:
    file = write(
        tmp_path / "q.jsonl",
        {"prompt": "def", "max_tokens": 5},
        "",
        {"question_id": 81, "category": "writing", "turns": ["first", "second"], "reference": []},
        {"id": "x", "conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "hello"}]},
    )
    assert list(read_questions(file)) == [
        Question("q.jsonl:1", "def", "", 5),
        Question("q.jsonl:3", "first", "writing"),
        Question("q.jsonl:4", "hello"),
    ]
    assert [q.source for q in read_questions(file, ("writing",))] == ["q.jsonl:3"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not an object"),
        ({"text": "a"}, "none of the fields prompt, turns, conversations"),
        ({"prompt": "a", "turns": ["b"]}, "prompt and turns"),
        ({"prompt": 3}, '"prompt" needs some text, int is given'),
        ({"prompt": "  "}, '"prompt" needs some text'),
        ({"turns": []}, '"turns" needs a list of texts'),
        ({"turns": ["a", 1]}, '"turns" needs a list of texts'),
        ({"conversations": "a"}, "nothing is from human or user"),
        ({"conversations": [{"from": "gpt", "value": "a"}]}, "nothing is from human or user"),
        ({"conversations": [{"from": "human"}]}, '"from" and "value"'),
        ({"prompt": "a", "max_tokens": 1}, "max_tokens is 1"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens is True"),
        ({"prompt": "a", "category": 3}, "category is 3"),
    ],
)
def test_anything_else_is_refused_by_its_line(tmp_path: Path, line: Any, said: str) -> None:
    file = write(tmp_path / "q.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ConfigError) as error:
        list(read_questions(file))
    assert f"{file}:2" in str(error.value)
    assert said in str(error.value)


def test_the_same_seed_gives_the_same_prompts() -> None:
    tokenizer = load_tokenizer(str(TARGET_DIR))
    first, again, other = (held_out_prompts(tokenizer, 2, seed, "classes") for seed in (0, 0, 1))
    assert first == again != other


def test_categories_of_a_file_are_chosen_one_after_the_other(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(TARGET_DIR))
    lines = [{"prompt": f"x = {i}", "category": "ab"[i % 2]} for i in range(6)]
    file = write(tmp_path / "q.jsonl", *lines)
    chosen = choose(tokenizer, file, 2, ("b", "a"), 0)
    assert [(p.source, p.category) for p in chosen] == [
        ("q.jsonl:2", "b"),
        ("q.jsonl:4", "b"),
        ("q.jsonl:1", "a"),
        ("q.jsonl:3", "a"),
    ]
    assert chosen[0].token_ids == tokenizer.encode("x = 1")
    assert len(choose(tokenizer, file, None, (), 0)) == 6
    for wanted, count, said in ((("c",), None, "'c': at least one"), (("a",), 4, "--prompts asks for 4")):
        with pytest.raises(ConfigError, match=said):
            choose(tokenizer, file, count, wanted, 0)
    with pytest.raises(ConfigError, match="'poems'"):
        choose(tokenizer, None, 2, ("poems",), 0)
    with pytest.raises(ConfigError, match="cannot be read"):
        choose(tokenizer, tmp_path / "none", 2, (), 0)


MODULE = textwrap.dedent('''
    import os
    import sys

    SIZES = [
        1,
        20,
        300,
    ]

    class Box:
        """What holds
        things."""

        def open(self):
            # carefully
            return self

        x = define("a", 1)
        y = define("b", 2)
        z = define("c", 3)
''').lstrip()


def test_lines_are_told_apart_by_what_they_are() -> None:
    groups = group_lines(MODULE)
    named = dict(zip(MODULE.splitlines(), groups, strict=True))
    assert named["import os"] == "headers"
    assert named["    20,"] == "tables"
    assert named['    things."""'] == "comments"
    assert named["        # carefully"] == "comments"
    assert named["        return self"] == "classes"
    assert named['    y = define("b", 2)'] == "repetition"
    long = "def f(a):\n" + "".join(f"    a = g{i}(a) if a{'+1' * (i % 3)} else None\n" for i in range(30))
    assert group_lines(long).count("functions") + group_lines(long).count("repetition") == 31
    assert group_after(["classes"] * 3 + ["comments"] * 2, 0) == "classes"
    assert group_after(["classes"] * 2 + ["comments"] * 2, 0) == ""
    assert group_after(["classes"] * 3, 0) == "", "the text ends"


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_prompts_whose_next_lines_are_of_it(group: str) -> None:
    tokenizer = load_tokenizer(str(TARGET_DIR))
    found = held_out_prompts(tokenizer, 2, 0, group)
    texts = held_out_texts()
    for prompt in found:
        name, _, line = prompt.source.rpartition(":")
        after = int(line) - 1 + prompt.text.count("\n")
        assert texts[name].splitlines(keepends=True)[int(line) - 1 : after] == prompt.text.splitlines(keepends=True)
        assert group_after(group_lines(texts[name]), after) == prompt.category == group
        assert MIN_TOKENS <= len(prompt.token_ids) <= MAX_TOKENS
        assert prompt.token_ids == tokenizer.encode(prompt.text)
