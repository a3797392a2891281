#!/bin/bash
# Builds the Kubernetes that tools/kubernetes/go.mod pins, and its etcd, into the
# user's cache directory, and prints where. A cold build takes some five minutes on
# two cores and 3 GiB of build cache.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
module=k8s.io/kubernetes
etcd=go.etcd.io/etcd/server/v3
version=$($go list -m -modfile=tools/kubernetes/go.mod -f '{{.Version}}' "$module")
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/crust-proxy
out=$cache/kubernetes-$version-$($go env GOARCH)

# Programs that do not know their version take one another for too old.
number=${version#v}
flags="-s -w"
for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
	flags+=" -X $package.gitVersion=$version -X $package.gitTreeState=clean"
	flags+=" -X $package.gitMajor=${number%%.*} -X $package.gitMinor=$(cut -d. -f2 <<<"$number")"
done

build() { # output package...
	CGO_ENABLED=0 $go build -modfile=tools/kubernetes/go.mod -trimpath -buildvcs=false -ldflags "$flags" -o "$@" >&2
}

if [ ! -x "$out/kubelet" ]; then
	mkdir -p "$cache"
	# Whole or not there: a build that was cut off must not be found.
	fresh=$(mktemp -d "$cache/building-XXXXXX")
	trap 'rm -rf "$fresh"' EXIT
	build "$fresh/etcd" "$etcd"
	build "$fresh/" "$module"/cmd/{kube-apiserver,kube-controller-manager,kubectl,kubelet}
	chmod 755 "$fresh"
	mv -T "$fresh" "$out" 2>/dev/null || [ -x "$out/kubelet" ]
fi
echo "$out"
