{{/*
Every template begins with this: values that are missing, as those of an earlier chart are with --reuse-values, or null
get their defaults of files/defaults.yaml. Mappings whose keys people choose are left as they are.
*/}}
{{- define "fluxtrain.defaults" -}}
{{- $values := deepCopy .Values }}
{{- include "fluxtrain.fill" (dict "values" $values "defaults" (include "fluxtrain.file" (dict "root" . "name" "defaults.yaml") | fromYaml)) }}
{{- $_ := set . "Values" $values }}
{{- end }}

{{- define "fluxtrain.fill" -}}
{{- $values := .values }}
{{- range $name, $default := .defaults }}
{{- if kindIs "invalid" (index $values $name) }}
{{- $_ := set $values $name $default }}
{{- else if and (kindIs "map" $default) (not (has $name (list "annotations" "labels" "resources"))) }}
{{- include "fluxtrain.fill" (dict "values" (index $values $name) "defaults" $default) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A file of the chart, which must be there: Git, GitOps tools and archives lose files without an error. */}}
{{- define "fluxtrain.file" -}}
{{- .root.Files.Get (print "files/" .name) | required (printf "files/%s of the chart is missing or empty: take the whole chart" .name) }}
{{- end }}

{{/*
Namespaced objects are called like the chart, whatever the release is called: the operator is one per
namespace, as its Lease is, and a second release there is refused rather than left waiting for ever.
Objects of the cluster carry the namespace in their name.
*/}}
{{- define "fluxtrain.clusterName" -}}
{{ .Chart.Name }}-{{ .Release.Namespace }}
{{- end }}

{{/* Labels by which services and budgets find the operator's pods. They never change. */}}
{{- define "fluxtrain.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Labels of objects, not of pods: versions are in them, and a new one should restart nothing. */}}
{{- define "fluxtrain.labels" -}}
{{ include "fluxtrain.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: fluxtrain
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "fluxtrain.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/*
The values of podDefaults that are set, as JSON; empty if there are none. Null is a value, of securityContext.
Kubernetes would replace a reference such as $(POD_NAME) in the operator's pod already.
*/}}
{{- define "fluxtrain.podDefaults" -}}
{{- $set := dict }}
{{- range $name, $value := .Values.podDefaults }}
{{- if or $value (kindIs "invalid" $value) }}{{ $_ := set $set $name $value }}{{ end }}
{{- end }}
{{- if $set }}{{ toJson $set | replace "$(" "$$(" }}{{ end }}
{{- end }}

{{/* The value network, with the operator's own pods, as JSON. */}}
{{- define "fluxtrain.network" -}}
{{- $namespace := dict "matchLabels" (dict "kubernetes.io/metadata.name" .Release.Namespace) }}
{{- $pods := dict "matchLabels" (include "fluxtrain.selector" . | fromYaml) }}
{{- $operator := dict "namespaceSelector" $namespace "podSelector" $pods }}
{{- merge (dict "operator" (list $operator)) .Values.network | toJson }}
{{- end }}

{{/* The lists of nodeHealth that are not empty, as JSON; empty if all are. */}}
{{- define "fluxtrain.nodeHealth" -}}
{{- $set := dict }}
{{- range $name, $value := .Values.nodeHealth }}
{{- if kindIs "map" $value }}
{{- $lists := dict }}
{{- range $kind, $marks := $value }}
{{- if $marks }}{{ $_ := set $lists $kind $marks }}{{ end }}
{{- end }}
{{- if $lists }}{{ $_ := set $set $name $lists }}{{ end }}
{{- else if $value }}{{ $_ := set $set $name $value }}{{ end }}
{{- end }}
{{- if $set }}{{ toJson $set }}{{ end }}
{{- end }}

{{/* The security context of the operator's pods: the value podSecurityContext, unless nobody set it. */}}
{{- define "fluxtrain.podSecurity" -}}
{{- if hasKey .Values "podSecurityContext" }}
{{- with .Values.podSecurityContext }}{{ toYaml . }}{{ end }}
{{- else -}}
runAsNonRoot: true
runAsUser: 1000
runAsGroup: 1000
seccompProfile:
  type: RuntimeDefault
{{- end }}
{{- end }}

{{/* That of their container: the value securityContext, unless nobody set it. */}}
{{- define "fluxtrain.containerSecurity" -}}
{{- if hasKey .Values "securityContext" }}
{{- with .Values.securityContext }}{{ toYaml . }}{{ end }}
{{- else -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
{{- end }}

{{/* "true" if a monitoring object is installed: switched on, or automatic and served by the cluster. */}}
{{- define "fluxtrain.monitored" -}}
{{- if eq (toString .enabled) "auto" }}
{{- if .root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1" }}true{{ end }}
{{- else if .enabled }}true{{ end }}
{{- end }}

{{- define "fluxtrain.subject" -}}
- kind: ServiceAccount
  name: {{ .Chart.Name }}
  namespace: {{ .Release.Namespace }}
{{- end }}

{{/* What the operator may do in the namespaces of jobs. docs/operator.md has the reason for each verb. */}}
{{- define "fluxtrain.jobRules" -}}
- apiGroups: [fluxtrain.dev]
  resources: [fluxtrainings]
  verbs: [delete, list, watch]
- apiGroups: [fluxtrain.dev]
  resources: [fluxtrainings/status]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [create, delete, list, watch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, delete, list, patch, watch]
- apiGroups: [""]
  resources: [services]
  verbs: [create, list, patch, watch]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, list, patch, watch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, delete, list, patch, watch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [fluxtrain-jobs]
  verbs: [get, update]
{{- if .Values.gangs.coscheduling }}
- apiGroups: [scheduling.x-k8s.io]
  resources: [podgroups]
  verbs: [create, list, patch, watch]
{{- end }}
{{- if .Values.gangs.volcano }}
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [create, list, patch, watch]
{{- end }}
{{- if .Values.gangs.native }}
- apiGroups: [scheduling.k8s.io]
  resources: [podgroups]
  verbs: [create, list, patch, watch]
{{- end }}
{{- end }}
