"""What a process counts: names, units, and that every event reaches every series that shows it."""

import contextlib
import dataclasses
import math
import pickle
import re
import time
import urllib.request

import pytest
import ray
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.fleet.fleets import Service, pools
from tests.metrics.test_page import page
from tests.support.vllm_metrics import ABSENT, BOARDS, CHOSEN, LABELLED

from paceline.cluster.first_node import start_ray
from paceline.cluster.ports import free_ports
from paceline.draft.stats import DraftStats
from paceline.metrics import catalogue, declaration, engines
from paceline.metrics import registry as registry_module
from paceline.metrics.declaration import CATALOGUE, Kind
from paceline.metrics.engines import declared, engine_counter
from paceline.metrics.registry import Registry
from paceline.metrics.replica import ReplicaMetrics
from paceline.metrics.router import RouterMetrics
from paceline.target.control.step_meter import STEP_SIZES, StepSizes, TargetStats
from paceline.types import Cause, FinishReason, ReplicaStatus, Result, Round, SpeculationStats, Timing, Usage

MODEL = "llama"
ENGINE = ("engine", "0")


def status(kind="target", incarnation=1, counters=None, **changes):
    fields = {"num_sessions": 3, "num_waiting": 1, "max_sessions": 8, "model": MODEL, **changes}
    return ReplicaStatus(f"{kind}-0", kind, incarnation, counters=counters or {}, **fields)


def result(finish_reason=FinishReason.STOP, prompt_tokens=7, cached_tokens=0):
    usage = Usage(prompt_tokens, 3, cached_tokens)
    timing = Timing(prefill_s=0.2, decode_s=1.0, tokens_per_s=2.0, queue_s=0.5)
    return Result("abc", (1, 2, 3), (0.0,) * 3, finish_reason, usage, SpeculationStats(), timing, seed=1)


def lines(registry):
    """Sample name and labels -> value, as a scrape of one process would show them."""
    text = generate_latest(registry).decode()
    samples = [sample for family in parse(text) for sample in family.samples]
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in samples}


class TestDeclarations:
    def test_every_name_is_valid_and_says_its_kind_and_unit(self):
        for name, metric in CATALOGUE.items():
            assert name == metric.name
            assert re.fullmatch(r"(vllm:|paceline_)[a-z0-9_]+", name)
            assert name.endswith("_total") == (metric.kind is Kind.COUNTER or metric is catalogue.ITERATION_TOKENS)
            assert metric.help.endswith(".")
            assert metric.unit in metric.documentation
            assert ("_seconds" in name) == (metric.unit == "seconds")
            assert bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM)
            assert list(metric.bounds) == sorted(set(metric.bounds))
            assert not metric.per_replica or metric.kind is Kind.GAUGE

    def test_a_name_cannot_be_declared_twice(self):
        with pytest.raises(AssertionError, match="twice"):
            declaration.declare(catalogue.DRAFTS)

    def test_every_name_of_vllm_is_exported_or_has_its_reason(self):
        own = {name.removeprefix("vllm:"): metric for name, metric in CATALOGUE.items() if name.startswith("vllm:")}
        absent = [name for names in ABSENT.values() for name in names]
        assert {*own, *absent} == LABELLED.keys()
        assert len(own) + len(absent) == len(LABELLED)
        for name, metric in own.items():
            assert {*LABELLED[name]} <= {*metric.labels, *dict(metric.constants)}, name
            assert metric.labels[0] == "model_name"

    @pytest.mark.parametrize("board", BOARDS)
    def test_every_query_of_vllms_boards_finds_its_series(self, board):
        samples = [sample for family in parse(page()) for sample in family.samples]
        absent = {name for names in ABSENT.values() for name in names}
        for series, labels in BOARDS[board].items():
            if series in absent:
                continue
            found = [sample.labels for sample in samples if sample.name == f"vllm:{series}"]
            assert found, series
            for each in found:
                assert {*labels} <= each.keys(), series
                assert each["engine"] == "0"
            for label in labels:
                assert CHOSEN.get((series, label), set()) <= {each[label] for each in found}

    def test_an_engine_counter_can_never_take_a_name_with_another_meaning(self):
        engine = set(engines.ENGINE_COUNTERS.values())
        others = [metric for metric in CATALOGUE.values() if metric not in engine]
        assert not [m.name for m in others if engines.ENGINE_COUNTER_NAME.fullmatch(m.name)]

    @pytest.mark.parametrize(("kind", "stats"), [("target", TargetStats), ("draft", DraftStats)])
    def test_each_field_of_an_engines_stats_has_a_declaration(self, kind, stats):
        fields = {field.name.removesuffix("_total") for field in dataclasses.fields(stats)}
        assert not fields - {field for of, field in engines.ENGINE_COUNTERS if of == kind}

    def test_a_declaration_is_found_by_the_name_of_its_series(self):
        for kind, field in [*engines.ENGINE_COUNTERS, ("target", "new_field"), ("draft", "wait_s")]:
            metric = engine_counter(kind, field)
            assert declared(metric.name) is not None
            assert declared(metric.name).labels == metric.labels
        assert engine_counter("target", "new_field").name == "paceline_target_new_field_total"
        assert declared("paceline_nothing") is None
        assert declared("python_info") is None


