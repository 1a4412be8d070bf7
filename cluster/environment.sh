# What every process of a cluster is started with. `ray up` ships this file to each node as ~/paceline/environment.sh, and
# the start commands source it. Variables that are set already stay as they are.

export PATH=$HOME/paceline/venv/bin:$PATH

# -- who may join, and who may deploy: whoever has the token (~/.ray/auth_token, shipped too) ---------------------------
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}

# -- how soon a node that is gone is replaced: 10 to 20 s after its cable is pulled instead of 65 s (read by the head). Streams
# do not wait for it: their links notice by themselves. Sooner than this, a head that is short of CPU kills its fleet. ---
export RAY_health_check_initial_delay_ms=${RAY_health_check_initial_delay_ms:-1000}
export RAY_health_check_period_ms=${RAY_health_check_period_ms:-500}
export RAY_health_check_timeout_ms=${RAY_health_check_timeout_ms:-500}
export RAY_health_check_failure_threshold=${RAY_health_check_failure_threshold:-20}

# -- the head may be away for ten minutes: it keeps its state on disk, nodes wait for it --------------------------------
export RAY_gcs_rpc_server_reconnect_timeout_s=${RAY_gcs_rpc_server_reconnect_timeout_s:-600}
export RAY_gcs_storage=${RAY_gcs_storage:-rocksdb}
export RAY_gcs_storage_path=${RAY_gcs_storage_path:-$HOME/paceline/gcs}

# -- Ray Serve, as `paceline serve --print-environment` has it, with ports that are the same on every node --------------
export RAY_SERVE_ENABLE_HA_PROXY=${RAY_SERVE_ENABLE_HA_PROXY:-1}
export RAY_SERVE_THROUGHPUT_OPTIMIZED=${RAY_SERVE_THROUGHPUT_OPTIMIZED:-1}
export RAY_SERVE_GRPC_MAX_MESSAGE_SIZE=${RAY_SERVE_GRPC_MAX_MESSAGE_SIZE:-16777216}
export RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S=${RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S:-86400}
export RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S=${RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S:-86400}
export RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS=${RAY_SERVE_HAPROXY_H2_FE_MAX_CONCURRENT_STREAMS:-1000}
# Paceline's program starts HAProxy, and lets gRPC pass by connection.
export RAY_SERVE_HAPROXY_BINARY_PATH=${RAY_SERVE_HAPROXY_BINARY_PATH:-$(command -v paceline-haproxy)}
export RAY_SERVE_HAPROXY_STATS_PORT=${RAY_SERVE_HAPROXY_STATS_PORT:-8404}
export RAY_SERVE_HAPROXY_METRICS_PORT=${RAY_SERVE_HAPROXY_METRICS_PORT:-9101}
export RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT=${RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT:-22000}
export RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT=${RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT:-22499}
export RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT=${RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT:-22500}
export RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT=${RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT:-22999}
export RAY_SERVE_FALLBACK_PROXY_HTTP_PORT=${RAY_SERVE_FALLBACK_PROXY_HTTP_PORT:-8500}
export RAY_SERVE_FALLBACK_PROXY_GRPC_PORT=${RAY_SERVE_FALLBACK_PROXY_GRPC_PORT:-9500}
export RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S=${RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S:-2.0}
export RAY_SERVE_PORT_QUARANTINE_S=${RAY_SERVE_PORT_QUARANTINE_S:-0}
export RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S=${RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S:-2}
export RAY_SERVE_METRICS_EXPORT_INTERVAL_MS=${RAY_SERVE_METRICS_EXPORT_INTERVAL_MS:-1000}
export RAY_SERVE_CONTROL_LOOP_INTERVAL_S=${RAY_SERVE_CONTROL_LOOP_INTERVAL_S:-0.25}
export RAY_worker_niceness=${RAY_worker_niceness:-0}
export RAY_USAGE_STATS_ENABLED=${RAY_USAGE_STATS_ENABLED:-0}
export MALLOC_ARENA_MAX=${MALLOC_ARENA_MAX:-2}

# -- models and what is compiled of them --------------------------------------------------------------------------------
export HF_HOME=${HF_HOME:-$HOME/paceline/huggingface}
export PACELINE_CACHE=${PACELINE_CACHE:-$HOME/paceline/cache}

# -- `ray stop`, and the end of a HAProxy whose keeper was killed: it would hold the ports of the next one ----------------
stop_ray() {
  ray stop "$@"
  stopped=$?
  pkill -KILL -u "$(id -u)" -f '/haproxy-serve/[^ ]*haproxy[.]cfg'
  return $stopped
}
