"""What the rings of tests promise; the Makefile says what the rings are.

All tests that were collected are looked at, those of other rings included: ``make test`` collects all.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import COLLECTED, pytest_xdist_make_scheduler
from tests.support.rings import covering_pairs
from xdist.remote import WorkerInteractor

TESTS = Path(__file__).parent
MAKEFILE = TESTS.parent / "Makefile"
RINGS = ("gpu", "ray", "nightly", "slow", "tools")
"""The marks that decide, the strongest first; without any of them a test is in the fast ring."""

GUARDS = re.compile("mutant|caught|noticed")
"""In the name of a test: it shows that a check can fail."""
GUARDS_ELSEWHERE = {
    "bench/test_grow.py::test_a_norm_of_another_scale_is_caught": {"tools"},
    "bench/test_grow.py::test_an_added_layer_that_writes_is_caught": {"tools"},
    "bench/test_grow.py::test_an_added_neuron_that_writes_is_caught": {"tools"},
    "cluster/test_files.py::test_a_lost_node_is_noticed_soon_but_not_by_a_head_that_stands_still_for_some_seconds": {
        "tools"
    },
    "examples/test_site.py::test_a_broken_link_is_noticed": {"tools"},
    "k8s/test_image_steps.py::test_a_step_that_is_wrong_is_noticed": {"tools"},
    "k8s/test_manifests.py::test_a_gateway_that_would_end_streams_is_noticed": {"tools"},
    "k8s/test_manifests.py::test_another_order_of_leaving_is_noticed": {"tools"},
    "k8s/test_manifests.py::test_a_policy_without_one_of_them_is_noticed": {"tools"},
    "k8s/test_operator_rules.py::test_a_mutant_is_refused": {"tools"},
    "k8s/test_weights.py::test_one_option_with_two_values_is_noticed": {"tools"},
    "lossless/test_fuzz.py::test_a_mistake_is_noticed_and_shrunk": {"slow"},
    "lossless/test_hybrid_pool.py::test_wrong_states_of_the_target_are_noticed": {"slow", "nightly"},
    "lossless/test_methods.py::test_a_drafter_that_is_one_position_late_is_noticed": {"slow"},
    "lossless/test_rejection_law.py::test_a_wrong_q_is_caught": {"fast", "slow"},
    "model/attention/test_native.py::test_mutants_are_noticed": {"slow"},
    "model/compiled/test_blocks.py::test_scales_of_another_row_are_noticed": {"slow"},
    "model/parallel/test_linear.py::test_a_rank_that_copies_no_rows_is_noticed": {"nightly"},
    "model/parallel/test_one_shot.py::test_a_mutant_of_the_kernel_is_caught": {"slow"},
    "model/test_linear_native.py::test_mistakes_are_noticed": {"slow"},
    "model/test_quantized.py::test_verifying_with_another_copy_of_the_weights_is_caught": {"slow"},
    "plan/test_advice.py::test_a_forecast_that_forgets_what_drafting_costs_is_noticed": {"tools"},
    "runtime/test_ranks.py::test_a_rank_that_draws_by_another_seed_is_caught": {"slow"},
    "service/hostile/test_clients.py::test_a_host_that_waits_for_ever_is_caught": {"slow"},
    "service/hostile/test_clients.py::test_a_host_without_the_guard_is_caught": {"fast", "slow"},
    "service/hostile/test_drafts.py::test_a_tree_without_the_guard_is_caught": {"fast", "slow"},
    "target/test_branches.py::test_a_branch_at_a_shifted_row_is_caught": {"fast", "slow"},
    "target/test_branches.py::test_a_branch_at_a_shifted_row_is_caught_on_two_ranks": {"slow", "nightly"},
    "target/test_flight_ranks.py::test_tokens_of_another_step_or_session_are_caught": {"slow"},
    "target/control/test_session_gate.py::test_a_draft_that_has_become_good_is_noticed_by_short_sessions": {"slow"},
}
"""Outside the fast ring, as they compile a kernel, start processes or wait for a limit."""

MOST_CASES = 24
_FORMATS = "every published format"
_FORMS = "every form of calls and reasoning that models write"
_TABLE = "a table of sentences, each case another one, and none takes a tenth of a second"
_HYBRIDS = "every family of linear layers; all but a few are nightly"
_PRODUCT = "the full product; the fast and slow rings take cases that hold every pair of values"
MANY_CASES = {
    "checkpoint/test_gguf.py::test_every_number_format_that_the_package_decodes_is_read": "every format of numbers",
    "checkpoint/test_grammar.py::test_what_cannot_be_compiled_is_refused_with_the_place": _TABLE,
    "checkpoint/test_quantization.py::test_a_gpu_with_every_package_runs_what_transformers_loads": _TABLE,
    "checkpoint/test_quantization.py::test_what_is_missing_is_named": _TABLE,
    "cli/test_drafting.py::test_the_method_of_every_published_format_is_found": _FORMATS,
    "lossless/test_fuzz.py::test_many_random_sessions_have_the_tokens_of_plain_decoding": "parts of one long search",
    "client/test_requests.py::test_what_cannot_be_sent_is_refused_here": _TABLE,
    "core/test_verification.py::test_a_proposal_is_cut_before_a_q_that_cannot_be_trusted": "every way to be untrue",
    "drafters/test_head_formats.py::test_a_known_mistake_is_no_longer_what_the_oracle_computes": "every known mistake",
    "drafters/test_head_formats.py::test_every_published_format_loads_and_computes_what_the_oracle_computes": _FORMATS,
    "drafters/test_head_sessions.py::test_fed_in_any_chunks_on_any_pages_the_tree_is_that_of_one_forward": _FORMATS,
    "faults/test_links.py::test_one_kind_of_fault_on_one_link": "every fault on every link; half of them are nightly",
    "k8s/test_operator_rules.py::test_a_mutant_is_refused": "a mutant of every rule",
    "lossless/test_engines.py::test_alone_everywhere": _PRODUCT,
    "lossless/test_layer_kinds.py::test_any_subtrees_give_identical_tokens": _HYBRIDS,
    "lossless/test_layer_kinds.py::test_modes_give_identical_tokens": _HYBRIDS,
    "lossless/test_methods.py::test_a_cell_is_what_the_table_says": "the table; all but about 20 are nightly",
    "drafters/test_branch_rows.py::test_every_node_has_the_candidates_of_its_path": _HYBRIDS,
    "lossless/test_hybrids.py::test_a_draft_that_is_its_target_is_accepted": _HYBRIDS,
    "lossless/test_hybrids.py::test_drafts_that_lose_their_sessions_give_identical_tokens": _HYBRIDS,
    "lossless/test_hybrids.py::test_preempted_sessions_go_on_from_copies_of_their_states": _HYBRIDS,
    "model/attention/test_native.py::test_it_is_attention": _PRODUCT,
    "model/test_step_plan.py::test_a_sequence_that_does_not_fit_is_refused_with_its_value": _TABLE,
    "model/compiled/test_linear.py::test_every_number_of_rows_that_is_computed_together": "all but eight are nightly",
    "model/test_families.py::test_a_family_conforms_or_is_refused_with_the_reason": "all but eight are nightly",
    "model/parallel/test_linear.py::test_two_ranks_compute_what_one_does": _HYBRIDS,
    "model/test_linear.py::test_any_tree_has_the_bits_of_decoding": _HYBRIDS,
    "plan/test_closed_form.py::test_the_closed_form_is_the_simulation_at_one_session": _PRODUCT,
    "router/test_session_stories.py::test_whatever_happens_both_engines_know_what_the_session_knows": "every event",
    "rpc/test_generation.py::test_what_is_wrong_with_a_request": _TABLE,
    "rpc/test_streams.py::test_columns_that_do_not_fit_together_are_dropped_and_counted": "every column",
    "rpc/test_streams.py::test_malformed_to_target_is_dropped_and_counted": _TABLE,
    "target/control/test_allocation.py::test_the_choice_is_the_best_of_all": "all but twelve are nightly",
    "target/test_branches.py::test_rows_of_subtrees_have_the_bits_of_plain_decoding": "every kernel, family and dtype",
    "test_docs.py::test_a_page_is_true_of_the_tree": "one case per page",
    "test_layering.py::test_every_import_is_an_arrow_of_the_picture": "one case per module",
    "checkpoint/test_answer_formats.py::test_a_cut_answer_does_not_depend_on_its_pieces_and_invents_no_call": _FORMS,
    "checkpoint/test_answer_formats.py::test_each_form_is_read_by_tokens_and_by_text_in_whatever_pieces": _FORMS,
    "web/test_demanded_forms.py::test_arguments_of_json_come_in_pieces_that_say_the_same": _FORMS,
    "web/test_demanded_forms.py::test_marks_that_are_text_may_be_spelled_by_any_tokens": _FORMS,
    "web/test_demanded_forms.py::test_what_is_demanded_is_read_back_as_valid_calls": _FORMS,
    "web/test_errors.py::test_a_body_that_is_no_request_is_refused": _TABLE,
    "web/test_same_tokens.py::test_http_gives_the_tokens_of_grpc_and_of_the_pipeline": "mixed options, a case each",
}
"""Tests of more than MOST_CASES cases, and the reason."""

COMPARISONS = {
    "bench/test_load.py": 14,
    "draft/test_rejection.py": 4,
    "lossless/test_rejection_law.py": 12,
    "lossless/test_seeds.py": 12,
    "lossless/test_statistical.py": 20,
}
"""Modules of statistical tests, each with a FALSE_ALARM, and at most how many comparisons a run makes of each."""
OTHER_FALSE_ALARMS = 10 * 2e-9
"""Bounds of six standard deviations: in core/test_verification.py, and of noise in lossless/test_statistical.py."""


def name_of(item: pytest.Item) -> str:
    """The test without its case, its path below this folder."""
    return item.nodeid.partition("@")[0].partition("[")[0].removeprefix("tests/")


def ring_of(item: pytest.Item) -> str:
    return next((ring for ring in RINGS if item.get_closest_marker(ring)), "fast")


@pytest.fixture
def collected(request: pytest.FixtureRequest) -> list[pytest.Item]:
    return request.config.stash[COLLECTED]


def unexpected_rings(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Tests of a check that are in other rings than they should be."""
    return {
        name: rings
        for name, rings in found.items()
        if GUARDS.search(name.partition("::")[2]) and rings != GUARDS_ELSEWHERE.get(name, {"fast"})
    }


