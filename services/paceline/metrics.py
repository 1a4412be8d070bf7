"""Every metric of the service, declared once, and the few classes through which the processes count.

Names that begin with ``vllm:`` are those of vLLM, with its meaning and its histogram bounds, so that the tools which
read them (``vllm bench serve``, dashboards, planners) work unchanged; ``paceline_`` is what only this service has.
Events are counted here, rates are derived by whoever reads.

A process owns one ``Registry``. Its numbers reach the fleet's sums as ``Registry.samples()`` (``monitor.py``); inside
a Ray worker they can also be mirrored to Ray's exporter, which adds ``ray_`` to each name. This module knows neither
sessions nor sockets, and is the only one that imports ``ray.util.metrics``.
"""

from __future__ import annotations

import enum
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from paceline.router.session import Result
from paceline.types import MAX_DRAFT_TOKENS, Cause, FinishReason, ReplicaStatus, Round


class Kind(enum.StrEnum):
    """How the values of a metric behave."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One declaration. ``name`` is the full name as a scrape shows it, with ``_total`` if it is a counter."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    """Histogram: upper bounds, inclusive and ascending, without infinity."""
    per_replica: bool = False
    """Gauge: the fleet shows one value per process, labelled ``replica_id``, instead of the sum."""

    @property
    def documentation(self) -> str:
        """The help line of a scrape."""
        return f"{self.help} Unit: {self.unit}."


Value = float | tuple[float, ...]
"""A counter's or gauge's number; of a histogram (sum, count up to each bound..., count of all)."""

Samples = Mapping[str, Mapping[tuple[str, ...], Value]]
"""The picklable state of a registry: metric name -> values of its labels, in the declared order -> value."""

CATALOGUE: dict[str, Metric] = {}
"""Every declaration, by name."""


def _declare(metric: Metric) -> Metric:
    assert metric.name not in CATALOGUE, f"{metric.name} is declared twice"
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
    CATALOGUE[metric.name] = metric
    return metric


def _counter(name: str, unit: str, help_: str, *labels: str) -> Metric:
    return _declare(Metric(name, Kind.COUNTER, unit, help_, labels))


def _gauge(name: str, unit: str, help_: str, *labels: str, per_replica: bool = False) -> Metric:
    return _declare(Metric(name, Kind.GAUGE, unit, help_, labels, per_replica=per_replica))


def _histogram(name: str, unit: str, help_: str, bounds: tuple[float, ...], *labels: str) -> Metric:
    return _declare(Metric(name, Kind.HISTOGRAM, unit, help_, labels, bounds))


# fmt: off
_TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_GAP_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SHORT_S = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)
_PER_ROUND = (*(float(n) for n in range(1, MAX_DRAFT_TOKENS + 2)),)
# fmt: on

# -- vLLM's names -------------------------------------------------------------------------------------------------

DRAFTS = _counter(
    "vllm:spec_decode_num_drafts_total", "rounds", "Rounds that verified at least one draft token.", "model_name"
)
DRAFT_TOKENS = _counter(
    "vllm:spec_decode_num_draft_tokens_total", "tokens", "Draft tokens that were verified.", "model_name"
)
ACCEPTED_TOKENS = _counter(
    "vllm:spec_decode_num_accepted_tokens_total", "tokens", "Draft tokens that were accepted.", "model_name"
)
ACCEPTED_PER_POS = _counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "tokens",
    "Draft tokens that were accepted, by their position in the proposal.",
    "model_name",
    "position",
)
REQUESTS_RUNNING = _gauge("vllm:num_requests_running", "requests", "Requests that a target serves now.", "model_name")
REQUESTS_WAITING = _gauge(
    "vllm:num_requests_waiting", "requests", "Requests that wait for admission or for a target.", "model_name"
)
TTFT = _histogram(
    "vllm:time_to_first_token_seconds", "seconds", "From a request's arrival to its first token.", _TTFT_S, "model_name"
)
INTER_TOKEN = _histogram(
    "vllm:inter_token_latency_seconds",
    "seconds",
    "Between two rounds of a request; a round emits one token or more.",
    _GAP_S,
    "model_name",
)
E2E = _histogram(
    "vllm:e2e_request_latency_seconds", "seconds", "From a request's arrival to its end.", _REQUEST_S, "model_name"
)
REQUEST_QUEUE = _histogram(
    "vllm:request_queue_time_seconds", "seconds", "From a request's arrival to admission.", _REQUEST_S, "model_name"
)
PROMPT_TOKENS = _counter("vllm:prompt_tokens_total", "tokens", "Prompt tokens of finished requests.", "model_name")
GENERATION_TOKENS = _counter("vllm:generation_tokens_total", "tokens", "Tokens emitted.", "model_name")
REQUEST_SUCCESS = _counter(
    "vllm:request_success_total", "requests", "Requests that ended, by reason.", "model_name", "finished_reason"
)
KV_USAGE = _gauge(
    "vllm:kv_cache_usage_perc", "ratio", "Part of a target's KV cache in use; 1 is all.", "model_name", per_replica=True
)
PREEMPTIONS = _counter(
    "vllm:num_preemptions_total", "sessions", "Sessions dropped for lack of KV, to be computed again.", "model_name"
)

# -- the router ---------------------------------------------------------------------------------------------------

ROUNDS = _counter("paceline_rounds_total", "rounds", "Rounds, by where the proposal came from.", "cause")
TOKENS_PER_VERIFICATION = _histogram(
    "paceline_tokens_per_verification", "tokens", "Tokens that a round emitted, misses included.", _PER_ROUND
)
AHEAD = _histogram(
    "paceline_draft_ahead_depth",
    "nodes",
    "Nodes on the best path, at most the lookahead, ready when a step ended; 0 is a miss.",
    (0.0, *_PER_ROUND[:-1]),
)
DRAFT_LINK = _histogram("paceline_draft_link_seconds", "seconds", "Latency of the link to a draft.", _SHORT_S)
QUEUE = _histogram("paceline_queue_seconds", "seconds", "From a request's arrival to admission.", _SHORT_S)
SESSIONS = _gauge(
    "paceline_sessions",
    "sessions",
    "Sessions that wait for admission, run on a target, or have lost their target and wait for another (homeless).",
    "state",
)
DROPPED = _counter("paceline_messages_dropped_total", "messages", "Stale or malformed messages, by kind.", "kind")
MOVED = _counter("paceline_sessions_moved_total", "sessions", "Sessions continued on another target.", "reason")
REOPENED = _counter("paceline_sessions_reopened_total", "sessions", "Sessions re-opened on a draft.", "reason")
DRAFTS_UP = _gauge(
    "paceline_draft_replicas_up", "replicas", "Drafts that a router has a working link to.", per_replica=True
)
REJECTED = _counter("paceline_requests_rejected_total", "requests", "Requests refused before a session.", "reason")
FAILED = _counter("paceline_requests_failed_total", "requests", "Admitted requests that ended in an error.", "reason")

# -- replicas -----------------------------------------------------------------------------------------------------

REPLICA_SESSIONS = _gauge(
    "paceline_replica_sessions", "sessions", "Open sessions of a replica, waiting ones included.", "kind",
    per_replica=True,
)  # fmt: skip
REPLICA_WAITING = _gauge(
    "paceline_replica_sessions_waiting", "sessions", "Open sessions of a replica that wait for room.", "kind",
    per_replica=True,
)  # fmt: skip
REPLICA_CAPACITY = _gauge(
    "paceline_replica_sessions_max", "sessions", "Sessions that a replica serves at once.", "kind", per_replica=True
)
REPLICA_BUSY = _gauge(
    "paceline_replica_busy_seconds", "seconds", "Since the step in progress began; 0 between steps.", "kind",
    per_replica=True,
)  # fmt: skip
REPLICA_DRAINING = _gauge(
    "paceline_replica_draining", "flag", "1 if a replica takes no new sessions.", "kind", per_replica=True
)
KV_PAGES = _gauge("paceline_kv_pages", "pages", "KV pages of a replica.", "kind", per_replica=True)
KV_PAGES_USED = _gauge("paceline_kv_pages_used", "pages", "KV pages of a replica in use.", "kind", per_replica=True)
REPLICAS_UP = _gauge("paceline_replicas_up", "replicas", "Processes that report to the monitor now.", "kind")

# -- the monitor --------------------------------------------------------------------------------------------------

SCALING_WANTED = _gauge(
    "paceline_scaling_wanted_replicas", "replicas", "That a pool shall have, where the service decides it.", "pool"
)
SCALING_ACTUAL = _gauge("paceline_scaling_actual_replicas", "replicas", "Of such a pool that take sessions.", "pool")
SCALING_DEMAND = _gauge(
    "paceline_scaling_demand_replicas", "replicas", "That the load of such a pool needs now, with a fraction.", "pool"
)
SCALING_CHANGES = _counter(
    "paceline_scaling_changes_total", "changes", "Of the wanted replicas of a pool, by direction.", "pool", "direction"
)
CONTROLLER: dict[str, Metric] = {
    name: _gauge(f"paceline_controller_{name}", unit, help_, *labels, per_replica=True)
    for name, unit, help_, *labels in (
        ("drafting", "flag", "1 if a target wants drafts at its load now."),
        ("sessions_paused", "sessions", "Sessions that a target has told to do without a draft."),
        ("acceptance", "ratio", "Draft tokens accepted lately, those before them being so."),
        ("mean_draft_tokens", "tokens", "Of the proposals of the last few hundred rounds."),
        ("draft_tokens_share", "ratio", "Of these rounds, by the length of the proposal.", "tokens"),
        ("step_seconds", "seconds", "What a step is expected to take, by its tokens.", "tokens"),
        ("tokens_per_second", "tokens/s", "Measured last at the load of now, by whether it drafts.", "decoding"),
    )
}
"""What a target's controller rests on, by the name that its status gives it."""

