"""Every family that transformers has a tensor-parallel plan for: what it does with us, or why it is refused."""

import re
from pathlib import Path

import pytest
import transformers
from tests.model.conformance import DOCS, Result, count, examine
from tests.model.families import (
    EXCLUDED,
    MAX_PARAMETERS,
    WHOLE_ONLY,
    Case,
    cases,
    checkpoint,
    family_names,
    small_config,
)
from tests.model.parallel.ranks import Ranks
from tests.support.rings import nightly, slow

from paceline.checkpoint.size import size_of
from paceline.errors import ConfigError
from paceline.model.loading import prepare
from paceline.model.parallel.plan import plan_shards

FAST = {"llama", "doge"}
"""One that conforms and one that is refused."""
EACH_KIND = {"gemma2", "gemma3_text", "mixtral", "gpt_oss, our plan", "llama4_text", "deepseek_v32"}
"""One family of each other kind of attention, for the slow ring; the nightly ring runs all."""
README = DOCS.parents[1] / "README.md"


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in cases() if case.name in FAST),
        *slow(case for case in cases() if case.name in EACH_KIND),
        *nightly(case for case in cases() if case.name not in FAST | EACH_KIND),
    ],
    ids=lambda case: case.name,
)
def test_a_family_conforms_or_is_refused_with_the_reason(case: Case, two: Ranks, tmp_path: Path) -> None:
    """Tokens and logits against transformers, two ranks against one process: see ``conformance.py``."""
    check_expected(examine(case, two, tmp_path))


def check_expected(result: Result) -> None:
    """Refused where it is expected, with that reason, and nowhere else."""
    for reason, expected in ((result.refused, EXCLUDED), (result.refused_ranks, WHOLE_ONLY)):
        if result.name in expected:
            assert re.search(expected[result.name], reason), f"{result.name}: {reason or 'works'}"
        else:
            assert not reason


@pytest.mark.parametrize("degree", [*slow([3]), *nightly([4])])
def test_other_degrees_are_planned_whole_or_refused_with_those_that_work(degree: int) -> None:
    """Without a process: the ranks hold every row of every parameter, those of repeated KV heads more than once."""
    planned, refused = 0, []
    for family in family_names():
        if family in EXCLUDED:
            continue
        try:
            plans = [plan_shards(small_config(family), rank, degree) for rank in range(degree)]
        except ConfigError as error:
            refused.append(str(error))
            continue
        planned += 1
        for name, shard in plans[0].parameters.items():
            if shard.dim is not None:
                rows = {row for plan in plans for part in plan.parameters[name].parts for row in range(*part)}
                assert rows == {*range(shard.shape[shard.dim])}, name
    assert planned > (40 if degree == 4 else 0)
    for reason in refused:
        found = re.search(r": use (?:degree )?(1(?:, \d+)*)$", reason)
        assert found, reason
        assert str(degree) not in found[1].split(", "), reason


def test_what_every_family_keeps_per_token_is_known_by_its_configuration() -> None:
    """``paceline check`` counts with it."""
    served = [case for case in cases() if case.name not in EXCLUDED]
    assert [case.name for case in served if not size_of(case.config().to_dict(), 0, 2).kv_values] == []


def test_layers_of_several_sizes_are_counted() -> None:
    """Gemma 4 as it is published: of six layers one has no window, and fewer and wider heads."""
    gemma = {"model_type": "gemma4_text", "num_hidden_layers": 6, "hidden_size": 5376, "num_attention_heads": 32}
    gemma |= {"num_key_value_heads": 16, "head_dim": 256, "global_head_dim": 512}
    gemma |= {"num_global_key_value_heads": 4, "attention_k_eq_v": True}
    assert size_of(gemma, 0, 2).kv_values == 5 * 2 * 16 * 256 + 2 * 4 * 512


@pytest.mark.parametrize(
    "names",
    [
        ("gemma4_text", "gemma4_unified_text", "mimo_v2_flash", "dots3_note_text"),
        *nightly([(tuple(case.name for case in cases() if case.name not in EXCLUDED),)]),
    ],
    ids=["several sizes", "all"],
)
def test_the_configuration_says_what_the_loaded_model_keeps_per_token(names: tuple[str, ...]) -> None:
    found = {}
    for case in cases():
        if case.name in names:
            config = case.config()
            loaded = prepare(checkpoint(config), compile=False)
            found[case.name] = size_of(config.to_dict(), 0, 2).kv_values, loaded.size.kv_values
    assert len(found) == len(names)
    assert {name: both for name, both in found.items() if both[0] != both[1]} == {}


def test_the_tables_name_families_and_variants_only() -> None:
    """And none twice."""
    names = [case.name for case in cases()]
    assert len({*names}) == len(names) > 100
    assert {*EXCLUDED, *WHOLE_ONLY, *FAST, *EACH_KIND} <= {*names}
    assert not EXCLUDED.keys() & WHOLE_ONLY.keys()


def test_a_large_configuration_is_refused_before_it_takes_memory() -> None:
    """Counted on the meta device."""
    with pytest.raises(AssertionError, match=r"llama would have \d+ parameters"):
        small_config("llama", hidden_size=8192, intermediate_size=MAX_PARAMETERS)


def rows_of(page: str, heading: str) -> dict[str, list[str]]:
    """The cells of a table by the first of them."""
    part = page.partition(heading)[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return {cells[0]: cells for cells in rows if cells[0] != "family"}


def test_the_page_says_what_is_expected() -> None:
    """docs/families.md and the README: the same families, refusals and numbers as here."""
    page = DOCS.read_text(encoding="utf-8")
    assert f"transformers {transformers.__version__}," in page, "run python -m tests.model.conformance"
    works, refused = rows_of(page, "# Model families"), rows_of(page, "## Refused")
    assert [*works] == [case.name for case in cases() if case.name not in EXCLUDED]
    assert refused.keys() == EXCLUDED.keys() | WHOLE_ONLY.keys()
    for name, (_, degree, reason) in refused.items():
        assert re.search((EXCLUDED | WHOLE_ONLY)[name], reason)
        assert degree == ("any" if name in EXCLUDED else "2")
    assert {name for name, cells in works.items() if "refused" in cells} == WHOLE_ONLY.keys()
    for name, cells in works.items():
        for verdict in cells[5:7]:
            assert verdict == "yes" or re.fullmatch(r"[1-9]\d* of \d+", verdict), f"{name}: {verdict}"
    planned = family_names()
    counts = count(
        [Result(name, "", refused=EXCLUDED.get(name, ""), refused_ranks=WHOLE_ONLY.get(name, "")) for name in planned]
    )
    said = f"Of {len(planned)} families {counts['one']} work at degree 1 and {counts['two']} at degree 2"
    assert said in page
    assert said in README.read_text(encoding="utf-8")
