"""The fleet's sums: each event once, whatever becomes of the processes and of their reports."""

import copy
import pickle
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse
from tests.support.fakes import Clock

from paceline.fleet.monitor import Monitor
from paceline.fleet.report import Report, Reporter
from paceline.metrics import catalogue
from paceline.metrics.engines import declared
from paceline.metrics.registry import Registry
from paceline.metrics.replica import ReplicaMetrics
from paceline.metrics.router import RouterMetrics
from paceline.types import Cause, ReplicaStatus, Round, RouterView

MODEL = "llama"


class Process:
    """A router or replica that counts and reports; ``restart`` begins a new incarnation from zero."""

    def __init__(self, source_id, kind="router"):
        self.source_id, self.kind, self.incarnation = source_id, kind, 0
        self.restart()

    def restart(self):
        self.incarnation += 1
        self.registry = Registry(self.source_id)
        self.router = RouterMetrics(self.registry, MODEL) if self.kind == "router" else None
        self.replica = ReplicaMetrics(self.registry)
        self.reporter = Reporter(self.source_id, self.kind, self.registry)

    def report(self, counters=None, **facts):
        facts = {"num_sessions": 1, "num_waiting": 0, "max_sessions": 8, "model": MODEL, **facts}
        status = ReplicaStatus(self.source_id, self.kind, self.incarnation, counters=counters or {}, **facts)
        if self.kind != "router":
            self.replica.update(status)
        return self.reporter.report(status)


def scrape(monitor):
    """Sample name and labels -> value; no series twice."""
    samples = {}
    for family in parse(monitor.exposition()):
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples
            samples[key] = sample.value
    return samples


def bench_serve_counters(text):
    """As ``vllm bench serve`` scrapes: every ``vllm:spec_decode*_total``, summed over all label sets."""
    totals, per_pos = {}, {}
    for line in text.splitlines():
        if not line.startswith("vllm:spec_decode"):
            continue
        name, value = line.split("{")[0].split(" ")[0], float(line.split()[-1])
        if not name.endswith("_total"):
            continue
        totals[name] = totals.get(name, 0.0) + value
        if position := re.search(r'position="(\d+)"', line):
            per_pos[int(position[1])] = per_pos.get(int(position[1]), 0.0) + value
    return totals, per_pos


class TestSums:
    def test_counters_and_histograms_are_summed(self):
        monitor, processes = Monitor(), [Process("router-0"), Process("router-1")]
        for i, process in enumerate(processes):
            process.router.round(Round(4, 2 + i, Cause.HIT), 3 + i, 0.02)
            monitor.push(pickle.loads(pickle.dumps(process.report())))
        seen = scrape(monitor)
        assert seen["vllm:spec_decode_num_accepted_tokens_total", (("engine", "0"), ("model_name", MODEL))] == 5
        assert seen["paceline_rounds_total", (("cause", "hit"),)] == 2
        assert seen["paceline_tokens_per_verification_sum", ()] == 7
        assert seen["paceline_tokens_per_verification_count", ()] == 2
        assert seen["paceline_tokens_per_verification_bucket", (("le", "3.0"),)] == 1
        assert seen["paceline_tokens_per_verification_bucket", (("le", "+Inf"),)] == 2

    def test_what_vllm_bench_serve_reads(self):
        monitor, processes = Monitor(), [Process("router-0"), Process("router-1")]
        for process in processes:
            process.router.round(Round(4, 3, Cause.HIT), 4, 0.02)
            process.router.round(Round(4, 1, Cause.HIT), 2, 0.02)
            process.router.round(Round(0, 0, Cause.TOKEN), 1, 0.02)
            monitor.push(process.report())
        totals, per_pos = bench_serve_counters(monitor.exposition())
        assert totals == {
            "vllm:spec_decode_num_drafts_total": 4,
            "vllm:spec_decode_num_draft_tokens_total": 16,
            "vllm:spec_decode_num_accepted_tokens_total": 8,
            "vllm:spec_decode_num_accepted_tokens_per_pos_total": 8,
        }
        assert per_pos == {0: 4, 1: 2, 2: 2, 3: 0}

    def test_names_are_exactly_those_declared(self):
        monitor = Monitor()
        router, target = Process("router-0"), Process("target-0", "target")
        router.router.round(Round(1, 1, Cause.HIT), 2, 0.1)
        monitor.push(router.report())
        monitor.push(target.report({"rounds": 3, "new_field": 1}, kv_pages=4))
        text = monitor.exposition()
        types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        for name, kind in types.items():
            assert declared(name) is not None
            assert declared(name).kind == kind
        assert "paceline_target_new_field_total" in types
        assert types.keys() == set(re.findall(r"^# HELP (\S+)", text, re.MULTILINE))
        assert "_created" not in text

    def test_label_values_are_escaped(self):
        monitor, process = Monitor(), Process("router-0")
        reason = 'a "quoted"\\\nreason'
        process.router.rejected(reason)
        monitor.push(process.report())
        assert scrape(monitor)["paceline_requests_rejected_total", (("reason", reason),)] == 1

    def test_gauges_are_summed_or_shown_per_replica_as_declared(self):
        monitor = Monitor()
        for i in range(2):
            router, target = Process(f"router-{i}"), Process(f"target-{i}", "target")
            router.router.sessions(waiting=1, running=3 + i, homeless=0)
            monitor.push(router.report())
            monitor.push(target.report(kv_pages=10, kv_pages_used=5 + i))
        seen = scrape(monitor)
        engine, model = ("engine", "0"), ("model_name", MODEL)
        assert seen["vllm:num_requests_running", (engine, model)] == 7
        assert seen["paceline_sessions", (("state", "running"),)] == 7
        assert seen["vllm:kv_cache_usage_perc", (engine, model, ("replica_id", "target-0"))] == 0.5
        assert seen["vllm:kv_cache_usage_perc", (engine, model, ("replica_id", "target-1"))] == 0.6
        assert seen["paceline_replicas_up", (("kind", "target"),)] == 2
        assert seen["paceline_replicas_up", (("kind", "draft"),)] == 0

    def test_an_empty_fleet_can_be_scraped(self):
        assert scrape(Monitor())["paceline_replicas_up", (("kind", "router"),)] == 0