_ENGINE_COUNTERS: dict[tuple[str, str], Metric] = {
    ("target", "preemptions"): PREEMPTIONS,
    ("router", "cpu_s"): _counter("paceline_router_cpu_seconds_total", "seconds", "CPU time of routers."),
    ("draft", "step_s"): _counter(
        "paceline_draft_step_seconds_total", "seconds", "Time that drafts have spent inside tree steps."
    ),
    ("target", "step_s"): _counter(
        "paceline_target_step_seconds_total",
        "seconds",
        "Inside steps of targets, from the choice of sessions to their outcomes.",
    ),
    ("target", "wait_s"): _counter(
        "paceline_target_wait_seconds_total",
        "seconds",
        "Between two steps of a target in which every session waited for its draft.",
    ),
    ("target", "bubble_s"): _counter(
        "paceline_verify_bubble_seconds_total",
        "seconds",
        "Between the end of a step and the next forward although a session could step at once.",
    ),
    ("target", "bubble_steps"): _counter(
        "paceline_verify_bubble_steps_total", "steps", "Steps that the bubble seconds came before."
    ),
    ("target", "hit_bubble_s"): _counter(
        "paceline_verify_hit_bubble_seconds_total",
        "seconds",
        "Of the bubble seconds, those before forwards that only verified proposals ready when the last step ended.",
    ),
    ("target", "hit_bubble_steps"): _counter(
        "paceline_verify_hit_bubble_steps_total", "steps", "Steps that these bubble seconds came before."
    ),
}
"""Where each counter of an engine goes, by kind and field name; the others follow the rule of ``engine_counter``."""

