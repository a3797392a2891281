{{- define "crust-proxy.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "crust-proxy.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "crust-proxy.labels" -}}
{{ include "crust-proxy.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "crust-proxy.image" -}}
{{- include "crust-proxy.imageOf" (dict "image" .Values.image "chart" .Chart) -}}
{{- end -}}

{{- define "crust-proxy.imageOf" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The daemon's configuration: what follows from values, and over it what the user wrote. */}}
{{- define "crust-proxy.config" -}}
{{- $made := dict "kubeletRoot" .Values.kubeletRoot "http" (dict "listen" (printf ":%d" (int .Values.daemonset.port))) -}}
{{- if .Values.crustRunc.install -}}
{{- $program := printf "%s/crust-runc" .Values.crustRunc.directory -}}
{{- $_ := set $made "handlers" (dict "crust" (dict "enabled" true "programs" (list $program))) -}}
{{- end -}}
{{- if eq .Values.cluster.source "serviceAccount" -}}
{{- $_ := set $made "cluster" (dict "inCluster" true) -}}
{{- else if eq .Values.cluster.source "kubeconfig" -}}
{{- $_ := set $made "cluster" (dict "kubeconfig" .Values.cluster.kubeconfig) -}}
{{- end -}}
{{- if .Values.cluster.events -}}
{{- $_ := set $made "cluster" (mergeOverwrite (dict "events" true) ($made.cluster | default dict)) -}}
{{- end -}}
{{- $all := mergeOverwrite $made (deepCopy .Values.config) -}}
{{- if and ($all.cluster).events (not (or $all.cluster.inCluster $all.cluster.kubeconfig)) -}}
{{- fail "cluster.events: nothing tells the daemon of the cluster: set cluster.source" -}}
{{- end -}}
{{- if ne (eq .Values.cluster.source "serviceAccount") (dig "cluster" "inCluster" false $all) -}}
{{- fail "config.cluster.inCluster: the pod has an account to use with cluster.source serviceAccount, and with no other: set that instead" -}}
{{- end -}}
{{- $port := printf ":%d" (int .Values.daemonset.port) -}}
{{- $listen := dig "http" "listen" "" $all -}}
{{- if or (not (hasSuffix $port $listen)) (regexMatch `^(unix:|localhost:|127\.|\[::1\])` $listen) -}}
{{- fail (printf "config.http.listen: with %q kubelet would kill a healthy daemon, because its probes ask the pod's address at daemonset.port: set that instead" $listen) -}}
{{- end -}}
{{- if not $all.cluster -}}
{{- range (($all.policy).rules) -}}
{{- if or .runtimeHandlers .annotated .namespaces .storageClasses .needs -}}
{{- fail (printf "config.policy.rules: the rule %q goes by the pod, and nothing tells the daemon of pods: set cluster.source" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $programs := join " " (dig "handlers" "crust" "programs" (list "/usr/bin/crust-runc") $all) -}}
{{- if and (eq .Values.mode "daemonset") (dig "handlers" "crust" "enabled" false $all) (contains "/crust-runc" $programs) (not (or .Values.daemonset.hostPID .Values.crustRunc.install)) -}}
{{- fail "config.handlers.crust: crust-runc finds sandboxes by their processes, which the daemon does not see: set daemonset.hostPID" -}}
{{- end -}}
{{- if not (or (dig "handlers" "crust" "enabled" false $all) (dig "policy" "runtimes" false $all)) -}}
{{- range (($all.policy).rules) -}}
{{- if and .defer .runtimeHandlers (not (regexReplaceAll "crust[a-z0-9-]*,?" (join "," .runtimeHandlers) "")) -}}
{{- fail (printf "config.policy.rules: the rule %q defers volumes of pods in crust only, and their handler is off: set config.handlers.crust.enabled" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* The directory of the node that has cluster.kubeconfig, unless it is mounted anyway. */}}
{{- define "crust-proxy.kubeconfigDirectory" -}}
{{- $dir := dir .Values.cluster.kubeconfig -}}
{{- $mounted := ne .Values.cluster.source "kubeconfig" -}}
{{- range list (clean .Values.kubeletRoot) "/run" "/dev" -}}
{{- $mounted = or $mounted (hasPrefix (printf "%s/" .) (printf "%s/" $dir)) -}}
{{- end -}}
{{- if not $mounted }}{{ $dir }}{{ end -}}
{{- end -}}

{{/* What of it needs a restart: the rest is taken up by the running daemon. */}}
{{- define "crust-proxy.restartChecksum" -}}
{{- omit (include "crust-proxy.config" . | fromYaml) "policy" "authorization" "devices" "relay" "log" | toYaml | sha256sum -}}
{{- end -}}