class TestRouter:
    def count(self, *rounds):
        registry = Registry()
        router = RouterMetrics(registry, MODEL)
        for stats, num_tokens, gap_s in rounds:
            router.round(stats, num_tokens, gap_s)
        return registry.samples()

    def test_rounds_count_as_vllm_counts_them(self):
        samples = self.count(
            (Round(0, 0, Cause.START), 1, None),
            (Round(4, 3, Cause.HIT), 4, 0.03),
            (Round(3, 0, Cause.HIT), 1, 0.03),
            (Round(0, 0, Cause.TOKEN), 1, 0.02),
        )
        assert samples[catalogue.DRAFTS.name] == {(MODEL,): 2}
        assert samples[catalogue.DRAFT_TOKENS.name] == {(MODEL,): 7}
        assert samples[catalogue.ACCEPTED_TOKENS.name] == {(MODEL,): 3}
        assert samples[catalogue.ACCEPTED_PER_POS.name] == {
            (MODEL, "0"): 1,
            (MODEL, "1"): 1,
            (MODEL, "2"): 1,
            (MODEL, "3"): 0,
        }
        assert samples[catalogue.GENERATION_TOKENS.name] == {(MODEL,): 7}
        gap = samples[catalogue.INTER_TOKEN.name][(MODEL,)]
        assert gap[0] == pytest.approx(0.08)
        assert gap[-1] == 3

    def test_rounds_by_cause_tokens_and_depth(self):
        samples = self.count(*((Round(5, 2, cause), 3, 0.01) for cause in Cause))
        assert samples[catalogue.ROUNDS.name] == {(cause.value,): 1 for cause in Cause}
        tokens = samples[catalogue.TOKENS_PER_VERIFICATION.name][()]
        assert tokens[0] == 3 * len(Cause)
        assert tokens[1 + catalogue.TOKENS_PER_VERIFICATION.bounds.index(2.0)] == 0
        assert tokens[1 + catalogue.TOKENS_PER_VERIFICATION.bounds.index(3.0)] == len(Cause)
        depth = samples[catalogue.AHEAD.name][()]
        assert depth[0] == 5  # the hit; the four misses had nothing, the others had no outcome to meet
        assert depth[1] == 4
        assert depth[-1] == 5

    def test_all_positions_can_be_accepted(self):
        samples = self.count((Round(16, 16, Cause.HIT), 17, 0.1))
        assert samples[catalogue.ACCEPTED_PER_POS.name] == {(MODEL, str(i)): 1 for i in range(16)}
        assert samples[catalogue.TOKENS_PER_VERIFICATION.name][()][-2:] == (1, 1)

    def test_requests(self):
        registry = Registry()
        router = RouterMetrics(registry, MODEL)
        router.admitted(0.004)
        router.first_token(0.3)
        router.finished(result(), 16)
        router.finished(result(FinishReason.ABORT, cached_tokens=4), 1000)
        router.failed("UNAVAILABLE")
        router.rejected("queue_full")
        router.rejected("queue_full")
        router.sessions(waiting=4, running=2, homeless=1)
        router.draft_replicas(2)
        seen = lines(registry)
        model = ("model_name", MODEL)
        assert seen["vllm:request_success_total", (ENGINE, ("finished_reason", "stop"), model)] == 1
        assert seen["vllm:request_success_total", (ENGINE, ("finished_reason", "abort"), model)] == 1
        assert seen["vllm:request_success_total", (ENGINE, ("finished_reason", "error"), model)] == 1
        assert seen["vllm:request_success_total", (ENGINE, ("finished_reason", "length"), model)] == 0
        assert seen["vllm:prompt_tokens_total", (ENGINE, model)] == 14
        assert seen["vllm:prompt_tokens_cached_total", (ENGINE, model)] == 4
        assert seen["vllm:prompt_tokens_by_source_total", (ENGINE, model, ("source", "local_compute"))] == 10
        assert seen["vllm:prompt_tokens_by_source_total", (ENGINE, model, ("source", "local_cache_hit"))] == 4
        assert seen["vllm:request_prefill_kv_computed_tokens_sum", (ENGINE, model)] == 10
        assert seen["vllm:request_prefill_kv_computed_tokens_bucket", (ENGINE, ("le", "5.0"), model)] == 1
        assert seen["vllm:admission_rejections_total", (ENGINE, model, ("reason", "max_num_queued_reqs"))] == 2
        assert seen["vllm:num_requests_waiting_by_reason", (ENGINE, model, ("reason", "capacity"))] == 4
        assert seen["vllm:num_requests_waiting_by_reason", (ENGINE, model, ("reason", "deferred"))] == 1
        assert seen["vllm:e2e_request_latency_seconds_sum", (ENGINE, model)] == pytest.approx(3.4)
        assert seen["vllm:request_params_max_tokens_sum", (ENGINE, model)] == 1016
        assert seen["vllm:request_params_max_tokens_bucket", (ENGINE, ("le", "20.0"), model)] == 1
        assert seen["vllm:request_max_num_generation_tokens_sum", (ENGINE, model)] == 6
        assert seen["vllm:request_queue_time_seconds_sum", (ENGINE, model)] == pytest.approx(0.004)
        assert seen["paceline_queue_seconds_bucket", (("le", "0.005"),)] == 1
        assert seen["paceline_queue_seconds_bucket", (("le", "0.0025"),)] == 0
        assert seen["vllm:time_to_first_token_seconds_count", (ENGINE, model)] == 1
        assert seen["paceline_requests_failed_total", (("reason", "UNAVAILABLE"),)] == 1
        assert seen["paceline_requests_rejected_total", (("reason", "queue_full"),)] == 2
        assert seen["vllm:num_requests_running", (ENGINE, model)] == 2
        assert seen["vllm:num_requests_waiting", (ENGINE, model)] == 5
        assert seen["paceline_sessions", (("state", "homeless"),)] == 1
        assert seen["paceline_draft_replicas_up", ()] == 2

    def test_faults(self):
        registry = Registry()
        router = RouterMetrics(registry, MODEL)
        router.dropped("malformed", 3)
        router.moved("failover")
        router.draft_reopened("lost")
        router.draft_link(0.0002)
        samples = registry.samples()
        assert samples[catalogue.DROPPED.name] == {("malformed",): 3, ("relay",): 0, ("unknown",): 0, ("states",): 0}
        assert samples[catalogue.MOVED.name] == {("failover",): 1, ("drain",): 0}
        assert samples[catalogue.REOPENED.name] == {("lost",): 1, ("opened",): 0}
        assert samples[catalogue.DRAFT_LINK.name][()][:4] == (0.0002, 0, 1, 1)

    def test_series_show_zero_before_the_first_event(self):
        samples = Registry().samples()
        assert samples == {}
        samples = self.count()
        assert samples[catalogue.DRAFTS.name] == {(MODEL,): 0}
        assert samples[catalogue.ROUNDS.name] == {(cause.value,): 0 for cause in Cause}