for _engine, _field, _unit, _help in (
    ("target", "steps", "steps", "Forwards of targets."),
    ("target", "tokens_computed", "tokens", "Rows computed by targets: prompt, context and draft tokens."),
    ("target", "rounds", "rounds", "Rounds of targets, those of abandoned epochs included."),
    ("target", "tokens_emitted", "tokens", "Tokens decided by targets, those of abandoned epochs included."),
    ("target", "cached_tokens", "tokens", "Prompt tokens whose KV was shared with an earlier session."),
    ("target", "nodes_added", "nodes", "Nodes that arrived at targets and joined a tree."),
    ("target", "nodes_stale", "nodes", "Nodes that arrived below a branch already given up."),
    ("target", "nodes_invalid", "nodes", "Nodes that targets refused."),
    ("target", "nodes_dropped", "nodes", "Nodes dropped because a tree was full."),
    ("target", "trees_lost", "trees", "Trees that missed nodes for good."),
    ("target", "proposals_invalid", "proposals", "Draft tokens that could not be verified."),
    ("target", "messages_stale", "messages", "Messages of an unknown session or an older epoch."),
    ("target", "messages_foreign", "messages", "Messages for a session that another router opened."),
    ("target", "messages_malformed", "messages", "Messages that targets could not read."),
    ("target", "waits", "steps", "Steps before which every session of a target waited for its draft."),
    ("target", "ahead_depth", "nodes", "Nodes on the best paths, at most the lookahead each, when steps ended."),
    ("target", "ahead_rounds", "rounds", "Rounds that these nodes were counted for."),
    ("target", "draft_rows", "tokens", "Draft tokens verified."),
    ("target", "draft_rows_trimmed", "tokens", "Draft tokens left out because the step was shorter without them."),
    ("target", "nodes_used", "nodes", "Draft tokens accepted."),
    ("target", "drafts_paused", "sessions", "How often a session was told to do without a draft."),
    ("target", "lookup_rounds", "rounds", "Rounds with a proposal from their own text, for lack of a draft's."),
    ("target", "lookup_rows", "tokens", "Tokens of these proposals."),
    ("target", "lookup_rows_used", "tokens", "Of these, accepted."),
    ("target", "trials", "trials", "Of drafting, or of plain decoding, against what a target had chosen."),
    ("target", "drafts_resumed", "sessions", "How often a session was told to take a draft again."),
    ("draft", "nodes_published", "nodes", "Nodes shipped by drafts."),
    ("draft", "nodes_used", "nodes", "Committed tokens whose node had been shipped before."),
    ("draft", "nodes_missed", "nodes", "Committed tokens that no node had predicted."),
    ("draft", "stale_messages", "messages", "Messages of an older epoch."),
    ("draft", "unknown_messages", "messages", "Messages for a session that is not open."),
    ("draft", "messages_foreign", "messages", "Messages for a session that another router opened."),
    ("draft", "messages_malformed", "messages", "Messages that drafts could not read."),
    ("draft", "invalid_messages", "messages", "Opens and commits that no router sends."),
    ("draft", "lost_commits", "messages", "Commits that came without the one before."),
    ("draft", "refused_sessions", "sessions", "Sessions refused for lack of room."),
    ("draft", "failed_sessions", "sessions", "Sessions that drafts had to give up."),
    ("draft", "prefill_chunks", "steps", "Prefill steps of drafts."),
    ("draft", "tree_steps", "steps", "Tree steps of drafts."),
    ("draft", "forwards", "steps", "Forwards of tree steps, retries included."),
    ("draft", "leaves", "nodes", "Nodes expanded."),
    ("draft", "messages", "messages", "Messages of drafts, one per session and step at most."),
):
    _ENGINE_COUNTERS[_engine, _field] = _counter(f"paceline_{_engine}_{_field}_total", _unit, _help)