class TestLifetimes:
    def test_a_silent_process_keeps_its_counts_and_loses_its_gauges(self):
        clock = Clock(100.0)
        monitor, process = Monitor(clock=clock), Process("router-0")
        process.router.round(Round(4, 2, Cause.HIT), 3, 0.02)
        process.router.sessions(0, 5, 0)
        monitor.push(process.report())
        for _ in range(3):
            clock.now += 11
            seen = scrape(monitor)
            assert seen["vllm:spec_decode_num_drafts_total", (("engine", "0"), ("model_name", MODEL))] == 1
            assert ("vllm:num_requests_running", (("engine", "0"), ("model_name", MODEL))) not in seen
        process.router.round(Round(4, 2, Cause.HIT), 3, 0.02)
        monitor.push(process.report())
        seen = scrape(monitor)
        assert seen["vllm:spec_decode_num_drafts_total", (("engine", "0"), ("model_name", MODEL))] == 2
        assert seen["vllm:num_requests_running", (("engine", "0"), ("model_name", MODEL))] == 5

    def test_a_restart_adds_to_what_was_counted_before(self):
        clock = Clock(100.0)
        monitor, process = Monitor(clock=clock), Process("draft-0", "draft")
        monitor.push(process.report({"nodes_used": 10}))
        process.restart()
        monitor.push(process.report({"nodes_used": 1}))
        for _ in range(2):
            seen = scrape(monitor)
            assert seen["paceline_draft_nodes_used_total", ()] == 11
            assert seen["paceline_replicas_up", (("kind", "draft"),)] == 1
            assert len(monitor.server_info().pools["draft"]) == 1
            clock.now += 9
            monitor.push(process.report({"nodes_used": 1}))

    def test_an_older_report_that_arrives_late_changes_nothing(self):
        monitor, process = Monitor(), Process("router-0")
        process.router.sessions(0, 1, 0)
        old = process.report()
        process.router.sessions(0, 2, 0)
        process.router.round(Round(1, 1, Cause.HIT), 2, 0.1)
        monitor.push(process.report())
        before = monitor.exposition()
        monitor.push(old)
        assert monitor.exposition() == before

    def test_many_short_lived_processes_cost_little(self):
        clock = Clock(100.0)
        monitor, process = Monitor(clock=clock), Process("target-0", "target")
        for _ in range(300):
            monitor.push(process.report({"rounds": 2}))
            process.restart()
            clock.now += 20
        assert scrape(monitor)["paceline_target_rounds_total", ()] == 600
        assert len(monitor._sources) <= 257

    def test_sums_of_seconds_never_decrease_by_rounding(self):
        monitor = Monitor()
        processes = [
            (Process(f"target-{i}", "target"), {"step_s": seconds}) for i, seconds in enumerate((0.1, 0.2, 0.3))
        ]
        for process, counters in processes:
            monitor.push(process.report(counters))
        before = scrape(monitor)["paceline_target_step_seconds_total", ()]
        assert before > 0.2 + 0.3 + 0.1  # the order of the terms when the first has reported again
        monitor.push(processes[0][0].report(processes[0][1]))
        assert scrape(monitor)["paceline_target_step_seconds_total", ()] == before


class TestStrangers:
    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("paceline_of_tomorrow", {(): 1.0}),
            (catalogue.ROUNDS.name, {(): 1.0}),
            (catalogue.ROUNDS.name, {("hit",): (1.0, 1.0)}),
            (catalogue.AHEAD.name, {(): (1.0, 1.0, 1.0)}),
            (catalogue.SESSIONS.name, {("running", "extra"): 1.0}),
        ],
    )
    def test_what_another_version_reports_is_left_out_and_said_once(self, name, values, caplog):
        monitor, process = Monitor(), Process("router-0")
        report = process.report()
        monitor.push(Report("router-9", "router", report.status, {name: values}))
        for _ in range(3):
            assert "router-9" not in str(scrape(monitor))
        assert [name in record.getMessage() for record in caplog.records] == [True]


