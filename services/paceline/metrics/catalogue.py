"""Every metric but the counters of engines, declared with its unit: vLLM's names, the router's, the replicas', the
monitor's.
"""

from __future__ import annotations

from paceline.metrics.declaration import Metric, counter, gauge, histogram
from paceline.types import MAX_DRAFT_TOKENS

# fmt: off
_TTFT_S = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_GAP_S = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SHORT_S = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60)
_TOKENS = tuple(float(n * 10**power) for power in range(6) for n in (1, 2, 5))
_PER_STEP = (1.0, *(float(2**n) for n in range(3, 15)))
_PER_ROUND = (*(float(n) for n in range(1, MAX_DRAFT_TOKENS + 2)),)
# fmt: on

# -- vLLM's names -------------------------------------------------------------------------------------------------

DRAFTS = counter(
    "vllm:spec_decode_num_drafts_total", "rounds", "Rounds that verified at least one draft token.", "model_name"
)
DRAFT_TOKENS = counter(
    "vllm:spec_decode_num_draft_tokens_total",
    "tokens",
    "Draft tokens that were verified, including prompt lookup at targets.",
    "model_name",
)
ACCEPTED_TOKENS = counter(
    "vllm:spec_decode_num_accepted_tokens_total",
    "tokens",
    "Draft tokens that were accepted, including prompt lookup at targets.",
    "model_name",
)
ACCEPTED_PER_POS = counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "tokens",
    "Draft tokens that were accepted, by their position in the proposal.",
    "model_name",
    "position",
)
REQUESTS_RUNNING = gauge("vllm:num_requests_running", "requests", "Requests that a target serves now.", "model_name")
REQUESTS_WAITING = gauge(
    "vllm:num_requests_waiting", "requests", "Requests that wait for admission or for a target.", "model_name"
)
WAITING_BY_REASON = gauge(
    "vllm:num_requests_waiting_by_reason",
    "requests",
    "Waiting requests by reason: waiting for admission (`capacity`), or moved from a failed target (`deferred`).",
    "model_name",
    "reason",
)
TTFT = histogram(
    "vllm:time_to_first_token_seconds", "seconds", "From a request's arrival to its first token.", _TTFT_S, "model_name"
)
INTER_TOKEN = histogram(
    "vllm:inter_token_latency_seconds",
    "seconds",
    "Between two rounds of a request; a round emits one token or more.",
    _GAP_S,
    "model_name",
)
E2E = histogram(
    "vllm:e2e_request_latency_seconds", "seconds", "From a request's arrival to its end.", _REQUEST_S, "model_name"
)
REQUEST_QUEUE = histogram(
    "vllm:request_queue_time_seconds", "seconds", "From a request's arrival to admission.", _REQUEST_S, "model_name"
)
PROMPT_TOKENS = counter("vllm:prompt_tokens_total", "tokens", "Prompt tokens of finished requests.", "model_name")
PROMPT_TOKENS_BY_SOURCE = counter(
    "vllm:prompt_tokens_by_source_total",
    "tokens",
    "Prompt tokens of finished requests that were computed (`local_compute`), or held by the prefix cache "
    "(`local_cache_hit`).",
    "model_name",
    "source",
)
PROMPT_TOKENS_CACHED = counter(
    "vllm:prompt_tokens_cached_total",
    "tokens",
    "Prompt tokens of finished requests that the prefix cache held.",
    "model_name",
)
GENERATION_TOKENS = counter("vllm:generation_tokens_total", "tokens", "Tokens emitted.", "model_name")
ADMISSION_REJECTIONS = counter(
    "vllm:admission_rejections_total",
    "requests",
    "Requests refused because the queue was full (`max_num_queued_reqs`).",
    "model_name",
    "reason",
)
REQUEST_SUCCESS = counter(
    "vllm:request_success_total", "requests", "Requests that ended, by reason.", "model_name", "finished_reason"
)
REQUEST_PREFILL = histogram(
    "vllm:request_prefill_time_seconds",
    "seconds",
    "From the opening of a request's session to its first token.",
    _REQUEST_S,
    "model_name",
)
REQUEST_DECODE = histogram(
    "vllm:request_decode_time_seconds", "seconds", "From a request's first token to its last.", _REQUEST_S, "model_name"
)
REQUEST_INFERENCE = histogram(
    "vllm:request_inference_time_seconds",
    "seconds",
    "From the opening of a request's session to its last token.",
    _REQUEST_S,
    "model_name",
)
REQUEST_PER_TOKEN = histogram(
    "vllm:request_time_per_output_token_seconds",
    "seconds",
    "Decode time of a request per token after its first.",
    _GAP_S,
    "model_name",
)
REQUEST_PROMPT_TOKENS = histogram(
    "vllm:request_prompt_tokens", "tokens", "Prompt tokens of a finished request.", _TOKENS, "model_name"
)
REQUEST_PREFILL_COMPUTED = histogram(
    "vllm:request_prefill_kv_computed_tokens",
    "tokens",
    "Prompt tokens of a finished request that the prefix cache did not hold.",
    _TOKENS,
    "model_name",
)
REQUEST_GENERATION_TOKENS = histogram(
    "vllm:request_generation_tokens", "tokens", "Tokens emitted for a finished request.", _TOKENS, "model_name"
)
REQUEST_MAX_GENERATION = histogram(
    "vllm:request_max_num_generation_tokens",
    "tokens",
    "Tokens emitted for a finished request; each choice counts as a request, and is the longest of its own.",
    _TOKENS,
    "model_name",
)
REQUEST_MAX_TOKENS = histogram(
    "vllm:request_params_max_tokens",
    "tokens",
    "max_tokens of a finished request; the default is lowered to what its prompt leaves of the context.",
    _TOKENS,
    "model_name",
)
ITERATION_TOKENS = histogram(
    "vllm:iteration_tokens_total",
    "tokens",
    "Rows of a step of a target: prompt, context and draft tokens. A histogram, in spite of its name.",
    _PER_STEP,
    "model_name",
)
PREFIX_QUERIES = counter(
    "vllm:prefix_cache_queries_total", "tokens", "Prompt tokens looked up in the prefix cache.", "model_name"
)
PREFIX_HITS = counter(
    "vllm:prefix_cache_hits_total", "tokens", "Prompt tokens that the prefix cache held.", "model_name"
)
KV_USAGE = gauge(
    "vllm:kv_cache_usage_perc", "ratio", "Part of a target's KV cache in use; 1 is all.", "model_name", per_replica=True
)
CACHE_CONFIG = gauge(
    "vllm:cache_config_info",
    "info",
    "1 for a target's KV cache as it is: tokens of a page, and pages.",
    "model_name",
    "block_size",
    "num_gpu_blocks",
    per_replica=True,
)
PREEMPTIONS = counter(
    "vllm:num_preemptions_total", "sessions", "Sessions dropped for lack of KV, to be computed again.", "model_name"
)

