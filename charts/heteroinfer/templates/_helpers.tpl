{{- define "heteroinfer.name" -}}
{{- if contains "heteroinfer" .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-heteroinfer" (.Release.Name | trunc 40 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "heteroinfer.selector" -}}
app.kubernetes.io/name: heteroinfer-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "heteroinfer.labels" -}}
{{ include "heteroinfer.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "heteroinfer.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "heteroinfer.name" .) }}
{{- else -}}
{{ required "serviceAccount.name: needed with serviceAccount.create=false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "heteroinfer.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The namespaces served, separated by commas; empty in cluster scope. */}}
{{- define "heteroinfer.watchNamespaces" -}}
{{- if eq .Values.scope "Namespaced" -}}
{{ join "," (.Values.watchNamespaces | default (list .Release.Namespace)) }}
{{- else if .Values.watchNamespaces -}}
{{ fail "watchNamespaces: needs scope=Namespaced; leave it empty to serve all namespaces" }}
{{- end }}
{{- end }}

{{- define "heteroinfer.workerImage.cpu" -}}
{{ .Values.workerImages.cpu | default (printf "heteroinfer/worker-cpu:%s" .Chart.AppVersion) }}
{{- end }}

{{- define "heteroinfer.workerImage.gpu" -}}
{{ .Values.workerImages.gpu | default (printf "heteroinfer/worker:%s" .Chart.AppVersion) }}
{{- end }}

{{/* The environment that settings.py reads; the helm test runs with the same. */}}
{{- define "heteroinfer.env" -}}
- {name: HETEROINFER_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: HETEROINFER_IDENTITY, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: HETEROINFER_WATCH_NAMESPACES, value: {{ include "heteroinfer.watchNamespaces" . | quote }}}
{{- with .Values.operatorClass }}
- {name: HETEROINFER_OPERATOR_CLASS, value: {{ . | quote }}}
{{- end }}
- {name: HETEROINFER_WORKER_IMAGE_CPU, value: {{ include "heteroinfer.workerImage.cpu" . | quote }}}
- {name: HETEROINFER_WORKER_IMAGE_GPU, value: {{ include "heteroinfer.workerImage.gpu" . | quote }}}
- {name: HETEROINFER_ALLOW_HOST_PATHS, value: {{ .Values.allowHostPaths | quote }}}
- {name: HETEROINFER_POD_EGRESS, value: {{ .Values.podEgress | quote }}}
- {name: HETEROINFER_ALLOW_REMOTE_CODE, value: {{ .Values.allowRemoteCode | quote }}}
- {name: HETEROINFER_ALLOWED_ARGUMENTS, value: {{ join "," .Values.allowedArguments | quote }}}
- {name: HETEROINFER_ALLOWED_ANNOTATIONS, value: {{ join "," .Values.allowedAnnotations | quote }}}
- {name: HETEROINFER_POD_RESOURCES, value: {{ toJson (.Values.podResources | default dict) | quote }}}
- {name: HETEROINFER_ALLOWED_SERVICE_ACCOUNTS, value: {{ join "," .Values.allowedServiceAccounts | quote }}}
- {name: HETEROINFER_LEADER_ELECTION, value: {{ .Values.leaderElection.enabled | quote }}}
- {name: HETEROINFER_LEASE_NAME, value: {{ include "heteroinfer.name" . | quote }}}
- {name: HETEROINFER_LEASE_SECONDS, value: {{ .Values.leaderElection.leaseSeconds | quote }}}
- {name: HETEROINFER_KEY_SECRET, value: {{ printf "%s-key" (include "heteroinfer.name" .) | quote }}}
{{- if .Values.calibration.nodeKinds }}
- {name: HETEROINFER_CALIBRATION_CONFIG_MAP, value: {{ printf "%s-calibration" (include "heteroinfer.name" .) | quote }}}
{{- end }}
- {name: HETEROINFER_WORKERS, value: {{ .Values.workers | quote }}}
- {name: HETEROINFER_LOG_LEVEL, value: {{ .Values.logLevel | quote }}}
- {name: HETEROINFER_HTTP_PORT, value: "8080"}
- {name: HETEROINFER_POD_SECURITY, value: {{ include "heteroinfer.workerSecurity" . | squote }}}
{{- end }}

{{/* A security context; takes root and context. */}}
{{- define "heteroinfer.securityContext" -}}
{{- if .root.Values.assignedUserIds -}}
{{ toYaml (omit .context "runAsUser" "runAsGroup" "fsGroup") }}
{{- else -}}
{{ toYaml .context }}
{{- end }}
{{- end }}

{{- define "heteroinfer.podSecurity" -}}
{{ include "heteroinfer.securityContext" (dict "root" . "context" .Values.podSecurityContext) }}
{{- end }}

{{- define "heteroinfer.containerSecurity" -}}
{{ include "heteroinfer.securityContext" (dict "root" . "context" .Values.containerSecurityContext) }}
{{- end }}

{{/* The security contexts of the pods that the operator makes, as it reads them. */}}
{{- define "heteroinfer.workerSecurity" -}}
{{- $pod := include "heteroinfer.securityContext" (dict "root" . "context" .Values.workerPods.podSecurityContext) | fromYaml }}
{{- $container := include "heteroinfer.securityContext" (dict "root" . "context" .Values.workerPods.containerSecurityContext) | fromYaml }}
{{- dict "pod" $pod "container" $container | toJson }}
{{- end }}