class TestServerInfo:
    def test_pools_and_rates(self):
        clock = Clock(100.0)
        monitor = Monitor(clock=clock)
        router = Process("router-0")
        for stats in (Round(4, 3, Cause.HIT), Round(4, 1, Cause.HIT), Round(0, 0, Cause.TOKEN), Round(0, 0, Cause.K)):
            router.router.round(stats, stats.num_accepted + 1, 0.01)
        router.router.round(Round(0, 0, Cause.DISABLED), 1, 0.01)
        router.router.sessions(waiting=2, running=3, homeless=1)
        monitor.push(router.report())
        for source_id in ("target-1", "target-0"):
            monitor.push(Process(source_id, "target").report())
        clock.now += 5
        info = monitor.server_info()
        assert [status.replica_id for status in info.pools["target"]] == ["target-0", "target-1"]
        assert list(info.pools) == ["router", "target"]
        assert (info.sessions_running, info.sessions_queued) == (3, 3)
        assert info.acceptance_rate == 0.5
        assert info.acceptance_length == 3.0, "of the two rounds with a proposal: plain ones have no part in it"
        assert info.hit_rate == 0.5
        assert info.uptime_s == 5
        clock.now += 20
        info = monitor.server_info()
        assert (info.pools, info.sessions_running, info.hit_rate) == ({}, 0, 0.5)

    def test_a_replica_that_was_killed_is_gone_soon_and_one_that_drains_stays(self):
        clock = Clock(100.0)
        monitor, router = Monitor(clock=clock), Process("router-0")
        drafts = {name: Process(name, "draft") for name in ("killed", "draining", "busy")}

        def after(seconds, *reporting, members):
            clock.now += seconds
            monitor.push(replace(router.report(), view=RouterView({"draft": members}, 0, 0)))
            for name in reporting:
                monitor.push(drafts[name].report())
            return {status.replica_id: status.draining for status in monitor.server_info().pools.get("draft", ())}

        everybody = dict.fromkeys(drafts, False)
        assert after(0, *drafts, members=tuple(drafts)) == everybody
        assert after(1, "draining", members=("busy",)) == everybody | {"killed": True, "draining": True}
        assert after(2, "draining", members=("busy",)) == {"draining": True, "busy": False}, "busy takes sessions"

    def test_before_the_first_round(self):
        info = Monitor().server_info()
        assert (info.acceptance_rate, info.acceptance_length, info.hit_rate) == (0.0, 1.0, 0.0)


# Events of three processes, their reports in any order, restarts and silences.
_STEP = st.one_of(
    st.tuples(st.just("round"), st.integers(0, 2), st.integers(0, 4)),
    st.tuples(st.just("report"), st.integers(0, 2)),
    st.tuples(st.just("deliver"), st.integers(0, 30)),
    st.tuples(st.just("restart"), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, 6.0, 25.0])),
)


class TestProperty:
    @settings(max_examples=60)
    @given(steps=st.lists(_STEP, max_size=60), random=st.randoms(use_true_random=False))
    def test_the_sum_over_processes_is_the_sum_of_the_events(self, steps, random):
        clock = Clock(100.0)
        monitor = Monitor(clock=clock)
        processes = [Process(f"router-{i}") for i in range(3)]
        post: list[Report] = []  # sent, not yet arrived
        num_rounds = num_drafted = num_tokens = 0
        shown: dict[str, dict] = {}

        def check():
            nonlocal shown
            totals = copy.deepcopy(monitor.totals())
            for name, values in shown.items():
                for labels, value in values.items():
                    now = totals[name][labels]
                    pairs = zip(now, value, strict=True) if isinstance(value, tuple) else [(now, value)]
                    assert all(a >= b for a, b in pairs)
            shown = totals
            assert sum(totals.get(catalogue.ROUNDS.name, {}).values()) <= num_rounds

        for step in steps:
            match step:
                case ("round", i, drafted):
                    processes[i].router.round(Round(drafted, drafted // 2, Cause.HIT), drafted // 2 + 1, 0.25)
                    num_rounds, num_drafted = num_rounds + 1, num_drafted + drafted
                    num_tokens += drafted // 2 + 1
                case ("report", i):
                    post.append(processes[i].report())
                case ("deliver", i) if post:
                    monitor.push(post.pop(i % len(post)))
                    check()
                case ("restart", i):
                    post.append(processes[i].report())
                    processes[i].restart()
                case ("wait", seconds):
                    clock.now += seconds
                    check()
        post += [process.report() for process in processes]
        random.shuffle(post)
        for report in post:
            monitor.push(report)
            clock.now += random.choice([0.0, 0.0, 4.0, 12.0])
            check()
        totals = monitor.totals()
        assert sum(totals[catalogue.ROUNDS.name].values()) == num_rounds
        assert totals[catalogue.DRAFT_TOKENS.name] == {(MODEL,): num_drafted}
        tokens = totals[catalogue.TOKENS_PER_VERIFICATION.name][()]
        assert (tokens[0], tokens[-1]) == (num_tokens, num_rounds)
        assert totals[catalogue.INTER_TOKEN.name][(MODEL,)][0] == 0.25 * num_rounds
        scrape(monitor)
