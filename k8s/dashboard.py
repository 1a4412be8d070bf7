"""The Grafana dashboards, from one list of panels: both pools and what lies between them.

a fleet        Ray's exporters on Kubernetes, as in ``components/monitoring/rules.yaml``
one address    ``/metrics`` of a service itself, which is a page for all of its replicas: ``cluster/grafana.json``
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_WHERE = 'namespace="$namespace", ray_io_cluster=~"$cluster"'
_IN = 'namespace="$namespace"'
"""Of metrics that are not the service's own, and do not know its cluster."""
_DISK = f'{{{_IN}, persistentvolumeclaim="data-paceline-redis-0"}}'
_WIDTH, _HEIGHT, _COLUMNS = 8, 7, 3


@dataclass(frozen=True)
class Panel:
    """A graph. ``queries``: pairs of a legend and an expression, in which ``@`` stands for the selected cluster."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    about: str = ""


def _share(part: str, whole: str) -> str:
    return f"sum(rate({part}[$__rate_interval])) / sum(rate({whole}[$__rate_interval]))"


def _quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"p{q * 100:.0f}", f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{@}}[$__rate_interval])))")
        for q in (0.5, 0.9, 0.99)
    )


def _rate(metric: str, by: str = "", more: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{{@{more}}}[$__rate_interval]))"


def _size(pool: str) -> tuple[tuple[str, str], ...]:
    named = (("wanted", "wanted"), ("that take sessions", "actual"), ("the load needs", "demand"))
    return tuple((legend, f'max(ray_paceline_scaling_{name}_replicas{{@, pool="{pool}"}})') for legend, name in named)


_COMPARED = ', cause=~"hit|token|k|late|draft_down"'

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What users see",
        (
            Panel("Tokens", "tokens/s", (("emitted", _rate("ray_vllm_generation_tokens_total")),)),
            Panel("Time to the first token", "s", _quantiles("ray_vllm_time_to_first_token_seconds")),
            Panel("Between two messages of a stream", "s", _quantiles("ray_vllm_inter_token_latency_seconds")),
            Panel("Sessions", "sessions", (("{{state}}", "sum by (state) (ray_paceline_sessions{@})"),)),
            Panel(
                "Ended requests",
                "reqps",
                (("{{finished_reason}}", _rate("ray_vllm_request_success_total", "finished_reason")),),
            ),
            Panel(
                "Refused and failed",
                "reqps",
                (
                    ("refused: {{reason}}", _rate("ray_paceline_requests_rejected_total", "reason")),
                    ("failed: {{reason}}", _rate("ray_paceline_requests_failed_total", "reason")),
                ),
            ),
        ),
    ),
    (
        "Speculation",
        (
            Panel(
                "Acceptance",
                "percentunit",
                (
                    (
                        "of draft tokens",
                        _share(
                            "ray_vllm_spec_decode_num_accepted_tokens_total{@}",
                            "ray_vllm_spec_decode_num_draft_tokens_total{@}",
                        ),
                    ),
                ),
            ),
            Panel(
                "Hits",
                "percentunit",
                (
                    (
                        "of rounds",
                        _share(
                            'ray_paceline_rounds_total{@, cause="hit"}', f"ray_paceline_rounds_total{{@{_COMPARED}}}"
                        ),
                    ),
                ),
                "Rounds whose continuation was ready when the last step ended.",
            ),
            Panel(
                "Rounds",
                "ops",
                (("{{cause}}", _rate("ray_paceline_rounds_total", "cause")),),
                "By where the proposal came from.",
            ),
            Panel(
                "Tokens of a round",
                "short",
                (
                    (
                        "mean",
                        _share(
                            "ray_paceline_tokens_per_verification_sum{@}",
                            "ray_paceline_tokens_per_verification_count{@}",
                        ),
                    ),
                ),
            ),
            Panel(
                "Switched off and on",
                "ops",
                (
                    ("off", _rate("ray_paceline_target_drafts_paused_total")),
                    ("on", _rate("ray_paceline_target_drafts_resumed_total")),
                ),
                "Sessions that targets told to do without a draft, and to take one again.",
            ),
            Panel("Link to drafts", "s", _quantiles("ray_paceline_draft_link_seconds")),
        ),
    ),
    (
        "Sizes of the pools",
        tuple(
            Panel(f"{pool.capitalize()}s", "replicas", _size(pool), "Where the policy of the service decides it.")
            for pool in ("target", "draft", "router")
        ),
    ),
    (
        "Target pool",
        (
            Panel(
                "Sessions of targets",
                "sessions",
                (
                    ("open", 'sum(ray_paceline_replica_sessions{@, kind="target"})'),
                    ("waiting", 'sum(ray_paceline_replica_sessions_waiting{@, kind="target"})'),
                    ("at most", 'sum(ray_paceline_replica_sessions_max{@, kind="target"})'),
                    ("replicas", 'count(ray_paceline_replica_sessions_max{@, kind="target"})'),
                ),
            ),
            Panel(
                "KV cache in use",
                "percentunit",
                (("{{ReplicaId}}", "max by (ReplicaId) (ray_vllm_kv_cache_usage_perc{@})"),),
            ),
            Panel("Preempted sessions", "ops", (("preempted", _rate("ray_vllm_num_preemptions_total")),)),
            Panel(
                "Time of targets",
                "percentunit",
                (
                    ("in steps", _rate("ray_paceline_target_step_seconds_total")),
                    ("waiting for drafts", _rate("ray_paceline_target_wait_seconds_total")),
                    ("bubble", _rate("ray_paceline_verify_bubble_seconds_total")),
                ),
                "Seconds of all targets in a second.",
            ),
            Panel(
                "Queue",
                "s",
                _quantiles("ray_vllm_request_queue_time_seconds"),
                "From a request's arrival to admission.",
            ),
            Panel(
                "Sessions moved to another target",
                "ops",
                (("{{reason}}", _rate("ray_paceline_sessions_moved_total", "reason")),),
            ),
        ),
    ),
    (
        "Draft pool",
        (
            Panel(
                "Sessions of drafts",
                "sessions",
                (
                    ("open", 'sum(ray_paceline_replica_sessions{@, kind="draft"})'),
                    ("at most", 'sum(ray_paceline_replica_sessions_max{@, kind="draft"})'),
                    ("replicas", 'count(ray_paceline_replica_sessions_max{@, kind="draft"})'),
                    ("linked, of a router", "min(ray_paceline_draft_replicas_up{@})"),
                ),
            ),
            Panel(
                "Time in tree steps",
                "percentunit",
                (("of all drafts", _rate("ray_paceline_draft_step_seconds_total")),),
                "Seconds in a second.",
            ),
            Panel(
                "Nodes",
                "ops",
                (
                    ("shipped", _rate("ray_paceline_draft_nodes_published_total")),
                    ("used", _rate("ray_paceline_draft_nodes_used_total")),
                    ("stale at targets", _rate("ray_paceline_target_nodes_stale_total")),
                ),
            ),
            Panel(
                "Late",
                "percentunit",
                (
                    (
                        "of misses and hits",
                        _share(
                            'ray_paceline_rounds_total{@, cause="late"}', f"ray_paceline_rounds_total{{@{_COMPARED}}}"
                        ),
                    ),
                ),
            ),
            Panel(
                "Refused and given up",
                "ops",
                (
                    ("refused", _rate("ray_paceline_draft_refused_sessions_total")),
                    ("given up", _rate("ray_paceline_draft_failed_sessions_total")),
                ),
            ),
            Panel("Dropped messages", "ops", (("{{kind}}", _rate("ray_paceline_messages_dropped_total", "kind")),)),
        ),
    ),
    (
        "Ray and Kubernetes",
        (
            Panel("Pods that answer", "short", (("{{pool}}", "count by (pool) (up{@} == 1)"),), "Their exporters."),
            Panel(
                "Nodes",
                "short",
                (
                    ("in the cluster", "sum(autoscaler_active_nodes{@})"),
                    ("pending", "sum(autoscaler_pending_nodes{@})"),
                    ("failed lately", "sum(autoscaler_recently_failed_nodes{@})"),
                    ("exceptions", "sum(increase(autoscaler_update_loop_exceptions{@}[$__rate_interval]))"),
                ),
                "As Ray's autoscaler sees them.",
            ),
            Panel(
                "Proxies (HAProxy)",
                "short",
                (
                    ("open streams", "sum(ray_serve_num_ongoing_grpc_requests{@})"),
                    ("errors a second", _rate("ray_serve_num_grpc_error_requests_total")),
                    ("routers that a proxy does not know", "max(ray_serve_haproxy_target_mismatch{@})"),
                ),
            ),
            Panel(
                "Control store (GCS)",
                "ms",
                _quantiles("ray_gcs_storage_operation_latency_ms"),
                "Its storage: Redis with the component ha, else memory.",
            ),
            Panel(
                "Redis",
                "short",
                (
                    ("ready", f'kube_statefulset_status_replicas_ready{{{_IN}, statefulset="paceline-redis"}}'),
                    ("of its volume, used", f"max(kubelet_volume_stats_used_bytes{_DISK})"),
                    ("of its volume, all", f"max(kubelet_volume_stats_capacity_bytes{_DISK})"),
                ),
                "With the component ha, from kube-state-metrics and the kubelet.",
            ),
            Panel(
                "Pending pods",
                "short",
                (("{{pod}}", f'sum by (pod) (kube_pod_status_phase{{{_IN}, phase="Pending"}}) > 0'),),
                "From kube-state-metrics.",
            ),
        ),
    ),
)


RAY_ROW = "Ray and Kubernetes"
"""The row that one address has nothing for."""


@dataclass(frozen=True)
class Board:
    """A dashboard: where its metrics are scraped."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variables: tuple[tuple[str, str], ...]
    """Name of each of Grafana's variables, and the label that it lists."""
    sessions: str
    """A series that every service has, from which the variables take their values."""
    expression: Callable[[str], str]
    """From a query of ``ROWS`` to what is asked."""


