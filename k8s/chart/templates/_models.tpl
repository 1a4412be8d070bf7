{{/* A model's id on the Hugging Face hub; "" where it has another place. */}}
{{- define "paceline.hub" -}}
{{- $name := .source | default .model }}
{{- if not (regexMatch "^([./~]|paceline/)" $name) }}{{ $name }}{{ end }}
{{- end }}

{{/* Tokenizers of the hub that the pools name by themselves. */}}
{{- define "paceline.tokenizers" -}}
{{- range list .Values.target .Values.draft }}
{{- if and .tokenizer (ne (toString .enabled) "false") }}
{{ include "paceline.hub" (dict "model" .tokenizer "source" "") }}
{{- end }}
{{- end }}
{{- end }}

{{- define "paceline.draftHub" -}}{{ if .Values.draft.enabled }}{{ include "paceline.hub" .Values.draft }}{{ end }}{{- end }}

{{/* Commands, one a line, that fetch what a pool needs: routers and drafts of the target the small files alone. */}}
{{- define "paceline.fetches" -}}
{{- $target := include "paceline.hub" .root.Values.target }}
{{- $draft := include "paceline.draftHub" .root }}
{{- $whole := get (dict "draft" (list $draft) "target" (list $target) "router" list) .name }}
{{- if and (eq .name "target") .root.Values.draft.onTargetNodes }}{{ $whole = append $whole $draft }}{{ end }}
{{- $lines := list }}
{{- range prepend (include "paceline.tokenizers" .root | splitList "\n") $target | uniq }}
{{- if and . (not (has . $whole)) }}
{{- $lines = append $lines (printf "hf download %s --include \"*.json\" --include \"*.txt\" --include \"*.model\" --include \"*.jinja\"" .) }}
{{- end }}
{{- end }}
{{- range compact $whole }}{{ $lines = append $lines (printf "hf download %s" .) }}{{ end }}
{{- join "\n" $lines }}
{{- end }}

{{/* The file that says that all is there that a pool needs; another one for other models. */}}
{{- define "paceline.mark" -}}
/models/.complete-{{ .name }}-{{ include "paceline.fetches" . | sha256sum | trunc 12 }}
{{- end }}

{{- define "paceline.hubToken" -}}
{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ .Values.models.hubSecret }}, key: token, optional: true}}}
{{- end }}

{{/* What the job that fills the claim runs. */}}
{{- define "paceline.fill" -}}
{{- $root := . }}
{{- if eq .Values.models.fill.from "hub" }}
{{- $lines := list }}
{{- range list "target" "draft" "router" }}
{{- $lines = concat $lines (include "paceline.fetches" (dict "root" $root "name" .) | splitList "\n") }}
{{- end }}
{{- join "\n" ($lines | uniq) }}
{{- else }}
{{- if eq .Values.models.fill.from "gs" }}
if [ -e /secrets/key ]; then export CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE=/secrets/key; fi
{{- end }}
{{- range concat (list (include "paceline.hub" .Values.target) (include "paceline.draftHub" .)) (include "paceline.tokenizers" . | splitList "\n") | uniq }}
{{- if . }}
{{- $folder := printf "hub/models--%s" (replace "/" "--" .) }}
{{- if eq $root.Values.models.fill.from "s3" }}
aws s3 sync --only-show-errors --exclude "blobs/*" "$PACELINE_MODELS/{{ $folder }}" /models/{{ $folder }}
{{- else }}
mkdir -p /models/{{ $folder }}
gcloud storage rsync --recursive --exclude "^blobs/" "$PACELINE_MODELS/{{ $folder }}" /models/{{ $folder }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
