{{/* Where a pool's pods may run: kinds of GPUs by the labels of who makes the nodes, zones, spot machines first. */}}
{{- define "paceline.affinity" -}}
{{- $v := .root.Values }}
{{- $all := list }}
{{- with $v.nodes.zones }}{{ $all = append $all (dict "key" "topology.kubernetes.io/zone" "operator" "In" "values" .) }}{{ end }}
{{- $spot := dict }}
{{- if .pool.spot }}
{{- if eq $v.nodes.autoscaler "karpenter" }}
{{- $all = append $all (dict "key" "karpenter.sh/capacity-type" "operator" "In" "values" (list "spot" "on-demand")) }}
{{- else if eq $v.nodes.autoscaler "gke" }}
{{- $spot = dict "key" "cloud.google.com/gke-spot" "operator" "In" "values" (list "true") }}
{{- else if eq $v.nodes.autoscaler "eks" }}
{{- $spot = dict "key" "eks.amazonaws.com/capacityType" "operator" "In" "values" (list "SPOT") }}
{{- end }}
{{- end }}
{{- $known := .root.Files.Get "files/gpus.yaml" | fromYaml }}
{{- $maker := $v.nodes.autoscaler | default "discovery" }}
{{- $terms := list }}
{{- range $kind := .kinds }}
{{- $labels := dict "paceline/gpu" $kind }}
{{- if ne $maker "eks" }}
{{- $labels = dig $kind $maker dict $known }}
{{- if not $labels }}{{ include "paceline.unknownKind" (dict "kind" $kind "maker" $maker "known" $known) }}{{ end }}
{{- end }}
{{- $own := $all }}
{{- range $key, $value := $labels }}{{ $own = append $own (dict "key" $key "operator" "In" "values" (list $value)) }}{{ end }}
{{- $terms = append $terms (dict "matchExpressions" $own) }}
{{- end }}
{{- if and $all (not $terms) }}{{ $terms = list (dict "matchExpressions" $all) }}{{ end }}
{{- $node := dict }}
{{- if $terms }}{{ $_ := set $node "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) }}{{ end }}
{{- if $spot }}{{ $_ := set $node "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "preference" (dict "matchExpressions" (list $spot)))) }}{{ end }}
{{- if $node }}affinity: {{- toYaml (dict "nodeAffinity" $node) | nindent 2 }}{{ end }}
{{- end }}

{{- define "paceline.unknownKind" -}}
{{- $kinds := list }}
{{- range $kind, $labels := .known }}{{ if hasKey $labels $.maker }}{{ $kinds = append $kinds $kind }}{{ end }}{{ end }}
{{- fail (printf "gpu.kinds has %s: with labels of %s it may be %s" .kind .maker (sortAlpha $kinds | join ", ")) }}
{{- end }}

{{/* Requests and limits of a pod's container. */}}
{{- define "paceline.resources" -}}
{{- $gpus := int .gpus }}
{{- $found := deepCopy (.pool.resources | default dict) }}
{{- if not $found }}
{{- $more := int (.more | default 0) }}
{{- $cores := add (mul (.pool.cpus | default 1) (.ranks | default 1)) $more }}
{{- $limits := dict "cpu" (add1 $cores | toString) "memory" (printf "%dGi" (mul 3 (.ranks | default 1))) }}
{{- $amount := merge (dict "cpu" (toString $cores) "ephemeral-storage" "2Gi") $limits }}
{{- if $gpus }}
{{- $limits = dict "cpu" (add (mul (max 5 (add1 .pool.cpus)) $gpus) $more | toString) "memory" (printf "%dGi" (mul 60 $gpus)) }}
{{- $amount = merge (dict "ephemeral-storage" "20Gi") $limits }}
{{- end }}
{{- $found = dict "requests" $amount "limits" $limits }}
{{- end }}
{{- $devices := deepCopy (.pool.fabric | default dict) }}
{{- if and $gpus .pool.gpu.resource }}{{ $_ := set $devices .pool.gpu.resource $gpus }}{{ end }}
{{- if and (eq .root.Values.models.from "download") (hasKey .root.Values.models.roomGi .name) }}
{{- $_ := set (get $found "requests") "ephemeral-storage" (printf "%dGi" (add 20 (index .root.Values.models.roomGi .name))) }}
{{- end }}
{{- $own := dict "requests" (merge (deepCopy $devices) ($found.requests | default dict)) "limits" (merge (deepCopy $devices) ($found.limits | default dict)) }}
{{- if and $gpus .pool.gpu.deviceClass }}{{ $_ := set $own "claims" (list (dict "name" "gpus")) }}{{ end }}
{{- toYaml $own }}
{{- end }}

{{- define "paceline.volumes" -}}
{{- $v := .root.Values }}
- {name: tmp, emptyDir: {sizeLimit: 20Gi}}
- {name: cache, emptyDir: {sizeLimit: 20Gi}}
- {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}}
{{- if eq .name "head" }}
- {name: ray, emptyDir: {sizeLimit: 20Gi}} # KubeRay would make one of its own, which no other container sees
{{- else if eq $v.models.from "download" }}
- {name: models, emptyDir: {sizeLimit: {{ index $v.models.roomGi .name }}Gi}}
{{- else if ne $v.models.from "package" }}
- {name: models, persistentVolumeClaim: {claimName: {{ include "paceline.claim" .root }}, readOnly: true}}
{{- end }}
{{- if $v.tls.enabled }}
- {name: tls, secret: {secretName: {{ $v.tls.secret }}, defaultMode: 0440}}
- {name: internal-tls, secret: {secretName: {{ $v.tls.internalSecret }}, defaultMode: 0440}}
{{- end }}
{{- if $v.apiKeys.enabled }}
- {name: api-keys, secret: {secretName: {{ $v.apiKeys.secret }}, defaultMode: 0440}}
{{- end }}
{{- if $v.logs.enabled }}
- {name: logs, configMap: {name: {{ .root.Release.Name }}-logs}}
{{- end }}
{{- end }}

{{- define "paceline.mounts" -}}
{{- $v := .root.Values }}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
- {name: shm, mountPath: /dev/shm}
{{- if eq .name "head" }}
- {name: ray, mountPath: /tmp/ray}
{{- else if eq $v.models.from "download" }}
- {name: models, mountPath: /models}
{{- else if ne $v.models.from "package" }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if $v.tls.enabled }}
- {name: tls, mountPath: /etc/paceline/tls, readOnly: true}
- {name: internal-tls, mountPath: /etc/paceline/internal, readOnly: true}
{{- end }}
{{- if $v.apiKeys.enabled }}
- {name: api-keys, mountPath: /etc/paceline/keys, readOnly: true}
{{- end }}
{{- end }}

{{/* Containers before Ray's; the one that prints logs goes on beside it and ends after it. */}}
{{- define "paceline.initContainers" -}}
{{- $v := .root.Values }}
{{- $image := include "paceline.image" $v.image }}
{{- if $v.logs.enabled }}
- name: logs
  image: {{ $v.logs.image }}
  imagePullPolicy: IfNotPresent
  restartPolicy: Always
  args: [--config=/etc/paceline-logs/fluent-bit.conf]
  resources: {requests: {cpu: 50m, memory: 64Mi}, limits: {cpu: 200m, memory: 128Mi}}
  securityContext: {{- include "paceline.confined" . | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp, readOnly: true}
{{- if eq .name "head" }}
    - {name: ray, mountPath: /tmp/ray, readOnly: true}
{{- end }}
    - {name: logs, mountPath: /etc/paceline-logs, readOnly: true}
{{- end }}
{{- if and (ne .gpus "0") .pool.gpu.checkDriver }}
{{- $resources := dict "requests" (dict "cpu" "1" "memory" "4Gi") "limits" (dict "cpu" "1" "memory" "4Gi") }}
- name: check-driver # torch of CUDA 13 needs a driver of 580 or newer; the error says so in one line
  image: {{ $image }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  command: [python, -c, "import torch; torch.cuda.init(); print(torch.cuda.get_device_name(), torch.version.cuda)"]
  env: [{name: HOME, value: /tmp}]
  resources: {{- include "paceline.resources" (dict "root" .root "name" "check" "gpus" .gpus "pool" (dict "gpu" .pool.gpu "resources" $resources)) | nindent 4 }}
  securityContext: {{- include "paceline.confined" . | nindent 4 }}
  volumeMounts: [{name: tmp, mountPath: /tmp}]
{{- end }}
{{- if ne .name "head" }}
{{- if eq $v.models.from "download" }}
- name: fetch-models
  image: {{ $image }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  command:
    - bash
    - -ec
    - |
      {{- include "paceline.fetches" . | default "true" | nindent 6 }}
  env:
    - {name: HF_HOME, value: /models}
    - {name: HOME, value: /tmp}
    - {{ include "paceline.hubToken" .root }}
  resources:
    requests: {cpu: "1", memory: 2Gi, ephemeral-storage: {{ add 20 (index $v.models.roomGi .name) }}Gi}
    limits: {cpu: "4", memory: 4Gi}
  securityContext: {{- include "paceline.confined" . | nindent 4 }}
  volumeMounts: [{name: models, mountPath: /models}, {name: tmp, mountPath: /tmp}]
{{- else if eq $v.models.from "node-cache" }}
- name: wait-for-models
  image: {{ $image }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  command:
    - bash
    - -ec
    - |
      {{- $mark := include "paceline.mark" . }}
      until [ -e {{ $mark }} ]; do
        echo "waiting for {{ $mark }}: is the node labelled paceline/models?"
        sleep 5
      done
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {cpu: 100m, memory: 64Mi}}
  securityContext: {{- include "paceline.confined" . | nindent 4 }}
  volumeMounts: [{name: models, mountPath: /models, readOnly: true}]
{{- end }}
{{- end }}
{{- end }}

{{/* What pods of the head and of workers share. */}}
{{- define "paceline.podSpec" -}}
{{- $v := .root.Values }}
securityContext: {{ include "paceline.user" . }}
enableServiceLinks: false
{{- with $v.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- if $v.priorityClasses.enabled }}
priorityClassName: {{ .root.Release.Namespace }}{{ if eq .name "draft" }}-draft{{ end }}
{{- end }}
{{- with .pool.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .pool.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if ne .name "head" }}
{{- with include "paceline.affinity" . }}
{{ . }}
{{- end }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "paceline.initContainers" . }}
initContainers: {{- . | nindent 2 }}
{{- end }}
volumes: {{- include "paceline.volumes" . | nindent 2 }}
{{- end }}

{{- define "paceline.annotations" -}}
{cluster-autoscaler.kubernetes.io/safe-to-evict: "false", karpenter.sh/do-not-disrupt: "true"}
{{- end }}

{{/* Names of the serve ports: KubeRay's route of an incremental upgrade leads to the one that is called serve. */}}
{{- define "paceline.httpPort" -}}{{ ternary "serve-http" "serve" .Values.upgrade.incremental }}{{- end }}
{{- define "paceline.grpcPort" -}}{{ ternary "serve" "serve-grpc" .Values.upgrade.incremental }}{{- end }}

{{/* A worker group. */}}
{{- define "paceline.group" -}}
{{- $v := .root.Values }}
{{- $pods := int .pods }}
{{- $least := mul (include "paceline.least" .pool.deployment | int) $pods }}
{{- $most := mul (include "paceline.most" .pool.deployment | int) $pods }}
{{- if gt (int $most) (int .pool.maxPods) }}
{{- fail (printf "%s.maxPods is %v: %v are needed for max_replicas, their surge and pods of each" .name .pool.maxPods $most) }}
{{- end }}
groupName: {{ .name }}
replicas: {{ $least }}
minReplicas: 0 # Serve alone decides: KubeRay carries no change of these bounds to a cluster that runs
maxReplicas: {{ .pool.maxPods }}
numOfHosts: 1
idleTimeoutSeconds: {{ .pool.idleTimeoutSeconds }}
{{- with .pool.priority }}
priority: {{ . }}
{{- end }}
labels: {paceline/pool: {{ .name }}}
rayStartParams:
  num-cpus: {{ add (mul .pool.cpus .ranks) .more | quote }}
{{- if and (ne .gpus "0") (ne .pool.gpu.resource "nvidia.com/gpu") }}
  num-gpus: {{ .gpus | quote }} # Ray counts nvidia.com/gpu by itself
{{- end }}
  object-store-memory: "100000000"
template:
  metadata:
    labels: {app.kubernetes.io/part-of: paceline, paceline/pool: {{ .name }}}
    annotations: {{ include "paceline.annotations" . }} # Ray's autoscaler says which pods may go
  spec: {{- include "paceline.podSpec" . | nindent 4 }}
    terminationGracePeriodSeconds: {{ if .pool.spot }}120{{ else }}{{ add 60 (include "paceline.leavingSeconds" .root) }}{{ end }}
    automountServiceAccountToken: false
    topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" (and $v.ha.enabled (eq .name "router")) }}
        labelSelector: {matchLabels: {paceline/pool: {{ .name }}}}
{{- if and (ne .gpus "0") .pool.gpu.deviceClass }}
    resourceClaims: [{name: gpus, resourceClaimTemplateName: {{ .root.Release.Name }}-{{ .name }}}]
{{- end }}
    containers:
      - name: ray-worker
        image: {{ include "paceline.image" $v.image }}
        imagePullPolicy: {{ $v.image.pullPolicy }}
        envFrom: [{configMapRef: {name: {{ include "paceline.environmentName" .root }}}}]
        ports:
          - {name: metrics, containerPort: 8080}
{{- if eq .name "router" }}
          - {name: {{ include "paceline.httpPort" .root }}, containerPort: 8000}
          - {name: {{ include "paceline.grpcPort" .root }}, containerPort: 9000}
{{- end }}
        resources: {{- include "paceline.resources" . | nindent 10 }}
        securityContext: {{- include "paceline.confined" . | nindent 10 }}
        livenessProbe:
          exec:
            command: [bash, -c, "{{ include "paceline.raylet" . }}"]
          initialDelaySeconds: 30
          periodSeconds: 5
          timeoutSeconds: 5
          failureThreshold: 24
        readinessProbe: # KubeRay selects every worker that is ready: one without Serve's proxy must not be
          exec:
            command: [bash, -c, "{{ include "paceline.raylet" . }} && wget --tries 1 -T 3 -q -O- http://localhost:8000/-/healthz | grep success"]
          initialDelaySeconds: 10
          periodSeconds: 5
          timeoutSeconds: 8
          failureThreshold: 1
        lifecycle: {preStop: {exec: {command: [python, -m, paceline.cluster.drain,
{{- if .pool.spot }} --timeout-s, "100"{{ else }} --graceful-s, "{{ include "paceline.gracefulSeconds" .root }}", --cold-start-s, "{{ $v.coldStartSeconds }}"{{ end }}]}}}
        volumeMounts: {{- include "paceline.mounts" . | nindent 10 }}
{{- end }}

{{- define "paceline.raylet" -}}
wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success
{{- end }}

{{/* Taints that a pool's pods stand: of GPUs, and of machines that may be taken back. */}}
{{- define "paceline.tolerations" -}}
{{- $own := .pool.tolerations }}
{{- if ne .gpus "0" }}{{ $own = prepend $own (dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule") }}{{ end }}
{{- if .pool.spot }}
{{- range $key, $value := dict "cloud.google.com/gke-spot" "true" "karpenter.sh/capacity-type" "spot" "kubernetes.azure.com/scalesetpriority" "spot" }}
{{- $own = append $own (dict "key" $key "operator" "Equal" "value" $value "effect" "NoSchedule") }}
{{- end }}
{{- end }}
{{- toYaml (dict "own" $own) }}
{{- end }}