def _of_fleet(query: str) -> str:
    return query.replace("@", _WHERE)


def of_one_address(query: str) -> str:
    """By the names that the service gives its metrics, of which Ray's exporters make their own."""
    query = query.replace("ray_vllm_", "vllm:").replace("ray_paceline_", "paceline_")
    return re.sub(r"\bReplicaId\b", "replica_id", query).replace("@", 'job="$job"')


FLEET = Board(
    "paceline",
    "Paceline",
    ROWS,
    (("namespace", "namespace"), ("cluster", "ray_io_cluster")),
    "ray_paceline_sessions",
    _of_fleet,
)
ONE_ADDRESS = Board(
    "paceline-service",
    "Paceline, one service",
    tuple((title, panels) for title, panels in ROWS if title != RAY_ROW),
    (("job", "job"),),
    "paceline_sessions",
    of_one_address,
)


def expressions(board: Board = FLEET) -> list[str]:
    """Every query, as Grafana sends it but for its own variables."""
    return [board.expression(expr) for _, panels in board.rows for panel in panels for _, expr in panel.queries]


def _variable(board: Board, name: str, label: str) -> dict[str, Any]:
    query = f"label_values({board.sessions}, {label})"
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": name == "cluster",
        "allValue": ".*" if name == "cluster" else None,
        "current": {},
    }


def _panel(board: Board, panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": board.expression(expr), "legendFormat": _legend(board, legend)}
        for i, (legend, expr) in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
    }


def _legend(board: Board, legend: str) -> str:
    return legend if board is FLEET else legend.replace("ReplicaId", "replica_id")


def dashboard(board: Board = FLEET) -> dict[str, Any]:
    """A dashboard as Grafana's model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in board.rows:
        position = {"x": 0, "y": y, "w": _WIDTH * _COLUMNS, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": position, "panels": []})
        y += 1
        for i, panel in enumerate(row):
            at = (i % _COLUMNS * _WIDTH, y + i // _COLUMNS * _HEIGHT)
            panels.append(_panel(board, panel, len(panels) + 1, *at))
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    datasource = {"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["paceline"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [datasource, *(_variable(board, *variable) for variable in board.variables)]},
        "panels": panels,
    }


def dashboard_json(board: Board = FLEET) -> str:
    """The same as text, a panel a line."""
    model = dashboard(board)
    panels = ",\n".join(json.dumps(panel, ensure_ascii=False) for panel in model.pop("panels"))
    return json.dumps(model, ensure_ascii=False).removesuffix("}") + f', "panels": [\n{panels}\n]}}\n'
