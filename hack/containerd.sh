#!/bin/bash
# Builds the containerd 2.x that tools/containerd/go.mod pins, with its shim, a
# current runc, and in cni what gives pods a network, into the user's cache
# directory, and prints where: tests use it.
# Filesystem drivers that need C libraries are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
pinned=-modfile=tools/containerd/go.mod
containerd=github.com/containerd/containerd/v2
runc=github.com/opencontainers/runc
cni=github.com/containernetworking/plugins
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/crust-proxy
# Another Go, other pins or another way to build them need another build.
key=$(cat hack/containerd.sh tools/containerd/go.mod <($go env GOVERSION GOARCH) | sha256sum | head -c 12)
out=$cache/containerd-$key

if [ ! -x "$out/cni/ptp" ]; then
	mkdir -p "$cache"
	# Whole or not there: a build that was cut off must not be found.
	fresh=$(mktemp -d "$cache/building-XXXXXX")
	trap 'rm -rf "$fresh"' EXIT
	build=("$go" build "$pinned" -trimpath -buildvcs=false -ldflags '-s -w')
	CGO_ENABLED=0 "${build[@]}" -o "$fresh/" -tags 'no_btrfs no_devmapper no_zfs' \
		$containerd/cmd/containerd $containerd/cmd/containerd-shim-runc-v2 >&2
	CGO_ENABLED=1 "${build[@]}" -o "$fresh/" -tags seccomp $runc >&2
	CGO_ENABLED=0 "${build[@]}" -o "$fresh/cni/" $cni/plugins/{ipam/host-local,main/loopback,main/ptp} >&2
	chmod 755 "$fresh"
	mv -T "$fresh" "$out" 2>/dev/null || [ -x "$out/cni/ptp" ]
fi
echo "$out"
