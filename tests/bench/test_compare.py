"""``paceline bench compare``: its files, turns, texts, what fails, and standard errors."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tests.web.chats import save_chat

from paceline.checkpoint.chat import load_chat
from paceline.config import ServiceConfig
from paceline.drafters.catalogue import METHODS
from paceline.embedded import TARGET_DIR
from paceline.errors import ConfigError, EngineError
from paceline.types import Mode, SamplingParams, SpeculationParams
from paceline_bench.baselines import GenerateProcess, GenerateRequest
from paceline_bench.compare import made, run, table
from paceline_bench.compare.run import Found, Load
from paceline_bench.compare.spec import Arm, Spec, arm_of, read_spec
from paceline_bench.jobs import Job, Reply
from paceline_bench.records import RequestRecord, RoundRecord

SPECS = sorted((Path(__file__).parents[2] / "benchmarks" / "specs").glob("*.yaml"))
TREE = {
    "target_config": {
        "model_loading_config": {"model_id": "paceline/embedded-target"},
        "engine_kwargs": {"dtype": "float32", "compile": False},
    },
    "draft_config": None,
}


def spec_of(**fields: Any) -> Spec:
    own = {"target_config": {"engine_kwargs": {"max_sessions": 3}}}  # engines of its own
    arms = {"plain": {"requests": {"mode": "plain"}}, "own": own, "other": {"transformers": "lookup"}}
    given = {"configuration": TREE, "arms": arms, "baseline": "plain", "worker": "thread", "prompts": 2}
    return Spec.model_validate({**given, "temperatures": [0.0], "max_tokens": 4, **fields})


def arms_of(spec: Spec) -> list[Arm]:
    return [arm_of(spec, name, changes) for name, changes in spec.arms.items()]


class Engines:
    """In the place of engines: each arm answers at once with the same text, and says that it was asked."""

    def __init__(self, texts: dict[str, tuple[int, ...]] | None = None, failing: Sequence[str] = ()) -> None:
        self.asked: list[tuple[str, int]] = []
        self.salts: set[str] = set()
        self.sampling: list[SamplingParams] = []
        self._texts, self._failing = texts or {}, failing

    def open(self, arm: Arm, spec: Spec, stack: Any) -> run.Ask:
        if f"open {arm.name}" in self._failing:
            raise EngineError("it does not start")

        def ask(jobs: Sequence[Job], params: Any, salt: str) -> list[Reply]:
            self.asked.append((arm.name, jobs[0].sampling.max_tokens or 0))
            self.salts.add(salt)
            self.sampling += [job.sampling for job in jobs]
            if arm.name in self._failing:
                raise EngineError("ValueError: no such layers")
            rounds = (RoundRecord(0, 0, 1, "", 0.5), RoundRecord(4, 1, 3, "hit", 1.5))
            return [Reply.timed_by_rounds(self._texts.get(arm.name, (1, 2, 3, 4)), rounds) for _ in jobs]

        return ask


def measured(
    monkeypatch: pytest.MonkeyPatch, engines: Engines, spec: Spec
) -> tuple[dict[str, Found], list[str], run.Results]:
    """What each arm found under the first load, the lines of its table, and all results."""
    monkeypatch.setattr(run, "open_arm", engines.open)
    results = table.joined(run.compare(spec, arms_of(spec), lambda load, found: None), spec)
    (load, found), *_ = results.items()
    return {one.arm.name: one for one in found}, table.text(load, found, spec), results


def test_all_answer_a_unit_before_the_next_and_each_is_first_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, spec = Engines(), spec_of(cached=False, max_tokens=30)
    found, _, _ = measured(monkeypatch, engines, spec)
    settling, units = [name for name, n in engines.asked if n < 30], [name for name, n in engines.asked if n == 30]
    assert settling == ["plain", "own", "other"], "a short unit of each first, in no figure"
    assert units == ["plain", "own", "other", "own", "other", "plain"]
    assert [len(one.units) for one in found.values()] == [2, 2, 2]
    assert len(engines.salts) == 3, "no prompt is found in the cache"


def test_prompts_are_in_the_cache_before_a_unit_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    measured(monkeypatch, engines, spec_of(max_tokens=30))
    assert [name for name, n in engines.asked if n == 2] == ["plain", "own"] * 2


def test_an_arm_has_sampling_parameters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    arms = {"plain": {}, "form": {"sampling": {"structured_output": {"regex": "[ab]*"}}}}
    measured(monkeypatch, engines, spec_of(arms=arms, sampling={"top_p": 0.5}, max_tokens=30))
    assert {(job.top_p, job.ignore_eos, job.structured_output is None) for job in engines.sampling} == {
        (0.5, True, True), (0.5, False, False),
    }  # fmt: skip


def test_arms_of_one_configuration_share_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    arms = {"plain": {"requests": {"mode": "plain"}}, "own": {"requests": {"max_draft_tokens": 2}}}
    measured(monkeypatch, engines, spec_of(arms=arms, max_tokens=30))
    assert {name for name, _ in engines.asked} == {"plain"}


def test_groups_have_the_baseline_and_it_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    found, lines, _ = measured(monkeypatch, Engines(), spec_of(at_once=1))
    assert [len(found[name].units) for name in ("plain", "own", "other")] == [4, 2, 2]
    assert [line.split()[0] for line in lines[1:]] == ["plain", "own", "other"]


def test_prompts_are_questions_as_the_chat_template_renders_them(tmp_path: Path) -> None:
    """The file stands beside the comparison's own. Too few questions and a target without a template are refused."""
    (tmp_path / "asked.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "ba"}\n')
    folder = save_chat(tmp_path / "chat")
    loading = {"model_id": "own", "model_source": str(folder)}
    tree = {"target_config": {"model_loading_config": loading}, "draft_config": None}
    (tmp_path / "spec.yaml").write_text(
        yaml.safe_dump({"configuration": tree, "baseline": "plain", "arms": {"plain": {}}, "chats": "asked.jsonl"})
    )
    spec = read_spec(tmp_path / "spec.yaml", {}, {})
    (arm,), chat = arms_of(spec), load_chat(str(folder))
    assert chat is not None
    rendered = [
        chat.render([{"role": "user", "content": text}], None, {"add_generation_prompt": True}) for text in ("ab", "ba")
    ]
    assert [prompt.token_ids for prompt in run.prompts_of(arm, spec, 2)] == [chat.encode(text) for text in rendered]
    with pytest.raises(ConfigError, match=r"asked\.jsonl'?: it holds 2 questions, and 3 are needed"):
        run.prompts_of(arm, spec, 3)
    without = spec.model_copy(update={"configuration": TREE})
    with pytest.raises(ConfigError, match="has no chat template, which is needed to render"):
        run.prompts_of(arms_of(without)[0], without, 1)


def test_a_service_takes_no_defaults_of_the_checkpoint_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as top_p: its texts at a temperature would be others than those of the engines in this process."""
    started, servers = list[dict[str, Any]](), list[Any]()

    @contextlib.contextmanager
    def service(tree: dict[str, Any], *, server: dict[str, Any] | None) -> Iterator[Any]:
        started.append(tree)
        servers.append(server)
        yield SimpleNamespace(address="localhost:1")

    monkeypatch.setattr(run, "ServiceProcess", service)
    tls = {"certificate": "cert.pem", "key": "key.pem"}
    arm = Arm("served", {**TREE, "server": {"tls": tls}}, SpeculationParams(), service=True)
    with contextlib.ExitStack() as stack:
        run.open_arm(arm, spec_of(), stack)
    assert ServiceConfig.parse(started[0]).router_config.generation_config == "none"
    assert servers == [{"tls": tls}]


def test_another_text_than_the_baselines_is_counted_and_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found, lines, results = measured(monkeypatch, Engines({"own": (1, 2, 3, 9)}), spec_of())
    assert found["own"].different == 2
    assert lines[-1] == "own: 2 texts differ from plain's"
    assert table.is_wrong(results)
    found, _, results = measured(monkeypatch, Engines({"other": (9,)}), spec_of())
    assert found["other"].different == 0, "transformers may write another text"
    assert not table.is_wrong(results)
    arms = {"plain": {}, "own": {"equal": False, "target_config": {"engine_kwargs": {"max_sessions": 3}}}}
    found, _, results = measured(monkeypatch, Engines({"own": (9,)}), spec_of(arms=arms))
    assert found["own"].different == 0, "and an arm of which the file says so"


@pytest.mark.parametrize("failing", ["other", "open other"])
def test_what_another_server_cannot_do_is_its_own_sentence(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, lines, results = measured(monkeypatch, Engines(failing=[failing]), spec_of())
    assert [line.split() for line in lines if line.startswith("other ")] == [["other", *"-----"]]
    assert lines[-1].startswith("other: ")
    assert not table.is_wrong(results)


def test_our_arms_must_work_and_the_baseline_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert table.is_wrong(measured(monkeypatch, Engines(failing=["own"]), spec_of())[2])
    with pytest.raises(EngineError, match="no such layers"):
        measured(monkeypatch, Engines(failing=["plain"]), spec_of())


def records(*requests: tuple[float, Sequence[tuple[int, int, int]]]) -> list[list[RequestRecord]]:
    """Units of one request each: seconds of decoding, and (drafted, accepted, tokens) of the rounds after the first."""
    made_records = []
    for seconds, rounds in requests:
        first = RoundRecord(0, 0, 1, "", 0.0)
        later = tuple(RoundRecord(d, a, n, "", seconds) for d, a, n in rounds)
        tokens = (0,) * (1 + sum(n for _, _, n in rounds))
        record = RequestRecord("m", "plain", 0, 0.0, 0, 0, "", 0, tokens, 0.0, seconds, (first, *later))
        made_records.append([record])
    return made_records


def test_a_row_has_its_rate_and_the_ratio_to_the_baseline_in_the_same_turns() -> None:
    spec = spec_of(best_of="own")
    plain, own = (Found(arm) for arm in arms_of(spec)[:2])
    plain.units = records((1.0, [(0, 0, 1)] * 10), (3.0, [(0, 0, 1)] * 10))
    own.units = records((1.0, [(2, 1, 2)] + [(0, 0, 2)] * 4), (1.0, [(4, 3, 3)] + [(0, 0, 3)] * 4))
    own.baseline = plain.units
    first, second = table.rows_of([plain, own], spec)
    # (1 + 3) / (2 + 4); its residuals are -1/3 and 1/3: sqrt(2 * 2/9) / 6. So for (10 + 15) / (5 + 5).
    assert second[3:5] == ("0.667 +- 0.111", "2.500 +- 0.500")
    assert (second[1], second[2].partition(" ")[0]) == ("12.5", "2.500")
    assert first[1:5] == ("5.0", "1", "-", "1.000 +- 0.000")
    name, ratio = table.over_best([plain, own], spec) or ("", None)
    assert name == "plain"
    assert ratio is not None
    assert ratio.value == pytest.approx(2.5)


@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_every_file_is_read_and_its_arms_are_configurations(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(path, {}, {"prompts": 3})
    assert spec.prompts == 3
    monkeypatch.setattr(made, "model_of", lambda method, spec, folder: "m" if method.reads else None)
    monkeypatch.setattr(made, "install_example", lambda folder: None)
    for arm in [*arms_of(spec), *made.method_arms(spec, Path("unused"))]:
        ServiceConfig.parse(arm.tree)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"baseline": "none"}, "baseline is 'none': use one of plain, own"),
        ({"best_of": "none"}, "best_of is 'none'"),
        ({"sessions": [1], "prompt": 3}, "prompt"),
        ({"arms": {"plain": {}, "own": {"transformers": "magic"}}}, "arms.own.transformers is 'magic': use one of"),
        ({"arms": {"plain": {}, "own": {"peer": "vllm"}}}, "arms.own.peer is 'vllm': it has the form ENGINE=PYTHON"),
        ({"arms": {"plain": {}, "own": {"requests": {"mode": "fast"}}}}, "arms.own.requests"),
        ({"arms": {"plain": {}, "own": {"requests": 3}}}, "arms.own.requests is 3: it holds"),
        ({"arms": {"plain": {}, "own": {"sampling": {"top_p": 2}}}}, "arms.own.sampling: .*top_p"),
        ({"arms": {"plain": {}, "own": {"equal": "no"}}}, "arms.own.equal is 'no': use true or false"),
        ({"arms": {"plain": {}, "own": {"draft_delay_s": "long"}}}, "arms.own.draft_delay_s is 'long': use seconds"),
        ({"arms": {"plain": {}, "own": {"settle_s": float("inf")}}}, "arms.own.settle_s is inf: use seconds"),
    ],
)
def test_a_wrong_file_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    arms = {"plain": {}, "own": {}}
    file = tmp_path / "spec.yaml"
    file.write_text(
        yaml.safe_dump({"configuration": TREE, "arms": arms, "baseline": "plain", **change}, sort_keys=False)
    )
    with pytest.raises(ConfigError, match=message):
        arms_of(read_spec(file, {}, {}))


def test_an_unknown_variable_is_refused() -> None:
    (controller,) = (path for path in SPECS if path.stem == "controller")
    with pytest.raises(ConfigError, match=r"--set sise=1M: .* has the variables size, draft, delay_s, compile"):
        read_spec(controller, {"sise": "1M"}, {})
    arms = {arm.name: arm for arm in arms_of(read_spec(controller, {"delay_s": ".inf"}, {}))}
    assert arms["auto"].draft_delay_s == float("inf")
    assert arms["plain"].params.mode is Mode.PLAIN


def test_a_draft_that_is_too_slow_or_dead_changes_no_text() -> None:
    tree = {**TREE, "draft_config": {"model_loading_config": {"model_id": "paceline/embedded-draft"}}}
    arms = {"plain": {"requests": {"mode": "plain"}}, "slow": {"draft_delay_s": 0.01}, "dead": {"draft_delay_s": 1e999}}
    spec = spec_of(configuration=tree, arms=arms, prompts=1, max_tokens=8)
    results = run.compare(spec, arms_of(spec), lambda load, found: None)
    plain, slow, dead = results[Load(1, 0.0)]
    assert (slow.different, dead.different) == (0, 0)
    assert len(plain.units[0][0].token_ids) == 8


def test_every_method_that_reads_weights_has_some(tmp_path: Path) -> None:
    kinds = {str(method.options.get("method", method.kind)) for method in METHODS if method.needs_model}
    for kind in kinds:
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "report.json").touch()
    spec = spec_of(methods={"heads": str(tmp_path)})
    models = {method.name: made.model_of(method, spec, tmp_path) for method in METHODS if method.reads}
    assert [name for name, model in models.items() if model is None] == ["Gemma 4's drafter"]
    (tmp_path / "eagle" / "report.json").unlink()
    with pytest.raises(ConfigError, match="holds no trained eagle"):
        made.model_of(next(m for m in METHODS if m.name == "EAGLE"), spec, tmp_path)
    without = spec_of(methods={})
    assert made.model_of(next(m for m in METHODS if m.name == "EAGLE"), without, tmp_path) is None


def test_an_unknown_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"methods\.names holds 'magic'"):
        made.method_arms(spec_of(methods={"names": ["magic"]}), tmp_path)


def test_models_are_made_where_a_configuration_names_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(made._MAKERS, "random", lambda folder, model: f"{folder.name} of {model}")
    tree = {"a": [{"model": "random:x/y"}], "b": "paceline/embedded-target", "c": 3, "d": "http://x:1"}
    assert made.with_models(tree, tmp_path) == {**tree, "a": [{"model": "random-x-y of x/y"}]}
    with pytest.raises(ConfigError, match="'grown:much:x' cannot be made"):
        made.with_models("grown:much:x", tmp_path)


def test_transformers_own_methods_write_its_own_text(tmp_path: Path) -> None:
    other = made.other_vocabulary(tmp_path / "other", 3000)
    with GenerateProcess(str(TARGET_DIR), other, "float32", None) as process:
        replies = {}
        for mode in ("transformers", "universal", "early_exit"):
            (replies[mode],) = process.generate(GenerateRequest(mode, ((10, 20, 30, 40, 50),), (12,), 0.0, 0))
        assert {reply.token_ids for reply in replies.values()} == {replies["transformers"].token_ids}
        assert len(replies["transformers"].rounds) == 12
        assert len(replies["early_exit"].rounds) < 12
        with pytest.raises(EngineError, match="ValueError: Could not find `num_mtp_layers` in the model config"):
            process.generate(GenerateRequest("mtp", ((10, 20, 30, 40, 50),), (12,), 0.0, 0))
