{{- define "heteroinfer.name" -}}
{{- $chart := .Values.nameOverride | default "heteroinfer" }}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride }}
{{- else if contains $chart .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" (.Release.Name | trunc (int (sub 51 (len $chart))) | trimSuffix "-") $chart }}
{{- end }}
{{- end }}

{{- define "heteroinfer.selector" -}}
app.kubernetes.io/name: heteroinfer-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "heteroinfer.labels" -}}
{{ include "heteroinfer.labelsAnd" (list . dict dict) }}
{{- end }}

{{/*
The labels of an object. Takes a list: the root, the labels from a value for this object, and the chart's own labels.
If several of them have the same key, the chart's own label wins over the value's label, and the value's label wins over
the label in commonLabels.
*/}}
{{- define "heteroinfer.labelsAnd" -}}
{{- $root := first . }}
{{- $common := $root.Values.commonLabels | default dict }}
{{- range $key, $_ := $common }}
{{- if hasPrefix "rbac.authorization.k8s.io/" $key }}
{{- fail (printf "commonLabels: must not contain %s, which would add the operator's rights to a role of users. Remove the label" $key) }}
{{- end }}
{{- end }}
{{- $all := dict "app.kubernetes.io/version" $root.Chart.AppVersion "app.kubernetes.io/managed-by" $root.Release.Service "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version) }}
{{- toYaml (merge (dict) (last .) $all (include "heteroinfer.selector" $root | fromYaml) (index . 1 | default dict) $common) }}
{{- end }}

{{/* The annotations of an object, or nothing. Takes a list: the root and the object's own annotations. */}}
{{- define "heteroinfer.annotations" -}}
{{- with merge (dict) (last . | default dict) ((first .).Values.commonAnnotations | default dict) -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "heteroinfer.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "heteroinfer.name" .) }}
{{- else -}}
{{ required "serviceAccount.name: must be set if serviceAccount.create is false. Name an account of this namespace" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "heteroinfer.repository" -}}
{{- required "image.repository: must be set, because HeteroInfer publishes no images. Build and push the images (docs/user/quickstart-cluster.md, step 1), and set image.repository to your image of the operator, such as registry.example.com/heteroinfer/operator" .Values.image.repository }}
{{- end }}

{{- define "heteroinfer.registry" -}}
{{- with .Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}
{{- end }}

{{- define "heteroinfer.tag" -}}
{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "heteroinfer.image" -}}
{{ include "heteroinfer.registry" . }}{{ include "heteroinfer.repository" . }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ include "heteroinfer.tag" . }}{{ end }}
{{- end }}

{{/* A worker image, by default in the folder of the operator's image. Takes a list: the root and the image's name. */}}
{{- define "heteroinfer.besideOperator" -}}
{{- $root := first . }}
{{- $folder := include "heteroinfer.repository" $root | dir }}
{{- include "heteroinfer.registry" $root }}{{ if ne $folder "." }}{{ $folder }}/{{ end }}{{ last . }}:{{ include "heteroinfer.tag" $root }}
{{- end }}

{{/* The namespaces served, separated by commas; empty in cluster scope. */}}
{{- define "heteroinfer.watchNamespaces" -}}
{{- if eq .Values.scope "Namespaced" -}}
{{ join "," (.Values.watchNamespaces | default (list .Release.Namespace)) }}
{{- else if .Values.watchNamespaces -}}
{{ fail "watchNamespaces: must be empty with scope Cluster. Set scope=Namespaced, or leave watchNamespaces empty to serve all namespaces" }}
{{- end }}
{{- end }}

{{- define "heteroinfer.workerImage.cpu" -}}
{{ .Values.workerImages.cpu | default (include "heteroinfer.besideOperator" (list . "worker-cpu")) }}
{{- end }}

{{- define "heteroinfer.workerImage.gpu" -}}
{{ .Values.workerImages.gpu | default (include "heteroinfer.besideOperator" (list . "worker")) }}
{{- end }}

{{/* The environment variables that settings.py reads, for the operator and `helm test`. */}}
{{- define "heteroinfer.env" -}}
- {name: HETEROINFER_NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
- {name: HETEROINFER_IDENTITY, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: HETEROINFER_WATCH_NAMESPACES, value: {{ include "heteroinfer.watchNamespaces" . | quote }}}
{{- with .Values.operatorClass }}
- {name: HETEROINFER_OPERATOR_CLASS, value: {{ . | quote }}}
{{- end }}
- {name: HETEROINFER_WORKER_IMAGE_CPU, value: {{ include "heteroinfer.workerImage.cpu" . | quote }}}
- {name: HETEROINFER_WORKER_IMAGE_GPU, value: {{ include "heteroinfer.workerImage.gpu" . | quote }}}
{{- with .Values.workerImages.pullPolicy }}
- {name: HETEROINFER_WORKER_PULL_POLICY, value: {{ . | quote }}}
{{- end }}
{{- with .Values.workerImages.pullSecrets }}
- {name: HETEROINFER_WORKER_PULL_SECRETS, value: {{ include "heteroinfer.names" . | quote }}}
{{- end }}
{{- with .Values.allowedWorkerImages }}
- {name: HETEROINFER_ALLOWED_WORKER_IMAGES, value: {{ join "," . | quote }}}
{{- end }}
{{- with .Values.allowedHostPaths }}
- {name: HETEROINFER_ALLOWED_HOST_PATHS, value: {{ join "," . | quote }}}
{{- end }}
- {name: HETEROINFER_ALLOW_HOST_PATHS, value: {{ .Values.allowHostPaths | quote }}}
- {name: HETEROINFER_POD_EGRESS, value: {{ .Values.podEgress | quote }}}
- {name: HETEROINFER_FETCH_EGRESS, value: {{ toJson (.Values.fetchEgress | default dict) | quote }}}
- {name: HETEROINFER_ALLOW_REMOTE_CODE, value: {{ .Values.allowRemoteCode | quote }}}
- {name: HETEROINFER_ALLOWED_ARGUMENTS, value: {{ join "," .Values.allowedArguments | quote }}}
- {name: HETEROINFER_ALLOWED_ENVIRONMENT, value: {{ join "," .Values.allowedEnvironment | quote }}}
- {name: HETEROINFER_ALLOWED_ANNOTATIONS, value: {{ join "," .Values.allowedAnnotations | quote }}}
- {name: HETEROINFER_POD_RESOURCES, value: {{ toJson (.Values.podResources | default dict) | quote }}}
- {name: HETEROINFER_ALLOWED_SERVICE_ACCOUNTS, value: {{ join "," .Values.allowedServiceAccounts | quote }}}
- {name: HETEROINFER_LEADER_ELECTION, value: {{ .Values.leaderElection.enabled | quote }}}
- {name: HETEROINFER_LEASE_NAME, value: {{ include "heteroinfer.name" . | quote }}}
- {name: HETEROINFER_LEASE_SECONDS, value: {{ .Values.leaderElection.leaseSeconds | quote }}}
- {name: HETEROINFER_KEY_SECRET, value: {{ printf "%s-operator-key" (include "heteroinfer.name" .) | quote }}}
- {name: HETEROINFER_FORMER_KEY_SECRET, value: {{ printf "%s-key" (include "heteroinfer.name" .) | quote }}}
{{- if .Values.calibration.nodeKinds }}
- {name: HETEROINFER_CALIBRATION_CONFIG_MAP, value: {{ include "heteroinfer.measured" . | quote }}}
{{- end }}
- {name: HETEROINFER_WORKERS, value: {{ .Values.workers | quote }}}
- {name: HETEROINFER_LOG_LEVEL, value: {{ .Values.logLevel | quote }}}
- {name: HETEROINFER_LOG_FORMAT, value: {{ .Values.logFormat | quote }}}
- {name: HETEROINFER_HTTP_PORT, value: {{ .Values.httpPort | quote }}}
- {name: HETEROINFER_POD_SECURITY, value: {{ include "heteroinfer.workerSecurity" . | squote }}}
{{- $names := list }}
{{- range .Values.extraEnv }}
{{- if has .name $names }}
{{- fail (printf "extraEnv: each name must be unique (got %s twice). Remove one of the two" .name) }}
{{- end }}
{{- $names = append $names .name }}
{{- if and (hasPrefix "HETEROINFER_" .name) (not (has .name (list "HETEROINFER_RESYNC_SECONDS" "HETEROINFER_WATCH_SILENCE_SECONDS"))) }}
{{- fail (printf "extraEnv: must not contain %s, which the chart sets. Change the chart value that sets this variable" .name) }}
{{- end }}
{{ list . | toYaml }}
{{- end }}
{{- end }}

{{/* The ConfigMap with the measured rates of nodes. */}}
{{- define "heteroinfer.measured" -}}
{{ include "heteroinfer.name" . }}-measured
{{- end }}

{{/* The names of a list of objects, separated by commas. */}}
{{- define "heteroinfer.names" -}}
{{- $names := list }}
{{- range . }}{{ $names = append $names .name }}{{ end }}
{{- join "," $names }}
{{- end }}

{{/* Network settings and runtime class of the operator's pod. */}}
{{- define "heteroinfer.network" -}}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- if .Values.hostNetwork }}
hostNetwork: true
{{- end }}
{{- with .Values.dnsPolicy | default (ternary "ClusterFirstWithHostNet" "" .Values.hostNetwork) }}
dnsPolicy: {{ . }}
{{- end }}
{{- with .Values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
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

{{/* The security contexts of the pods that the operator creates, in the format that it reads. */}}
{{- define "heteroinfer.workerSecurity" -}}
{{- $pod := include "heteroinfer.securityContext" (dict "root" . "context" .Values.workerPods.podSecurityContext) | fromYaml }}
{{- $container := include "heteroinfer.securityContext" (dict "root" . "context" .Values.workerPods.containerSecurityContext) | fromYaml }}
{{- dict "pod" $pod "container" $container | toJson }}
{{- end }}