_ENGINE_COUNTER_NAME = re.compile(r"paceline_(target|draft|router)_([a-z][a-z0-9_]*)_total")


def engine_counter(kind: str, field: str) -> Metric:
    """The counter for a field of an engine's stats; a field unknown here becomes ``paceline_<kind>_<field>_total``."""
    field = re.sub(r"[^a-z0-9_]", "_", field.lower().removesuffix("_total"))
    return _ENGINE_COUNTERS.get((kind, field)) or _other_engine_counter(kind, field)


def _other_engine_counter(kind: str, field: str) -> Metric:
    return Metric(f"paceline_{kind}_{field}_total", Kind.COUNTER, "events", f"Counter {field} of a {kind} engine.")


def declared(name: str) -> Metric | None:
    """The declaration of a name, also of an engine's counter that is unknown here; None: no metric of ours."""
    metric = CATALOGUE.get(name)
    if metric is None and (match := _ENGINE_COUNTER_NAME.fullmatch(name)):
        return _other_engine_counter(match[1], match[2])
    return metric


class Counter:
    """A total with its labels bound. The cells are written by one thread each, and so do without locks."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds ``amount``, at least 0."""
        self.value += amount


class Gauge:
    """A value of this moment with its labels bound."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replaces the value."""
        self.value = float(value)


class Histogram:
    """Counts of observations up to each bound, with the labels bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        """Counts one observation."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    @property
    def value(self) -> tuple[float, ...]:
        """As ``Value`` says."""
        return (self._sum, *map(float, accumulate(self._counts)))


