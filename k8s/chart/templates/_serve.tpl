{{/* Our own part of a deployment, the values of the pool laid over it. */}}
{{- define "paceline.deployment" -}}
{{- $actor := dict "num_cpus" .pool.cpus }}
{{- if not .pool.onTargetNodes }}{{ $_ := set $actor "label_selector" (dict "paceline/pool" .name) }}{{ end }}
{{- if .gpu }}{{ $_ := set $actor "num_gpus" 1 }}{{ end }}
{{- $own := dict "graceful_shutdown_timeout_s" (include "paceline.gracefulSeconds" .root | int) "ray_actor_options" $actor }}
{{- if .pool.onTargetNodes }}{{ $_ := set $own "on_target_nodes" true }}{{ end }}
{{- toYaml (mergeOverwrite $own .pool.deployment) }}
{{- end }}

{{- define "paceline.loading" -}}
{{- $found := dict "model_id" .model }}
{{- with .source }}{{ $_ := set $found "model_source" . }}{{ end }}
{{- with .tokenizer }}{{ $_ := set $found "tokenizer_source" . }}{{ end }}
{{- toYaml $found }}
{{- end }}

{{/* A pool with an engine. */}}
{{- define "paceline.engine" -}}
model_loading_config: {{- include "paceline.loading" .pool | nindent 2 }}
engine_kwargs: {{- toYaml .engine | nindent 2 }}
deployment_config: {{- include "paceline.deployment" . | nindent 2 }}
{{- end }}

{{/* The application's args: a ServiceConfig. */}}
{{- define "paceline.args" -}}
{{- $v := .Values }}
{{- $ranks := int (include "paceline.ranks" .) }}
{{- $gpu := ne (include "paceline.gpus" (dict "pool" $v.target "ranks" $ranks)) "0" }}
{{- $engine := deepCopy $v.target.engine }}
{{- if gt (int $v.target.tensorParallelSize) 1 }}{{ $_ := set $engine "tensor_parallel_size" $v.target.tensorParallelSize }}{{ end }}
{{- $target := include "paceline.engine" (dict "root" . "name" "target" "pool" $v.target "engine" $engine "gpu" $gpu) | fromYaml }}
{{- if gt (int $v.target.podsPerReplica) 1 }}
{{- $bundles := list }}
{{- range until (int $v.target.tensorParallelSize) }}
{{- $bundles = append $bundles (merge (dict "CPU" $v.target.cpus) (ternary (dict "GPU" 1) dict $gpu)) }}
{{- end }}
{{- $_ := set $target "placement_group_config" (dict "strategy" "PACK" "bundles" $bundles) }}
{{- end }}
{{- $draft := dict }}
{{- if $v.draft.enabled }}
{{- $gpu = ne (include "paceline.gpus" (dict "pool" $v.draft "ranks" 1)) "0" }}
{{- $draft = include "paceline.engine" (dict "root" . "name" "draft" "pool" $v.draft "engine" $v.draft.engine "gpu" $gpu) | fromYaml }}
{{- $_ := set $draft "kind" "model" }}
{{- end }}
{{- $router := dict "max_queued_requests" $v.router.maxQueuedRequests "request_timeout_s" $v.longestSessionSeconds "cold_start_timeout_s" $v.coldStartSeconds }}
{{- $_ := set $router "deployment_config" (include "paceline.deployment" (dict "root" . "name" "router" "pool" $v.router "gpu" false) | fromYaml) }}
{{- $server := dict "host" "0.0.0.0" "grpc_port" 9000 "http_port" 8000 }}
{{- $args := dict "target_config" $target "router_config" $router "server" $server "log" (dict "level" "INFO" "json" true) }}
{{- $_ := set $args "draft_config" (ternary $draft nil $v.draft.enabled) }}
{{- if $v.tls.enabled }}
{{- $_ := set $server "tls" (include "paceline.serverTls" . | fromYaml) }}
{{- $_ := set $args "internal_tls" (include "paceline.internalTls" . | fromYaml) }}
{{- end }}
{{- if $v.apiKeys.enabled }}{{ $_ := set $server "api_keys" "/etc/paceline/keys/keys.yaml" }}{{ end }}
{{- toYaml (mergeOverwrite $args $v.config) }}
{{- end }}

{{- define "paceline.serveConfig" -}}
proxy_location: EveryNode
http_options:
  host: 0.0.0.0
  port: 8000
grpc_options:
  port: 9000
  grpc_servicer_functions:
    - paceline.rpc.services.add_generation
    - paceline.rpc.services.add_health
    - paceline.rpc.services.add_reflection
logging_config:
  log_level: WARNING
  enable_access_log: false
applications:
  - name: paceline
    route_prefix: /
    import_path: paceline.app:build
{{- if .Values.externalScaler }}
{{- range $name := list "target" "draft" "router" }}
{{- if (index $.Values $name).deployment.autoscaling_config }}
{{- fail (printf "%s.deployment.autoscaling_config is set: with externalScaler it must be null, and num_replicas be given" $name) }}
{{- end }}
{{- end }}
    external_scaler_enabled: true
{{- end }}
    args: {{- include "paceline.args" . | nindent 6 }}
{{- end }}
