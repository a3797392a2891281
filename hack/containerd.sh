#!/bin/bash
# Builds the containerd 2.x that tools/containerd/go.mod pins, with its shim, into
# the user's cache directory, and prints where: tests use it beside the one that
# the machine has. Filesystem drivers that need C libraries are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
module=github.com/containerd/containerd/v2
version=$($go list -m -modfile=tools/containerd/go.mod -f '{{.Version}}' "$module")
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/crust-proxy
out=$cache/containerd-$version-$($go env GOARCH)

if [ ! -x "$out/containerd" ]; then
	mkdir -p "$cache"
	# Whole or not there: a build that was cut off must not be found.
	fresh=$(mktemp -d "$cache/building-XXXXXX")
	trap 'rm -rf "$fresh"' EXIT
	CGO_ENABLED=0 $go build -modfile=tools/containerd/go.mod -trimpath -buildvcs=false \
		-tags 'no_btrfs no_devmapper no_zfs' -ldflags '-s -w' -o "$fresh/" \
		"$module/cmd/containerd" "$module/cmd/containerd-shim-runc-v2" >&2
	chmod 755 "$fresh"
	mv -T "$fresh" "$out" 2>/dev/null || [ -x "$out/containerd" ]
fi
echo "$out"
