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
The values of podDefaults that are set, as JSON; empty if there are none. Kubernetes would replace a reference
such as $(POD_NAME) in the operator's pod already.
*/}}
{{- define "fluxtrain.podDefaults" -}}
{{- $set := dict }}
{{- range $name, $value := .Values.podDefaults }}
{{- if $value }}{{ $_ := set $set $name $value }}{{ end }}
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
  resources: [podgroups, workloads]
  verbs: [create, delete, list, patch, watch]
{{- end }}
{{- end }}
