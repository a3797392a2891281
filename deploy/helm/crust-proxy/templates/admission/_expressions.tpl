{{/*
The expressions that several policies share. They see one object: what else uses a
claim, its access mode and its driver are not theirs to know, and the front decides
about those.
*/}}

{{/* The annotation's value, or "". The argument is where the metadata is. */}}
{{- define "crust-proxy.cel.annotation" -}}
{{ . }}.?metadata.?annotations[?'crust-proxy.dev/defer'].orValue('')
{{- end -}}

{{/* The class's name, or "". The argument is where the pod's spec is. */}}
{{- define "crust-proxy.cel.class" -}}
{{ . }}.?runtimeClassName.orValue('')
{{- end -}}

{{/* Names of the runtime classes for which a key has a value, as a list of CEL. */}}
{{- define "crust-proxy.cel.classes" -}}
{{- $names := list -}}
{{- range .classes -}}
{{- if eq (toString (get . $.key)) $.value -}}
{{- $names = append $names (squote .name) -}}
{{- end -}}
{{- end -}}
[{{ join ", " $names }}]
{{- end -}}

{{/* Pods that may have deferred volumes: all others cost nothing more. */}}
{{- define "crust-proxy.cel.concerned" -}}
{{ include "crust-proxy.cel.annotation" .at }} != '' || {{ include "crust-proxy.cel.class" .spec }} in {{ include "crust-proxy.cel.classes" (dict "classes" .classes "key" "defer" "value" "all") }}
{{- with .annotated }} || {{ include "crust-proxy.cel.class" $.spec }} in {{ . }}{{ end }}
{{- end -}}

{{/*
Variables of a pod, or of a template of pods: to that the mutating policy has not come
yet, and "annotated" are the classes whose claims it will name.
*/}}
{{- define "crust-proxy.cel.variables" -}}
# Runtime classes whose handler mounts volumes by itself, those of them whose pods
# have all volumes deferred, and those that can serve subPath.
- name: classes
  expression: "[{{ range $i, $c := .classes }}{{ if $i }}, {{ end }}'{{ $c.name }}'{{ end }}]"
- name: classesOfAll
  expression: {{ include "crust-proxy.cel.classes" (dict "classes" .classes "key" "defer" "value" "all") | quote }}
- name: classesWithSubPath
  expression: {{ include "crust-proxy.cel.classes" (dict "classes" .classes "key" "subPath" "value" "true") | quote }}
- name: class
  expression: {{ include "crust-proxy.cel.class" .spec | quote }}
- name: annotation
  expression: {{ include "crust-proxy.cel.annotation" .at | quote }}
- name: containers
  expression: "{{ .spec }}.containers + {{ .spec }}.?initContainers.orValue([])"
- name: volumes
  expression: "{{ .spec }}.?volumes.orValue([])"
- name: asDevices
  expression: >-
    variables.volumes.filter(v, variables.containers.exists(c, c.?volumeDevices.orValue([]).exists(d,
    d.name == v.name))).map(v, v.name)
- name: asked
  expression: "variables.annotation == '' ? [] : variables.annotation.split(',').map(name, name.trim())"
# What a CSI driver may give; whether one does is not to be seen here.
- name: candidates
  expression: "variables.volumes.filter(v, has(v.persistentVolumeClaim) || has(v.ephemeral) || has(v.csi))"
- name: deferred
  expression: >-
    variables.candidates.filter(v, !(v.name in variables.asDevices) && (variables.asked == ['*'] ||
    v.name in variables.asked || variables.class in variables.classesOfAll
    {{- if .annotated }} || (variables.class in {{ .annotated }} && !has(v.csi) &&
    !{{ .at }}.?metadata.?annotations[?'crust-proxy.dev/defer'].hasValue()){{ end }}))
{{- end -}}

{{/* A name for one of the policies. */}}
{{- define "crust-proxy.policy" -}}
{{ include "crust-proxy.fullname" .root }}-{{ .name }}
{{- end -}}

{{- define "crust-proxy.policyBinding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ include "crust-proxy.policy" . }}
  labels:
    {{- include "crust-proxy.labels" .root | nindent 4 }}
spec:
  policyName: {{ include "crust-proxy.policy" . }}
  validationActions: [{{ .action }}]
  {{- with .root.Values.admission.namespaceSelector }}
  matchResources:
    namespaceSelector:
      {{- toYaml . | nindent 6 }}
  {{- end }}
{{- end -}}