def test_every_mutant_is_in_the_fast_ring_or_listed_with_its_own(collected: list[pytest.Item]) -> None:
    rings: dict[str, set[str]] = defaultdict(set)
    for item in collected:
        rings[name_of(item)].add(ring_of(item))
    assert unexpected_rings(rings) == {}


def missed_by_the_makefile(ring: str, items: Iterable[pytest.Item]) -> list[str]:
    """Tests with the mark ``ring`` below none of the paths that the Makefile names for this ring."""
    paths = re.search(rf"^{ring.upper()}_TESTS := (.+)$", MAKEFILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert paths is not None
    known = (*paths[1].split(), "tests/metrics/test_metrics.py")
    return [item.nodeid for item in items if item.get_closest_marker(ring) and not item.nodeid.startswith(known)]


@pytest.mark.parametrize("ring", ["tools", "ray"])
def test_the_makefile_names_the_folders_of_all_tests_of_a_ring(ring: str, collected: list[pytest.Item]) -> None:
    assert missed_by_the_makefile(ring, collected) == []


def test_a_test_of_a_ring_in_another_folder_is_noticed() -> None:
    name = "tests/core/test_tree.py::test_it"
    item: Any = SimpleNamespace(nodeid=name, get_closest_marker=lambda mark: mark == "ray")
    assert missed_by_the_makefile("ray", [item]) == [name]
    item.nodeid = "tests/cluster/ray/test_app.py::test_it"
    assert missed_by_the_makefile("ray", [item]) == []


def test_a_mutant_in_another_ring_is_noticed() -> None:
    name = "model/test_quantized.py::test_verifying_with_another_copy_of_the_weights_is_caught"
    found = {name: {"nightly"}, "x.py::test_a_mutant": {"slow"}, "mutant.py::test_it": {"slow"}}
    assert unexpected_rings(found) == {name: {"nightly"}, "x.py::test_a_mutant": {"slow"}}
    assert unexpected_rings({name: {"slow"}, "x.py::test_a_mutant": {"fast"}}) == {}


def test_tests_of_one_group_run_in_one_process(request: pytest.FixtureRequest) -> None:
    """With pytest 9.2 or later, pytest-xdist 3.8 ignores groups: fixtures of seconds are then made in each process."""
    item = copy(request.node)
    item.add_marker(pytest.mark.xdist_group("of seconds"))
    options = SimpleNamespace(getvalue=lambda name: name == "loadgroup")
    WorkerInteractor.pytest_collection_modifyitems(None, options, [item])
    config: Any = SimpleNamespace(getvalue=lambda name: ["popen"])
    scope_of = pytest_xdist_make_scheduler(config, None)._split_scope
    assert scope_of(item.nodeid) == "of seconds"
    assert scope_of(request.node.nodeid) == "tests/test_rings.py"


def test_many_cases_have_a_reason(collected: list[pytest.Item]) -> None:
    counts = Counter(map(name_of, collected))
    assert {name for name, count in counts.items() if count > MOST_CASES} - MANY_CASES.keys() == set()
    known = {name.partition("::")[0] for name in counts}
    for name in (*MANY_CASES, *GUARDS_ELSEWHERE):
        if name.partition("::")[0] in known and len(known) > 1:
            assert name in counts, f"{name} is listed and does not exist"


def test_statistical_tests_raise_a_false_alarm_once_in_a_million_runs() -> None:
    """The seeds are fixed: this is the chance that other draws fail a right program."""
    total = OTHER_FALSE_ALARMS
    for path in TESTS.rglob("test_*.py"):
        module = path.relative_to(TESTS).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        rates = [
            node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and "FALSE_ALARM" in {target.id for target in node.targets if isinstance(target, ast.Name)}
        ]
        assert bool(rates) == (module in COMPARISONS) == uses_a_test_of_hypotheses(tree), module
        total += sum(rates) * COMPARISONS.get(module, 0)
    assert total <= 1e-6


def uses_a_test_of_hypotheses(tree: ast.Module) -> bool:
    """It imports the tests and quantiles of scipy."""
    imported: Iterable[str] = (
        f"{node.module}.{alias.name}" for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    )
    return any(name == "scipy.stats" or name.startswith("scipy.stats.") for name in imported)


CLOCKS = re.compile(r"\btime\.(perf_counter|monotonic|thread_time|process_time|time)(_ns)?\(\)")
WITH_SLACK = {"cluster/ray/test_failures.py": "a minute of slack: a stream that stands still for so long was lost"}


def judged_durations(source: str) -> list[int]:
    """Lines of assertions that judge a difference of a real clock."""

    def is_duration(node: ast.AST) -> bool:
        return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and bool(CLOCKS.search(ast.unparse(node)))

    lines = []
    for function in ast.walk(ast.parse(source if CLOCKS.search(source) else "")):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = [*ast.walk(function)]
        given = [node for node in nodes if isinstance(node, ast.Assign) and is_duration(node.value)]
        names = {ast.unparse(target) for node in given for target in node.targets}
        lines += [
            node.lineno
            for node in nodes
            if isinstance(node, ast.Assert)
            and any(is_duration(part) or ast.unparse(part) in names for part in ast.walk(node.test))
        ]
    return lines


def test_no_test_judges_how_long_something_takes_on_this_machine() -> None:
    assert judged_durations("def f():\n assert time.monotonic() - began < 1") == [2]
    assert judged_durations("def f():\n s = time.process_time() - began\n assert s < 1") == [3]
    assert judged_durations("def f():\n assert time.monotonic() < end") == []
    found = {path.relative_to(TESTS).as_posix(): judged_durations(path.read_text()) for path in TESTS.rglob("*.py")}
    assert {module: lines for module, lines in found.items() if lines}.keys() == WITH_SLACK.keys()


def test_chosen_cases_hold_every_pair_of_values() -> None:
    cases = [(a, b, c, d) for a in range(6) for b in "abcdefghijklm" for c in (0.0, 0.7, 1.0) for d in (True, False)]
    chosen = covering_pairs(cases)
    assert len(chosen) <= 90
    for i in range(4):
        for j in range(i):
            assert {(case[i], case[j]) for case in chosen} == {(case[i], case[j]) for case in cases}