# -- the router ---------------------------------------------------------------------------------------------------

ROUNDS = counter("paceline_rounds_total", "rounds", "Rounds, by where the proposal came from.", "cause")
TOKENS_PER_VERIFICATION = histogram(
    "paceline_tokens_per_verification", "tokens", "Tokens that a round emitted, misses included.", _PER_ROUND
)
AHEAD = histogram(
    "paceline_draft_ahead_depth",
    "nodes",
    "Nodes on the best path, at most the lookahead, ready when a step ended; 0 is a miss.",
    (0.0, *_PER_ROUND[:-1]),
)
DRAFT_LINK = histogram("paceline_draft_link_seconds", "seconds", "Latency of the link to a draft.", _SHORT_S)
QUEUE = histogram("paceline_queue_seconds", "seconds", "From a request's arrival to admission.", _SHORT_S)
SESSIONS = gauge(
    "paceline_sessions",
    "sessions",
    "Sessions that wait for admission, run on a target, or wait for another after theirs failed (`homeless`).",
    "state",
)
DROPPED = counter(
    "paceline_messages_dropped_total",
    "messages",
    "Stale or malformed messages, and states and hints that a stream was too slow for, by kind.",
    "kind",
)
MOVED = counter("paceline_sessions_moved_total", "sessions", "Sessions continued on another target.", "reason")
REOPENED = counter("paceline_sessions_reopened_total", "sessions", "Sessions re-opened on a draft.", "reason")
DRAFTS_UP = gauge(
    "paceline_draft_replicas_up", "replicas", "Drafts that a router has a working link to.", per_replica=True
)
REJECTED = counter("paceline_requests_rejected_total", "requests", "Requests refused before a session.", "reason")
FAILED = counter("paceline_requests_failed_total", "requests", "Admitted requests that ended in an error.", "reason")

KEY_RUNNING = gauge(
    "paceline_key_requests_running", "requests", "Requests in progress, by the name of their API key.", "key"
)
KEY_TOKENS = counter(
    "paceline_key_tokens_total", "tokens", "Tokens charged to an API key: `prompt` or `completion`.", "key", "kind"
)
KEY_REFUSED = counter(
    "paceline_key_requests_refused_total", "requests", "Refused by a limit of their API key.", "key", "limit"
)
UNAUTHENTICATED = counter("paceline_unauthenticated_total", "calls", "Calls without an API key, or with a wrong one.")
CERTIFICATE_EXPIRY = gauge(
    "paceline_certificate_expiry_seconds",
    "seconds",
    "When a certificate in use expires, in Unix time: `server` or `internal`.",
    "use",
    per_replica=True,
)
RELOAD_FAILURES = counter(
    "paceline_reload_failures_total",
    "versions",
    "New versions of a file that could not be used, so that the old one stays: `server`, `internal` or `api_keys`.",
    "file",
)