class TestReplica:
    def test_all_counters_of_the_engines_are_exported(self):
        for kind, stats in (("target", TargetStats()), ("draft", DraftStats())):
            registry = Registry()
            fields = {name: float(i + 1) for i, name in enumerate(dataclasses.asdict(stats))}
            ReplicaMetrics(registry).update(status(kind, counters=fields))
            samples = registry.samples()
            for field, value in fields.items():
                metric = engine_counter(kind, field)
                assert samples[metric.name] == {(MODEL,) if metric.labels else (): value}

    def test_steps_are_counted_by_their_rows(self):
        registry, replica, sizes = Registry(), None, StepSizes()
        replica = ReplicaMetrics(registry)
        for steps in ((1, 1, 9), (3, 16, 17), (), (20_000,)):
            for num_tokens in steps:
                sizes.add(num_tokens)
            replica.update(status(counters=sizes.counters()))
        seen, model = lines(registry), ("model_name", MODEL)
        by_bound = {
            b: seen["vllm:iteration_tokens_total_bucket", (ENGINE, ("le", b), model)] for b in ("1.0", "8.0", "16.0")
        }
        assert by_bound == {"1.0": 2, "8.0": 3, "16.0": 5}
        assert seen["vllm:iteration_tokens_total_bucket", (ENGINE, ("le", "16384.0"), model)] == 6
        assert seen["vllm:iteration_tokens_total_count", (ENGINE, model)] == 7
        assert seen["vllm:iteration_tokens_total_sum", (ENGINE, model)] == pytest.approx(20_047)
        replica.update(status(incarnation=2, counters={"steps_of:8": 1, "step_tokens_of:8": 4}))
        assert lines(registry)["vllm:iteration_tokens_total_count", (ENGINE, model)] == 8, (
            "a new process counts from zero"
        )
        assert catalogue.ITERATION_TOKENS.bounds == STEP_SIZES

    def test_the_cache_is_described_as_it_is_now(self):
        registry = Registry()
        replica = ReplicaMetrics(registry)
        for pages in (10, 10, 12):
            replica.update(status(kv_pages=pages))
        replica.update(status("draft", kv_pages=5))
        described = registry.samples()["vllm:cache_config_info"]
        assert described == {(MODEL, "64", "10"): 0, (MODEL, "64", "12"): 1}

    def test_special_names(self):
        registry = Registry()
        counters = {"preemptions": 2, "bubble_s": 1.5, "step_s": 3.0, "something_new": 4, "odd_total": 5}
        ReplicaMetrics(registry).update(status(counters=counters, kv_pages=10, kv_pages_used=4, draining=True))
        seen = lines(registry)
        assert seen["vllm:num_preemptions_total", (ENGINE, ("model_name", MODEL))] == 2
        assert seen["vllm:kv_cache_usage_perc", (ENGINE, ("model_name", MODEL))] == 0.4
        assert seen["paceline_verify_bubble_seconds_total", ()] == 1.5
        assert seen["paceline_target_step_seconds_total", ()] == 3.0
        assert seen["paceline_target_something_new_total", ()] == 4
        assert seen["paceline_target_odd_total", ()] == 5
        assert seen["paceline_replica_draining", (("kind", "target"),)] == 1
        assert seen["paceline_replica_sessions", (("kind", "target"),)] == 3

    @pytest.mark.parametrize(("verdict", "value"), [("yes", 1), ("no", 0), ("untested", None), ("", None)])
    def test_the_verdict_of_a_targets_self_test(self, verdict, value):
        registry = Registry()
        ReplicaMetrics(registry).update(status(batch_invariant=verdict))
        assert registry.samples().get(catalogue.BATCH_INVARIANT.name, {}).get((MODEL,)) == value

    @pytest.mark.parametrize(
        ("execution", "value"), [("compiled", 1), ("eager", 0), ("compiling", 0), ("failed", 0), ("", None)]
    )
    def test_a_model_is_compiled_or_eager(self, execution, value):
        registry = Registry()
        ReplicaMetrics(registry).update(status(execution=execution))
        assert registry.samples().get(catalogue.COMPILED.name, {}).get(("target",)) == value

    def test_a_controllers_measures_are_gauges(self):
        """A label follows a colon; what is unknown here, or has a label too many or too few, is left out."""
        registry = Registry()
        measures = {
            "state_slots": 40.0,
            "drafting": 1.0,
            "step_seconds:16": 0.05,
            "step_seconds": 1.0,
            "drafting:x": 2.0,
            "news": 3.0,
        }
        ReplicaMetrics(registry).update(status(measures=measures | {"state_slots": 40.0}))
        seen = lines(registry)
        assert seen["paceline_state_slots", ()] == 40
        assert seen["paceline_controller_drafting", ()] == 1
        assert seen["paceline_controller_step_seconds", (("tokens", "16"),)] == 0.05
        assert len([name for name, _ in seen if "controller" in name]) == 2

    def test_counters_grow_by_what_is_new_also_over_a_restart_of_the_engine(self):
        registry = Registry()
        replica = ReplicaMetrics(registry)
        for incarnation, rounds in ((1, 5), (1, 5), (1, 9), (2, 4), (2, 6), (3, 0), (3, 1), (4, 8)):
            replica.update(status(incarnation=incarnation, counters={"rounds": rounds}))
        assert registry.samples()["paceline_target_rounds_total"] == {(): 9 + 6 + 1 + 8}

    @pytest.mark.parametrize(("values", "total"), [((5, 2, 3), 8), ((5, 0, 3), 8), ((float("nan"), 4), 4)])
    def test_a_counter_that_falls_begins_anew(self, values, total):
        registry = Registry()
        replica = ReplicaMetrics(registry)
        for value in values:
            replica.update(status(counters={"rounds": value}))
        assert registry.samples()["paceline_target_rounds_total"] == {(): total}


