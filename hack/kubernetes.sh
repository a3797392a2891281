#!/bin/bash
# Builds the programs that tools/NAME/go.mod pins into the user's cache directory,
# and prints where: kubernetes (with its etcd), kubernetes-1.36 and -1.34, csi-sidecars; all
# of them unless some are named. A cold build of one takes some five minutes on two cores
# and 3 GiB of build cache.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/crust-proxy
building=
trap 'rm -rf "$building"' EXIT

# ldflags VERSION: programs that do not know their version take one another for too old.
ldflags() {
	local number=${1#v} package
	echo -n "-s -w"
	for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
		echo -n " -X $package.gitVersion=$1 -X $package.gitTreeState=clean"
		echo -n " -X $package.gitMajor=${number%%.*} -X $package.gitMinor=$(cut -d. -f2 <<<"$number")"
	done
}

build() { # pins output
	CGO_ENABLED=0 $go build -modfile="$1" -trimpath -buildvcs=false -o "$2/" \
		-ldflags "$(ldflags "$($go list -m -modfile="$1" -f '{{.Version}}' k8s.io/kubernetes)")" tool >&2
	[ ! -e "$2/server" ] || mv "$2/server" "$2/etcd"
	# Tests have no network when they need the types of snapshots, and the controller's rights.
	[ ! -e "$2/csi-snapshotter" ] || cp -r --no-preserve=mode \
		"$(dir_of "$1" client/v8)/config/crd" "$(dir_of "$1" v8)"/deploy/kubernetes/snapshot-controller/rbac-*.yaml "$2/"
}

dir_of() { # pins module of external-snapshotter
	$go list -m -modfile="$1" -f '{{.Dir}}' "github.com/kubernetes-csi/external-snapshotter/$2"
}

[ $# -gt 0 ] || set -- kubernetes kubernetes-1.36 kubernetes-1.34 csi-sidecars
for name; do
	pins=tools/$name/go.mod
	# Another Go, other pins or another way to build them need another build.
	out=$cache/$name-$(cat hack/kubernetes.sh "$pins" <($go env GOVERSION GOARCH) | sha256sum | head -c 12)
	if [ ! -d "$out" ]; then
		mkdir -p "$cache"
		# Whole or not there: a build that was cut off must not be found.
		building=$(mktemp -d "$cache/building-XXXXXX")
		build "$pins" "$building"
		chmod 755 "$building"
		mv -T "$building" "$out" 2>/dev/null || [ -d "$out" ]
	fi
	echo "$out"
done
