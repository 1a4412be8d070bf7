"""Every metric of the service, declared once, and the few classes through which the processes count.

Names that begin with ``vllm:`` are those of vLLM, with its meaning and its histogram bounds, so that the tools which
read them (``vllm bench serve``, dashboards, planners) work unchanged; ``paceline_`` is what only this service has.
Events are counted here, rates are derived by whoever reads.

A process owns one ``Registry``. Its numbers reach the fleet's sums as ``Registry.samples()`` (``monitor.py``); inside
a Ray worker they can also be mirrored to Ray's exporter. This package knows neither sessions nor sockets.

Declared: ``declaration``, ``catalogue``, ``engines``. Counted: ``cells``, ``mirror``, ``registry``, and by event in
``router`` and ``replica``.
"""

from paceline.metrics.catalogue import (
    ACCEPTED_PER_POS,
    ACCEPTED_TOKENS,
    AHEAD,
    DRAFT_LINK,
    DRAFT_TOKENS,
    DRAFTS,
    DROPPED,
    GENERATION_TOKENS,
    INTER_TOKEN,
    MOVED,
    REJECTED,
    REOPENED,
    REPLICAS_UP,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
    ROUNDS,
    SCALING_ACTUAL,
    SCALING_CHANGES,
    SCALING_DEMAND,
    SCALING_WANTED,
    SESSIONS,
    TOKENS_PER_VERIFICATION,
    TTFT,
)
from paceline.metrics.declaration import CATALOGUE, Kind, Metric, Samples, Value
from paceline.metrics.engines import declared, engine_counter
from paceline.metrics.registry import Registry, family
from paceline.metrics.replica import ReplicaMetrics
from paceline.metrics.router import RouterMetrics

__all__ = [
    "ACCEPTED_PER_POS",
    "ACCEPTED_TOKENS",
    "AHEAD",
    "CATALOGUE",
    "DRAFTS",
    "DRAFT_LINK",
    "DRAFT_TOKENS",
    "DROPPED",
    "GENERATION_TOKENS",
    "INTER_TOKEN",
    "MOVED",
    "REJECTED",
    "REOPENED",
    "REPLICAS_UP",
    "REQUESTS_RUNNING",
    "REQUESTS_WAITING",
    "ROUNDS",
    "SCALING_ACTUAL",
    "SCALING_CHANGES",
    "SCALING_DEMAND",
    "SCALING_WANTED",
    "SESSIONS",
    "TOKENS_PER_VERIFICATION",
    "TTFT",
    "Kind",
    "Metric",
    "Registry",
    "ReplicaMetrics",
    "RouterMetrics",
    "Samples",
    "Value",
    "declared",
    "engine_counter",
    "family",
]
