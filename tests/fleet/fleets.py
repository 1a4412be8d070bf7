"""Looks at a service, and a service whose processes report, made up."""

from paceline.config import ServiceConfig
from paceline.fleet.autoscaler import Autoscaler
from paceline.fleet.monitor import Monitor
from paceline.fleet.report import Reporter
from paceline.fleet.signals import Fleet
from paceline.metrics.registry import Registry
from paceline.metrics.replica import ReplicaMetrics
from paceline.metrics.router import RouterMetrics
from paceline.types import ReplicaStatus, RouterView

HEARD = {"router": 0, "target": 0, "draft": 0}


def fleet(**changes):
    """Two targets, one draft and eight sessions that speculate; ``changes`` by field."""
    usual = {
        "routers": 1,
        "sessions": 8,
        "queued": 0,
        "opened": 0.0,
        "refused": 0.0,
        "cpu": 0.1,
        "speculating": 8,
        "drafting": 8,
        "targets": 2,
        "kv": 0.2,
        "ttft_s": 0.1,
        "itl_s": 0.02,
        "drafts": 1,
        "busy": 0.5,
        "late": 0.0,
        "times": None,
        "unheard": HEARD,
    }
    return Fleet(**usual | changes)


class Process:
    """A router, target or draft that reports."""

    def __init__(self, source_id, kind):
        self.source_id, self.kind, self.incarnation = source_id, kind, 1
        self.registry = Registry(source_id)
        self.router = RouterMetrics(self.registry, "m") if kind == "router" else None
        self.replica = ReplicaMetrics(self.registry)
        self.reporter = Reporter(source_id, kind, self.registry)
        self.counters = {}

    def report(self, view=None, **facts):
        facts = {"num_sessions": 0, "num_waiting": 0, "max_sessions": 4} | facts
        status = ReplicaStatus(self.source_id, self.kind, self.incarnation, counters=dict(self.counters), **facts)
        if self.router is None:
            self.replica.update(status)
        return self.reporter.report(status, view)


def count(process, **grown):
    for name, value in grown.items():
        process.counters[name] = process.counters.get(name, 0.0) + value


class Service:
    """One router, targets and drafts that report to a monitor once a second of its clock."""

    def __init__(self, pools=None, num_targets=1, num_drafts=1):
        self.now = 1000.0
        data = {"pools": pools or {}, "max_sessions": 4}
        self.monitor = Monitor(clock=lambda: self.now, autoscaler=Autoscaler(data, wall=lambda: self.now))
        self.router = Process("r1", "router")
        self.targets = [Process(f"t{i}", "target") for i in range(num_targets)]
        self.drafts = [Process(f"d{i}", "draft") for i in range(num_drafts)]
        self.silent = set()

    def second(self, *, sessions=0, queued=0, speculating=0, drafting=0, busy=0.5, kv=0, members=None):
        """Everybody reports, and the sizes are decided."""
        self.now += 1.0
        members = members or {
            "target": tuple(t.source_id for t in self.targets),
            "draft": tuple(d.source_id for d in self.drafts),
        }
        view = RouterView(members, speculating, drafting)
        count(self.router, cpu_s=0.25)
        reports = [self.router.report(view, num_sessions=sessions + queued, num_waiting=queued)]
        for target in self.targets:
            count(target, steps=100, step_s=0.5, tokens_computed=400)
            reports.append(target.report(kv_pages_used=kv, kv_pages=100))
        for draft in self.drafts:
            count(draft, tree_steps=100, step_s=busy, leaves=800)
            reports.append(draft.report())
        for report in reports:
            if report.source_id not in self.silent:
                self.monitor.push(report)
        self.monitor.tick()
        return self.monitor.autoscaler.wanted()[1]

    def seconds(self, count, **load):
        return [self.second(**load) for _ in range(count)]

    @property
    def fleet(self):
        return self.monitor.autoscaler.fleet


def pools(**settings):
    """Plain data of a ServiceConfig with these autoscaling_configs."""
    config = {
        f"{kind}_config": {"deployment_config": {"autoscaling_config": given}} for kind, given in settings.items()
    }
    return ServiceConfig.parse(config).scaling()["pools"]
