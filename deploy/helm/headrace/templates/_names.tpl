{{- define "headrace.name" -}}
{{- if contains "headrace" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-headrace" .Release.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "headrace.account" -}}
{{- if .Values.serviceAccount.create }}{{ default (include "headrace.name" .) .Values.serviceAccount.name }}{{ else }}{{ default "default" .Values.serviceAccount.name }}{{ end }}
{{- end }}

{{- define "headrace.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret }}{{ .Values.apiKeys.existingSecret }}{{ else if .Values.apiKeys.keys }}{{ include "headrace.name" . }}-keys{{ end }}
{{- end }}

{{- /* Combinations that cannot work, refused before anything is installed. */ -}}
{{- define "headrace.check" -}}
{{- if and (eq .Values.cache.type "existingClaim") (not .Values.cache.existingClaim) }}
{{- fail "cache.type existingClaim needs cache.existingClaim" }}
{{- end }}
{{- if and .Values.diskTier.enabled (eq .Values.cache.type "existingClaim") }}
{{- if or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) }}
{{- fail "diskTier with cache.type existingClaim allows one replica: two servers cannot share a disk tier" }}
{{- end }}
{{- end }}
{{- if and .Values.apiKeys.existingSecret .Values.apiKeys.keys }}
{{- fail "apiKeys: give either existingSecret or keys" }}
{{- end }}
{{- end }}

{{- /* A size such as 8Gi in bytes. */ -}}
{{- define "headrace.bytes" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- if hasSuffix "Gi" . }}{{ mul $number 1073741824 }}{{ else if hasSuffix "Mi" . }}{{ mul $number 1048576 }}{{ else }}{{ fail "diskTier.size must end with Gi or Mi" }}{{ end }}
{{- end }}
