#!/bin/bash
# Renders deploy/kustomize into the directory that is named: the kustomizations and
# examples as they are, and beside them the resources.yaml that the Helm chart makes.
# HELM names a helm program to use; the default is the pinned one.
set -euo pipefail
out=$(realpath -m "${1:?usage: hack/kustomize.sh DIRECTORY}")
cd "$(dirname "$0")/.."
helm=${HELM:-$(${GO:-go} tool -n -modfile=tools/kube-deploy/go.mod helm)}

# From the packaged chart, in which the links of files/ are files.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
"$helm" package deploy/helm/crust-proxy --destination "$tree" >/dev/null

if [ -e "$out" ] && [ ! -f "$out/daemonset/resources.yaml" ]; then
	echo "kustomize: $out is there and was not made by this program: name another directory" >&2
	exit 1
fi
rm -rf "$out"
mkdir -p "$(dirname "$out")"
cp -r deploy/kustomize "$out"

# render DIRECTORY ARGUMENTS: labels that name Helm as the manager are left out.
render() {
	local dir=$1
	shift
	"$helm" template crust-proxy "$tree"/*.tgz --namespace=crust-proxy --kube-version=1.34.4 "$@" |
		sed -E '/^ *(helm\.sh\/chart|app\.kubernetes\.io\/managed-by):/d; /^# Source: /d' >"$out/$dir/resources.yaml"
}

classes=()
for name in kata crust; do
	i=$((${#classes[@]} / 3))
	classes+=("--set=runtimeClasses[$i].create=true" "--set=runtimeClasses[$i].name=$name" "--set=runtimeClasses[$i].handler=$name")
done
render runtimeclasses --show-only=templates/runtimeclasses.yaml "${classes[@]}"
render admission --show-only=templates/admission/pods.yaml --show-only=templates/admission/workloads.yaml
for version in v1 v1beta1; do
	dir=defer-by-class
	[ "$version" = v1 ] || dir+=-$version
	render "$dir" --show-only=templates/admission/mutate.yaml --set=admission.mutate.enabled=true \
		--set=admission.mutate.apiVersion=admissionregistration.k8s.io/$version
done
render daemonset --show-only=templates/serviceaccount.yaml --show-only=templates/configmap.yaml \
	--show-only=templates/rbac.yaml --show-only=templates/service.yaml --show-only=templates/daemonset.yaml --set=cluster.source=serviceAccount
render networkpolicy --show-only=templates/networkpolicy.yaml --set=networkPolicy.enabled=true \
	--set='networkPolicy.from[0].namespaceSelector.matchLabels.kubernetes\.io/metadata\.name=monitoring'
render monitoring --show-only=templates/monitoring/podmonitor.yaml --set=monitoring.podMonitor.enabled=true \
	--show-only=templates/monitoring/prometheusrule.yaml --set=monitoring.prometheusRule.enabled=true \
	--show-only=templates/monitoring/dashboard.yaml --set=monitoring.dashboard.enabled=true
