{{- define "paceline.image" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end }}

{{/* What every container may do. */}}
{{- define "paceline.confined" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "paceline.user" -}}
{runAsNonRoot: true, runAsUser: 1000, runAsGroup: 100, fsGroup: 100, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{/* Seconds from the notice of a pod that leaves: its sessions end, Ray leaves. */}}
{{- define "paceline.gracefulSeconds" -}}{{ add .Values.longestSessionSeconds 30 }}{{- end }}
{{- define "paceline.leavingSeconds" -}}{{ add .Values.longestSessionSeconds 30 .Values.coldStartSeconds }}{{- end }}

{{- define "paceline.claim" -}}{{ .Values.models.claim.existing | default (printf "%s-models" .Release.Name) }}{{- end }}

{{/* Environment of every process, as YAML. */}}
{{- define "paceline.environment" -}}
{{- $found := dict }}
{{- range .Files.Lines "files/environment.env" }}
{{- if and . (not (hasPrefix "#" .)) }}
{{- $pair := splitn "=" 2 . }}
{{- $_ := set $found $pair._0 $pair._1 }}
{{- end }}
{{- end }}
{{- if ne .Values.models.from "package" }}
{{- $_ := mergeOverwrite $found (dict "HF_HOME" "/models" "HF_HUB_OFFLINE" "1") }}
{{- end }}
{{- if gt (int .Values.target.podsPerReplica) 1 }}
{{- $_ := mergeOverwrite $found (dict "NCCL_SOCKET_IFNAME" .Values.target.interface "GLOO_SOCKET_IFNAME" .Values.target.interface) }}
{{- end }}
{{- if .Values.logs.enabled }}
{{- $_ := set $found "RAY_SERVE_HAPROXY_LOG_TARGET" "127.0.0.1:5514" }}
{{- end }}
{{- if .Values.tls.enabled }}
{{- $_ := set $found "PACELINE_TLS" (dict "server" (include "paceline.serverTls" . | fromYaml) "internal" (include "paceline.internalTls" . | fromYaml) | toJson) }}
{{- end }}
{{- toYaml (mergeOverwrite $found .Values.environment) }}
{{- end }}

{{/* Another name for other content, so that pods of the cluster before keep theirs. */}}
{{- define "paceline.environmentName" -}}
{{ .Release.Name }}-environment-{{ include "paceline.environment" . | sha256sum | trunc 10 }}
{{- end }}

{{- define "paceline.serverTls" -}}
{certificate: /etc/paceline/tls/tls.crt, key: /etc/paceline/tls/tls.key, http: false}
{{- end }}
{{- define "paceline.internalTls" -}}
{certificate: /etc/paceline/internal/tls.crt, key: /etc/paceline/internal/tls.key, ca: /etc/paceline/internal/ca.crt}
{{- end }}

{{/* Least and most replicas of a pool: of a deployment. */}}
{{- define "paceline.least" -}}
{{- if .autoscaling_config }}{{ dig "autoscaling_config" "min_replicas" 1 . }}{{ else }}{{ .num_replicas | default 1 }}{{ end }}
{{- end }}
{{- define "paceline.most" -}}
{{- $most := int (.autoscaling_config | default dict | dig "max_replicas" (.num_replicas | default 1)) }}
{{- add $most (ceil (divf (mul $most (int (.max_surge_percent | default 0))) 100)) }}
{{- end }}

{{/* GPUs of a pod, 0 on CPUs: (dict "pool" of values "ranks" of a pod). */}}
{{- define "paceline.gpus" -}}
{{ if or .pool.gpu.resource .pool.gpu.deviceClass }}{{ .ranks }}{{ else }}0{{ end }}
{{- end }}

{{/* Cores of a target's pod for the draft beside it: 0 where drafts have pods of their own. */}}
{{- define "paceline.besideTarget" -}}
{{- $draft := .Values.draft }}
{{- if and $draft.enabled $draft.onTargetNodes }}
{{- if gt (int .Values.target.podsPerReplica) 1 }}
{{- fail (printf "target.podsPerReplica is %v: with draft.onTargetNodes only 1 is allowed" .Values.target.podsPerReplica) }}
{{- end }}
{{- if or $draft.gpu.resource $draft.gpu.deviceClass $draft.spot }}
{{- fail "draft.onTargetNodes is true with a GPU of the draft, or draft.spot: a draft beside its target has neither" }}
{{- end }}
{{- $draft.cpus }}
{{- else }}0{{ end }}
{{- end }}

{{/* Ranks of a target that share a pod. */}}
{{- define "paceline.ranks" -}}
{{- with .Values.target }}
{{- if mod .tensorParallelSize .podsPerReplica }}
{{- fail (printf "target.podsPerReplica is %v: it must divide target.tensorParallelSize, which is %v" .podsPerReplica .tensorParallelSize) }}
{{- end }}
{{- div .tensorParallelSize .podsPerReplica }}
{{- end }}
{{- end }}
