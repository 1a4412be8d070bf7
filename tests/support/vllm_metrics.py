"""What vLLM 0.33.0 exports and what its own Grafana boards ask for, as facts; and why some of it is not exported here.

Names: ``vllm/v1/metrics/loggers.py``, ``vllm/v1/metrics/perf.py`` and ``vllm/v1/spec_decode/metrics.py``, as a scrape
shows them. Boards: ``examples/observability`` of its repository.
"""

from __future__ import annotations

LABELLED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "corrupted_requests_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "external_prefix_cache_queries_total",
            "external_prefix_cache_hits_total",
            "mm_cache_queries_total",
            "mm_cache_hits_total",
            "num_preemptions_total",
            "prompt_tokens_total",
            "prompt_tokens_cached_total",
            "generation_tokens_total",
            "request_prompt_tokens",
            "request_generation_tokens",
            "iteration_tokens_total",
            "request_max_num_generation_tokens",
            "request_params_n",
            "request_params_max_tokens",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "e2e_request_latency_seconds",
            "request_queue_time_seconds",
            "request_inference_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_num_preemptions",
            "request_prefill_kv_computed_tokens",
            "kv_block_lifetime_seconds",
            "kv_block_idle_before_evict_seconds",
            "kv_block_reuse_gap_seconds",
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
            "diffusion_num_denoising_steps_total",
            "diffusion_num_canvas_positions_total",
            "diffusion_num_committed_tokens_total",
            "estimated_flops_per_gpu_total",
            "estimated_read_bytes_per_gpu_total",
            "estimated_write_bytes_per_gpu_total",
        ),
        ("model_name", "engine"),
    ),
    "num_requests_waiting_by_reason": ("model_name", "engine", "reason"),
    "num_requests_kv_fetch_by_stage": ("model_name", "engine", "stage"),
    "engine_sleep_state": ("model_name", "engine", "sleep_state"),
    "watermark_requests_total": ("model_name", "engine", "status"),
    "prompt_tokens_by_source_total": ("model_name", "engine", "source"),
    "prompt_tokens_cached_by_source_total": ("model_name", "engine", "source"),
    "request_success_total": ("model_name", "engine", "finished_reason"),
    "spec_decode_num_accepted_tokens_per_pos_total": ("model_name", "engine", "position"),
    "admission_rejections_total": ("model_name", "reason"),
    "cache_config_info": ("engine", "block_size", "num_gpu_blocks"),
    "lora_requests_info": ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
}
"""Name behind ``vllm:`` -> the labels that it has there; of ``cache_config_info`` those that have a meaning here."""

ABSENT: dict[str, tuple[str, ...]] = {
    "nothing here is it: KV from other instances, caches of images, adapters, sleeping, text diffusion, watermarks": (
        "external_prefix_cache_queries_total",
        "external_prefix_cache_hits_total",
        "prompt_tokens_cached_by_source_total",
        "num_requests_kv_fetch_by_stage",
        "mm_cache_queries_total",
        "mm_cache_hits_total",
        "lora_requests_info",
        "engine_sleep_state",
        "diffusion_num_denoising_steps_total",
        "diffusion_num_canvas_positions_total",
        "diffusion_num_committed_tokens_total",
        "watermark_requests_total",
    ),
    "each choice of a request is a request of its own": ("request_params_n",),
    "preemptions are counted by targets, not by request": ("request_num_preemptions",),
    "optional there; not measured here": (
        "corrupted_requests_total",
        "kv_block_lifetime_seconds",
        "kv_block_idle_before_evict_seconds",
        "kv_block_reuse_gap_seconds",
        "estimated_flops_per_gpu_total",
        "estimated_read_bytes_per_gpu_total",
        "estimated_write_bytes_per_gpu_total",
    ),
}
"""Why names of ``LABELLED`` are not exported here -> which."""

_HISTOGRAM = ("bucket", "sum", "count")


def _series(labels: tuple[str, ...], *names: str, **histograms: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys((*names, *(f"{name}_{part}" for name, parts in histograms.items() for part in parts)), labels)


_MODEL, _ENGINE = ("model_name",), ("model_name", "engine")

BOARDS: dict[str, dict[str, tuple[str, ...]]] = {
    "prometheus_grafana/grafana.json": {
        **_series(
            _MODEL,
            "prompt_tokens_total",
            "generation_tokens_total",
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            e2e_request_latency_seconds=_HISTOGRAM,
            inter_token_latency_seconds=_HISTOGRAM,
            time_to_first_token_seconds=_HISTOGRAM,
            request_prompt_tokens=("bucket",),
            request_generation_tokens=("bucket",),
            request_queue_time_seconds=("sum",),
            request_prefill_time_seconds=("sum",),
            request_decode_time_seconds=("sum",),
            request_max_num_generation_tokens=("sum",),
        ),
        "request_success_total": ("model_name", "finished_reason"),
    },
    "dashboards/grafana/vllm_speculative_decoding.json": {
        **_series(
            _ENGINE,
            "spec_decode_num_drafts_total",
            "spec_decode_num_draft_tokens_total",
            "spec_decode_num_accepted_tokens_total",
            "generation_tokens_total",
            "num_requests_running",
            inter_token_latency_seconds=_HISTOGRAM,
        ),
        "spec_decode_num_accepted_tokens_per_pos_total": (*_ENGINE, "position"),
    },
    "dashboards/grafana/vllm_overview.json": {
        **_series(
            _MODEL,
            "prompt_tokens_total",
            "generation_tokens_total",
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "num_preemptions_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "external_prefix_cache_queries_total",
            "external_prefix_cache_hits_total",
            "mm_cache_queries_total",
            "mm_cache_hits_total",
            e2e_request_latency_seconds=_HISTOGRAM,
            inter_token_latency_seconds=_HISTOGRAM,
            time_to_first_token_seconds=_HISTOGRAM,
            request_time_per_output_token_seconds=_HISTOGRAM,
            request_prompt_tokens=_HISTOGRAM,
            request_generation_tokens=_HISTOGRAM,
            request_queue_time_seconds=_HISTOGRAM,
            request_prefill_time_seconds=("sum", "count"),
            request_decode_time_seconds=("sum", "count"),
            iteration_tokens_total=_HISTOGRAM,
        ),
        "request_success_total": ("model_name", "finished_reason"),
        "num_requests_waiting_by_reason": ("model_name", "reason"),
        "prompt_tokens_by_source_total": ("model_name", "source"),
    },
}
"""Board -> the series behind ``vllm:`` of its queries, with the labels by which these choose and sum. ``job`` and
``instance`` are Prometheus' own. The overview's panels of HTTP requests ask for a library's names, not for vLLM's."""

CHOSEN = {
    ("num_requests_waiting_by_reason", "reason"): {"capacity", "deferred"},
    ("prompt_tokens_by_source_total", "source"): {"local_compute", "local_cache_hit"},
    ("request_success_total", "finished_reason"): {"stop", "length", "abort", "error"},
}
"""Values that the overview's queries and colors name, but for those of ``ABSENT`` things."""
