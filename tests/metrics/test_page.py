"""The metrics page as its readers know it: names, labels, buckets, help lines, order and numbers, byte for byte."""

import dataclasses
from pathlib import Path

from tests.fleet.fleets import Process, pools

from paceline.draft.stats import DraftStats
from paceline.fleet.autoscaler import Autoscaler
from paceline.fleet.monitor import Monitor
from paceline.metrics.router import RouterMetrics
from paceline.target.control.step_meter import TargetStats
from paceline.types import Cause, FinishReason, Result, Round, RouterView, SpeculationStats, Timing, Usage

PAGE = Path(__file__).with_name("page.txt")


def serve_requests(router: RouterMetrics) -> None:
    """Makes every event of a router happen, with values in, at and beyond the bounds of the histograms."""
    for queue_s, ttft_s in ((0.0, 0.0005), (0.004, 0.3), (100.0, 5000.0)):
        router.admitted(queue_s)
        router.first_token(ttft_s)
    for number, cause in enumerate(Cause):
        router.round(Round(number, number // 2, cause), number + 1, None if number == 0 else 0.025 * number)
    timing = Timing(prefill_s=0.25, decode_s=1.0, tokens_per_s=2.0, queue_s=0.5)
    for reason in (FinishReason.STOP, FinishReason.LENGTH):
        router.finished(Result("a", (1,), (0.0,), reason, Usage(7, 3), SpeculationStats(), timing, seed=1), 16)
    router.failed("UNAVAILABLE")
    router.rejected("queue_full")
    router.dropped("malformed", 3)
    router.moved("drain")
    router.draft_reopened("lost")
    router.sessions(4, 2, 1)
    router.draft_link(0.0002)
    router.draft_replicas(2)


def page() -> str:
    """The page of a fleet of one router, two targets and a draft, whose draft pool is sized by the monitor."""
    now = [0.0]
    drafts = {"min_replicas": 0, "max_replicas": 3, "upscale_delay_s": 2.0, "downscale_delay_s": 6.0}
    scaling = {"pools": pools(draft=drafts), "max_sessions": 4}
    monitor = Monitor(clock=lambda: now[0], autoscaler=Autoscaler(scaling, wall=lambda: now[0], recommend=False))
    router = Process("router-0", "router")
    engines = [Process("target-1", "target"), Process("target-0", "target"), Process("draft-0", "draft")]
    assert router.router is not None
    serve_requests(router.router)
    for second in range(10):
        now[0] = float(second)
        members = {"target": ("target-0", "target-1"), "draft": ("draft-0",)}
        monitor.push(router.report(RouterView(members, speculating=1, drafting=1), num_sessions=2))
        for number, engine in enumerate(engines):
            stats = TargetStats() if engine.kind == "target" else DraftStats()
            engine.counters = {
                field: float(number + place * second) for place, field in enumerate(dataclasses.asdict(stats))
            }
            if engine.kind == "target":
                engine.counters |= {"steps_of:16": 2.0 * second, "step_tokens_of:16": 20.0 * second}
            engine.counters["a_field_of_another_version"] = float(second)
            measures = {"drafting": 1.0, "step_seconds:16": 0.05, "step_seconds:8": 0.04} if number == 0 else {}
            facts = {"num_sessions": 2, "kv_pages": 10, "kv_pages_used": 3, "busy_s": 0.5}
            monitor.push(engine.report(model="m", measures=measures, **facts))
        monitor.tick()
    return monitor.exposition()


def test_the_page_is_byte_for_byte_what_its_readers_know() -> None:
    assert page() == PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