class TestRegistry:
    def test_samples_are_small_and_picklable(self):
        registry = Registry()
        router = RouterMetrics(registry, MODEL)
        router.round(Round(8, 8, Cause.HIT), 9, 0.01)
        samples = registry.samples()
        assert pickle.loads(pickle.dumps(samples)) == samples
        assert len(pickle.dumps(samples)) < 8192

    def test_two_registries_do_not_share_anything(self):
        first, second = Registry(), Registry()
        RouterMetrics(first, MODEL).rejected("queue_full")
        RouterMetrics(second, MODEL)
        assert first.samples()[catalogue.REJECTED.name] == {("queue_full",): 1}
        assert second.samples()[catalogue.REJECTED.name] == {("queue_full",): 0}

    def test_outside_ray_there_is_no_mirror(self):
        registry = Registry("router-0", mirror=True)
        RouterMetrics(registry, MODEL).draft_link(0.1)
        registry.mirror(registry.samples())
        assert registry._mirror is None


class _FakeRay:
    """Stands in for ``ray.util.metrics``: as strict about names, tags and values, and remembers what was written."""

    def __init__(self):
        self.written = {}
        fake = self

        class Metric:
            def __init__(self, name, description, *rest):
                assert re.fullmatch(r"[a-zA-Z0-9_]+", name)
                assert not name.endswith("_total")
                self.name, self.keys = name, rest[-1]
                if len(rest) == 2:
                    assert rest[0]
                    assert all(bound > 0 for bound in rest[0])

            def record(self, value, tags):
                assert set(tags) == set(self.keys)
                assert all(isinstance(tag, str) for tag in tags.values())
                fake.written.setdefault((self.name, tuple(sorted(tags.items()))), []).append(value)

            set = observe = _record = record

            def inc(self, value, tags):
                assert value > 0
                self.record(value, tags)

        self.Counter = self.Gauge = self.Histogram = Metric


