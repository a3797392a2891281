{{/* The name under which crust-driver registers. */}}
{{- define "crust-proxy.driverName" -}}driver.crust-proxy.dev{{- end -}}

{{/* At most 52 characters: a StatefulSet's pods have its name and a hash in a label of 63. */}}
{{- define "crust-proxy.driver" -}}{{ include "crust-proxy.fullname" . | trunc 45 | trimSuffix "-" }}-driver{{- end -}}

{{- define "crust-proxy.metadata" -}}{{ include "crust-proxy.fullname" . | trunc 45 }}-snapshot-metadata{{- end -}}

{{- define "crust-proxy.driverSelectorLabels" -}}
app.kubernetes.io/name: crust-driver
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The Secret of the service's certificate: the user's, or what cert-manager writes. */}}
{{- define "crust-proxy.metadataSecret" -}}
{{- $tls := .Values.crustDriver.snapshotMetadata.tls -}}
{{- if not (or $tls.secretName $tls.issuerRef) -}}
{{- fail "crustDriver.snapshotMetadata.tls: name a Secret (secretName), or an issuer of cert-manager (issuerRef)" -}}
{{- end -}}
{{- $tls.secretName | default (include "crust-proxy.metadata" .) -}}
{{- end -}}

{{/* The rest of a sidecar's container, up to its mounts. The driver's socket is root's. */}}
{{- define "crust-proxy.driverSidecar" -}}
resources:
  requests: {cpu: 10m, memory: 32Mi}
securityContext:
  runAsUser: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
{{- end -}}