# -- replicas -----------------------------------------------------------------------------------------------------

REPLICA_SESSIONS = gauge(
    "paceline_replica_sessions",
    "sessions",
    "Open sessions of a replica, waiting ones included.",
    "kind",
    per_replica=True,
)
REPLICA_WAITING = gauge(
    "paceline_replica_sessions_waiting",
    "sessions",
    "Open sessions of a replica that wait for room.",
    "kind",
    per_replica=True,
)
REPLICA_CAPACITY = gauge(
    "paceline_replica_sessions_max", "sessions", "Sessions that a replica serves at once.", "kind", per_replica=True
)
REPLICA_BUSY = gauge(
    "paceline_replica_busy_seconds",
    "seconds",
    "Since the step in progress began; 0 between steps.",
    "kind",
    per_replica=True,
)
REPLICA_DRAINING = gauge(
    "paceline_replica_draining", "flag", "1 if a replica takes no new sessions.", "kind", per_replica=True
)
BATCH_INVARIANT = gauge(
    "paceline_target_batch_invariant",
    "flag",
    "1 if verification and decoding gave the same bits when a target started, 0 if not; absent if it was not tested.",
    "model_name",
    per_replica=True,
)
COMPILED = gauge(
    "paceline_replica_compiled",
    "flag",
    "1 if a replica's model on a CPU runs compiled, 0 if eagerly: by choice, until it is compiled, or as that failed.",
    "kind",
    per_replica=True,
)
KV_PAGES = gauge("paceline_kv_pages", "pages", "KV pages of a replica.", "kind", per_replica=True)
KV_PAGES_USED = gauge("paceline_kv_pages_used", "pages", "KV pages of a replica in use.", "kind", per_replica=True)
REPLICAS_UP = gauge("paceline_replicas_up", "replicas", "Processes that report to the monitor now.", "kind")

# -- the monitor --------------------------------------------------------------------------------------------------

SCALING_WANTED = gauge(
    "paceline_scaling_wanted_replicas",
    "replicas",
    "Replicas that a pool should have, where the service decides it.",
    "pool",
)
SCALING_ACTUAL = gauge(
    "paceline_scaling_actual_replicas", "replicas", "Replicas of an autoscaled pool that take sessions.", "pool"
)
SCALING_DEMAND = gauge(
    "paceline_scaling_demand_replicas",
    "replicas",
    "Replicas that the current load of an autoscaled pool needs, not rounded.",
    "pool",
)
SCALING_CHANGES = counter(
    "paceline_scaling_changes_total",
    "changes",
    "Changes of a pool's requested number of replicas, by direction.",
    "pool",
    "direction",
)
CONTROLLER: dict[str, Metric] = {
    name: gauge(f"paceline_controller_{name}", unit, help_, *labels, per_replica=True)
    for name, unit, help_, *labels in (
        ("drafting", "flag", "1 if a target requests drafts at its current load."),
        ("sessions_paused", "sessions", "Sessions for which a target has paused drafting."),
        (
            "acceptance",
            "ratio",
            "Recent probability that a draft token is accepted, given that all tokens before it were.",
        ),
        ("mean_draft_tokens", "tokens", "Mean length of a proposal over the last few hundred rounds."),
        (
            "draft_tokens_share",
            "ratio",
            "Share of the last few hundred rounds, by the length of the proposal.",
            "tokens",
        ),
        ("step_seconds", "seconds", "Expected time of a step, by its tokens.", "tokens"),
        ("head_on", "flag", "1 if a head is used at its target's current load; 0: paused, or switched off.", "head"),
        (
            "head_acceptance",
            "ratio",
            "Recent probability that a token of a head is accepted, given that all tokens before it were.",
            "head",
        ),
        ("head_seconds", "seconds", "Time of one depth of a head for one session.", "head"),
        (
            "tokens_per_second",
            "tokens/s",
            "Last measured rate at the current load, with drafting and without.",
            "decoding",
        ),
    )
}
"""Gauges that a target's controller decides by, by the name that its status gives them."""
STATES: dict[str, Metric] = {
    name: gauge(f"paceline_{name}", "states", help_, per_replica=True)
    for name, help_ in (
        ("state_slots", "Slots of a target for states of linear layers. Absent for a model without such layers."),
        ("state_slots_used", "Slots that hold a state; the others are free."),
        ("prefix_states", "States that no session holds, kept for cached prefixes: the first ones to give way."),
    )
}
"""Gauges of linear layers, by the name that a target's status gives them."""