class TestMirror:
    @pytest.fixture
    def mirrored(self, monkeypatch):
        fake = _FakeRay()
        monkeypatch.setattr(registry_module, "inside_ray", lambda: True)
        monkeypatch.setattr(ray.util, "metrics", fake, raising=False)
        return Registry("router-0", mirror=True), fake

    def test_counters_go_to_ray_by_what_is_new(self, mirrored):
        registry, fake = mirrored
        router = RouterMetrics(registry, MODEL)
        tags = (("ReplicaId", "router-0"), ENGINE, ("model_name", MODEL))
        for num_drafted in (3, 4):
            router.round(Round(num_drafted, 1, Cause.HIT), 2, 0.1)
            registry.mirror(registry.samples())
        registry.mirror(registry.samples())
        assert fake.written["vllm_spec_decode_num_draft_tokens", tags] == [0, 3, 4]
        assert fake.written["vllm_inter_token_latency_seconds", tags] == [0.1, 0.1]
        assert registry.samples()[catalogue.DRAFT_TOKENS.name] == {(MODEL,): 7}
        assert registry.samples()[catalogue.INTER_TOKEN.name][(MODEL,)][-1] == 2

    def test_gauges_and_replicas(self, mirrored):
        registry, fake = mirrored
        RouterMetrics(registry, MODEL).sessions(1, 2, 0)
        ReplicaMetrics(registry).update(status(counters={"rounds": 3}))
        registry.mirror(registry.samples())
        assert fake.written["paceline_sessions", (("ReplicaId", "router-0"), ("state", "running"))] == [2]
        assert fake.written["paceline_target_rounds", (("ReplicaId", "router-0"),)] == [0, 3]

    def test_counters_of_known_labels_are_exported_before_their_first_event(self, mirrored):
        registry, fake = mirrored
        RouterMetrics(registry, MODEL)
        ReplicaMetrics(registry).update(status(counters={"preemptions": 0}))
        for _ in range(2):
            registry.mirror(registry.samples())
        zeros = {(name, *(value for key, value in tags if key != "ReplicaId")) for (name, tags) in fake.written}
        assert {
            ("paceline_requests_failed", "EngineError"),
            ("paceline_requests_failed", "RanksLostError"),
            ("paceline_requests_rejected", "queue_full"),
            ("paceline_sessions_reopened", "opened"),
            ("paceline_messages_dropped", "unknown"),
            ("vllm_request_success", "0", "error", MODEL),
            ("vllm_num_preemptions", "0", MODEL),
            ("paceline_rounds", "draft_down"),
        } <= zeros
        assert fake.written["vllm_num_preemptions", (("ReplicaId", "router-0"), ENGINE, ("model_name", MODEL))] == [
            0
        ]  # once

    def test_sizes_that_the_monitor_decides(self, mirrored):
        _, fake = mirrored
        quick = {"upscale_delay_s": 2.0, "downscale_delay_s": 6.0}
        service = Service(pools(draft=quick | {"min_replicas": 0, "max_replicas": 3}), num_drafts=0)
        service.seconds(8)
        wanted = fake.written["paceline_scaling_wanted_replicas", (("ReplicaId", "monitor"), ("pool", "draft"))]
        assert wanted[-1] == 0
        service.seconds(2, sessions=1, speculating=1)
        assert wanted[-1] == 1
        service.monitor.autoscaler.configure({"pools": {}, "max_sessions": 4})
        service.second()
        assert math.isnan(wanted[-1]), "somebody else decides"


@pytest.mark.ray
class TestRay:
    def test_the_exporter_of_ray_shows_the_same_totals(self, monkeypatch):
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        (port,) = free_ports(1)
        start_ray(num_cpus=1, include_dashboard=False, log_to_driver=False, _metrics_export_port=port)
        try:
            registry = Registry("router-0", mirror=True)
            router = RouterMetrics(registry, MODEL)
            for _ in range(3):
                router.round(Round(4, 2, Cause.HIT), 3, 0.02)
            registry.mirror(registry.samples())
            wanted = {
                "ray_vllm_spec_decode_num_accepted_tokens_total": 6,
                "ray_vllm_inter_token_latency_seconds_count": 3,
                "ray_paceline_requests_rejected_total": 0,  # before the first event
            }
            seen: dict[str, float] = {}
            deadline = time.monotonic() + 60
            while seen != wanted and time.monotonic() < deadline:
                time.sleep(0.5)
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
                    samples = [s for family in parse(reply.read().decode()) for s in family.samples]
                    seen = {
                        s.name: s.value
                        for s in samples
                        if s.name in wanted and s.labels.get("model_name", MODEL) == MODEL
                    }
            assert seen == wanted
        finally:
            ray.shutdown()