def family(metric: Metric, labels: Sequence[str], series: Mapping[tuple[str, ...], Value]) -> Family:
    """The values of a metric as prometheus_client wants them, in the order of their labels."""
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(metric.name, metric.documentation, labels=labels)
        bounds = [*(repr(float(bound)) for bound in metric.bounds), "+Inf"]
        for key, value in sorted(series.items()):
            assert isinstance(value, tuple)
            histogram.add_metric(key, list(zip(bounds, value[1:], strict=True)), value[0])
        return histogram
    plain: CounterMetricFamily | GaugeMetricFamily
    if metric.kind is Kind.COUNTER:
        plain = CounterMetricFamily(metric.name, metric.documentation, labels=labels)
    else:
        plain = GaugeMetricFamily(metric.name, metric.documentation, labels=labels)
    for key, value in sorted(series.items()):
        assert not isinstance(value, tuple)
        plain.add_metric(key, value)
    return plain


class Registry(Collector):
    """The metrics of one process. ``collectors`` is what prometheus_client's exporters take.

    ``mirror``: inside a Ray worker, also feed Ray's exporter. Histograms are mirrored as they are observed; counters
    and gauges when ``mirror`` is called, once a second, because each write to Ray costs microseconds.
    """

    def __init__(self, replica_id: str = "", *, mirror: bool = False) -> None:
        self.collectors = CollectorRegistry(auto_describe=False)
        self.collectors.register(self)
        self._metrics: dict[str, Metric] = {}
        self._counters: dict[tuple[str, tuple[str, ...]], Counter] = {}
        self._gauges: dict[tuple[str, tuple[str, ...]], Gauge] = {}
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        self._mirror = _RayMirror(replica_id) if mirror and _inside_ray() else None

    def counter(self, metric: Metric, *labels: str) -> Counter:
        """The counter with these label values; it shows 0 from now on."""
        counter = self._counters.get((metric.name, labels))
        if counter is None:
            counter = self._counters[self._declared(metric, Kind.COUNTER, labels)] = Counter()
        return counter

    def gauge(self, metric: Metric, *labels: str) -> Gauge:
        """The gauge with these label values."""
        gauge = self._gauges.get((metric.name, labels))
        if gauge is None:
            gauge = self._gauges[self._declared(metric, Kind.GAUGE, labels)] = Gauge()
        return gauge

    def histogram(self, metric: Metric, *labels: str) -> Histogram:
        """The histogram with these label values."""
        histogram = self._histograms.get((metric.name, labels))
        if histogram is None:
            key = self._declared(metric, Kind.HISTOGRAM, labels)
            if self._mirror is None:
                histogram = Histogram(metric.bounds)
            else:
                histogram = self._mirror.histogram(metric, labels)
            self._histograms[key] = histogram
        return histogram

    def _declared(self, metric: Metric, kind: Kind, labels: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        assert (metric.kind, len(metric.labels)) == (kind, len(labels)), (metric.name, labels)
        self._metrics[metric.name] = metric
        return metric.name, labels

    def samples(self) -> Samples:
        """All values now."""
        samples: dict[str, dict[tuple[str, ...], Value]] = {name: {} for name in self._metrics}
        for (name, labels), counter in list(self._counters.items()):
            samples[name][labels] = counter.value
        for (name, labels), gauge in list(self._gauges.items()):
            samples[name][labels] = gauge.value
        for (name, labels), histogram in list(self._histograms.items()):
            samples[name][labels] = histogram.value
        return samples

    def collect(self) -> Iterator[Family]:
        """The same as prometheus_client's families."""
        for name, series in self.samples().items():
            yield family(self._metrics[name], self._metrics[name].labels, series)

    def mirror(self, samples: Samples) -> None:
        """Brings Ray's counters and gauges up to ``samples``; does nothing outside Ray."""
        if self._mirror is not None:
            self._mirror.write(self._metrics, samples)


def _inside_ray() -> bool:
    try:
        import ray
    except ImportError:
        return False
    return bool(ray.is_initialized())


class _RayMirror:
    """Ray's exporter. Names lose the characters that it refuses and the ``_total`` that it adds itself."""

    def __init__(self, replica_id: str) -> None:
        from ray.util import metrics

        self._ray = metrics
        self._replica_id = replica_id
        self._metrics: dict[str, Any] = {}
        self._written: dict[tuple[str, tuple[str, ...]], float] = {}

    def histogram(self, metric: Metric, labels: tuple[str, ...]) -> Histogram:
        return _MirroredHistogram(metric.bounds, self._metric(metric), self._tags(metric, labels))

    def write(self, declarations: Mapping[str, Metric], samples: Samples) -> None:
        for name, values in samples.items():
            metric = declarations[name]
            for labels, value in values.items():
                if isinstance(value, tuple):
                    continue
                grown = value - self._written.get((name, labels), 0.0)
                if metric.kind is Kind.GAUGE:
                    self._metric(metric).set(value, self._tags(metric, labels))
                elif grown > 0:
                    self._metric(metric).inc(grown, self._tags(metric, labels))
                    self._written[name, labels] = value

    def _metric(self, metric: Metric) -> Any:
        made = self._metrics.get(metric.name)
        if made is None:
            name = re.sub(r"[^a-zA-Z0-9_]", "_", metric.name.removesuffix("_total"))
            keys = (*metric.labels, "ReplicaId")
            if metric.kind is Kind.COUNTER:
                made = self._ray.Counter(name, metric.documentation, keys)
            elif metric.kind is Kind.GAUGE:
                made = self._ray.Gauge(name, metric.documentation, keys)
            else:  # Ray refuses a bound of 0
                bounds = [bound for bound in metric.bounds if bound > 0]
                made = self._ray.Histogram(name, metric.documentation, bounds, keys)
            self._metrics[metric.name] = made
        return made

    def _tags(self, metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
        return {**dict(zip(metric.labels, labels, strict=True)), "ReplicaId": self._replica_id}


class _MirroredHistogram(Histogram):
    __slots__ = ("_ray", "_tags")

    def __init__(self, bounds: tuple[float, ...], ray_histogram: Any, tags: dict[str, str]) -> None:
        super().__init__(bounds)
        self._ray, self._tags = ray_histogram, tags

    def observe(self, amount: float) -> None:
        super().observe(amount)
        self._ray.observe(amount, self._tags)


_CAUSES_WITH_OUTCOME = frozenset({Cause.HIT, Cause.TOKEN, Cause.K, Cause.LATE, Cause.DRAFT_DOWN})


class RouterMetrics:
    """What a router counts: one method per event. Calls take microseconds; no call is made per token."""

    def __init__(self, registry: Registry, model_name: str) -> None:
        self._registry = registry
        self._model = model_name
        self._drafts = registry.counter(DRAFTS, model_name)
        self._draft_tokens = registry.counter(DRAFT_TOKENS, model_name)
        self._accepted_tokens = registry.counter(ACCEPTED_TOKENS, model_name)
        self._accepted_per_pos: list[Counter] = []  # as long as the longest proposal so far
        self._rounds = {cause: registry.counter(ROUNDS, cause.value) for cause in Cause}
        self._tokens = registry.histogram(TOKENS_PER_VERIFICATION)
        self._ahead = registry.histogram(AHEAD)
        self._generated = registry.counter(GENERATION_TOKENS, model_name)
        self._gap = registry.histogram(INTER_TOKEN, model_name)
        self._queue = registry.histogram(QUEUE)
        self._request_queue = registry.histogram(REQUEST_QUEUE, model_name)
        self._ttft = registry.histogram(TTFT, model_name)
        self._e2e = registry.histogram(E2E, model_name)
        self._prompt_tokens = registry.counter(PROMPT_TOKENS, model_name)
        reasons = (*(reason.value for reason in FinishReason), "error")
        self._ended = {reason: registry.counter(REQUEST_SUCCESS, model_name, reason) for reason in reasons}
        self._link = registry.histogram(DRAFT_LINK)
        self._running = registry.gauge(REQUESTS_RUNNING, model_name)
        self._waiting = registry.gauge(REQUESTS_WAITING, model_name)
        self._sessions = {state: registry.gauge(SESSIONS, state) for state in ("waiting", "running", "homeless")}
        self._drafts_up = registry.gauge(DRAFTS_UP)
        for reason in ("failover", "drain"):
            registry.counter(MOVED, reason)

    def admitted(self, queue_s: float) -> None:
        """A request leaves the queue, ``queue_s`` seconds after it arrived."""
        self._queue.observe(queue_s)
        self._request_queue.observe(queue_s)

    def first_token(self, ttft_s: float) -> None:
        """A request's first token, ``ttft_s`` seconds after it arrived."""
        self._ttft.observe(ttft_s)

    def round(self, stats: Round, num_tokens: int, gap_s: float | None) -> None:
        """One round that emitted ``num_tokens``, ``gap_s`` seconds after the round before; None: it was the first."""
        num_drafted, num_accepted, cause = stats.num_drafted, stats.num_accepted, stats.cause
        if num_drafted:
            self._drafts.inc()
            self._draft_tokens.inc(num_drafted)
            per_pos = self._accepted_per_pos
            while len(per_pos) < num_drafted:
                per_pos.append(self._registry.counter(ACCEPTED_PER_POS, self._model, str(len(per_pos))))
            if num_accepted:
                self._accepted_tokens.inc(num_accepted)
                for counter in per_pos[:num_accepted]:
                    counter.inc()
        self._rounds[cause].inc()
        self._generated.inc(num_tokens)
        self._tokens.observe(num_tokens)
        if cause in _CAUSES_WITH_OUTCOME:
            self._ahead.observe(num_drafted if cause is Cause.HIT else 0)
        if gap_s is not None:
            self._gap.observe(gap_s)

    def finished(self, result: Result) -> None:
        """A session has its result."""
        timing = result.timing
        self._ended[result.finish_reason.value].inc()
        self._prompt_tokens.inc(result.usage.prompt_tokens)
        self._e2e.observe(timing.queue_s + timing.prefill_s + timing.decode_s)

    def failed(self, reason: str) -> None:
        """An admitted request ended in an error; ``reason`` is one of few, such as the name of its status code."""
        self._ended["error"].inc()
        self._registry.counter(FAILED, reason).inc()

    def rejected(self, reason: str) -> None:
        """A request was refused before it became a session; ``reason`` is one of few."""
        self._registry.counter(REJECTED, reason).inc()

    def dropped(self, kind: str, count: int = 1) -> None:
        """``count`` messages of a kind were stale or malformed, and dropped."""
        self._registry.counter(DROPPED, kind).inc(count)

    def moved(self, reason: str) -> None:
        """A session continues on another target: ``failover`` or ``drain``."""
        self._registry.counter(MOVED, reason).inc()

    def draft_reopened(self, reason: str) -> None:
        """A session was re-opened on a draft."""
        self._registry.counter(REOPENED, reason).inc()

    def sessions(self, waiting: int, running: int, homeless: int) -> None:
        """How many sessions are in each state now."""
        self._sessions["waiting"].set(waiting)
        self._sessions["running"].set(running)
        self._sessions["homeless"].set(homeless)
        self._running.set(running)
        self._waiting.set(waiting + homeless)

    def draft_link(self, latency_s: float) -> None:
        """A measured latency of the link to a draft, in seconds."""
        self._link.observe(latency_s)

    def draft_replicas(self, num_up: int) -> None:
        """How many drafts this router has a working link to."""
        self._drafts_up.set(num_up)


class ReplicaMetrics:
    """What a target or draft replica counts: the counters of its engine and its gauges, as its status gives them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._incarnation: int | None = None
        self._seen: dict[str, float] = {}

    def update(self, status: ReplicaStatus) -> None:
        """Takes the newest status. A new incarnation, or a counter that fell, counts from zero again."""
        registry, kind = self._registry, status.kind
        if status.incarnation != self._incarnation:
            self._incarnation, self._seen = status.incarnation, {}
        for field, value in status.counters.items():
            metric = engine_counter(kind, field)
            counter = registry.counter(metric, *([status.model] if metric.labels else []))
            seen = self._seen.get(field, 0.0)
            grown = value - seen if value >= seen else value
            if grown > 0:  # also false for NaN
                counter.inc(grown)
                self._seen[field] = value
            elif value < seen:
                self._seen[field] = 0.0
        for name, value in status.measures.items():
            name, _, label = name.partition(":")
            if (measure := CONTROLLER.get(name)) is not None and bool(label) == bool(measure.labels):
                registry.gauge(measure, *([label] if label else [])).set(value)
        registry.gauge(REPLICA_SESSIONS, kind).set(status.num_sessions)
        registry.gauge(REPLICA_WAITING, kind).set(status.num_waiting)
        registry.gauge(REPLICA_CAPACITY, kind).set(status.max_sessions)
        registry.gauge(REPLICA_BUSY, kind).set(status.busy_s)
        registry.gauge(REPLICA_DRAINING, kind).set(status.draining)
        if status.kv_pages:
            registry.gauge(KV_PAGES, kind).set(status.kv_pages)
            registry.gauge(KV_PAGES_USED, kind).set(status.kv_pages_used)
            if kind == "target":
                registry.gauge(KV_USAGE, status.model).set(status.kv_pages_used / status.kv_pages)
