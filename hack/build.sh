#!/bin/bash
# Builds programs of cmd/ (all, if none is named) into a directory, as a release has them.
# GOARCH chooses the architecture.
set -euo pipefail
out=$(realpath -m "${1:?usage: hack/build.sh DIRECTORY [PROGRAM...]}")
shift
cd "$(dirname "$0")/.."
go=${GO:-go}

[ $# -gt 0 ] || set -- $(ls cmd)
mkdir -p "$out"
# The Go tool stamps the version from git, where there is git.
stamp=-buildvcs=false
git rev-parse -q --verify HEAD >/dev/null 2>&1 && stamp=-buildvcs=true
# With gRPC's own trace pages, which nobody serves, the linker has to keep every exported
# method of every type: these pages call methods by name. They would be a sixth of a program.
CGO_ENABLED=0 "$go" build "$stamp" -tags grpcnotrace -trimpath -ldflags '-s -w' -o "$out/" "${@/#/./cmd/}"
