#!/bin/bash
# Builds the .deb and the .rpm into the directory that is named.
set -euo pipefail
out=$(realpath -m "${1:?usage: hack/package.sh DIRECTORY}")
cd "$(dirname "$0")/.."
go=${GO:-go}

# A release is its tag; anything else sorts before the next release.
version() {
	local exact
	if exact=$(git describe --tags --exact-match --match 'v[0-9]*' 2>/dev/null); then
		echo "${exact#v}"
	else
		echo "0.0.0-dev.$(git log -1 --format=%cd --date=format:%Y%m%d%H%M%S 2>/dev/null || echo 0)+$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
	fi
}

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$out" "$tree/bin" "$tree/completion"

stamp=-buildvcs=false
git rev-parse -q --verify HEAD >/dev/null 2>&1 && stamp=-buildvcs=true
programs=(crust-proxy crustctl crust-backup crust-runc crust-runc-agent crust-vm crust-vm-agent crust-conformance)
mkdir -p bin # what `make build` has linked there need not be linked again
CGO_ENABLED=0 $go build $stamp -trimpath -ldflags '-s -w' -o bin/ "${programs[@]/#/./cmd/}"
cp "${programs[@]/#/bin/}" "$tree/bin/"
GO=$go hack/notice.sh >"$tree/NOTICE"
for program in crustctl crust-backup; do
	"$tree/bin/$program" completion bash >"$tree/completion/$program.bash"
	"$tree/bin/$program" completion zsh >"$tree/completion/_$program"
	"$tree/bin/$program" completion fish >"$tree/completion/$program.fish"
done

export CRUST_TREE=$tree
CRUST_VERSION=$(version)
CRUST_ARCH=$($go env GOARCH)
# The same commit gives the same package.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export CRUST_VERSION CRUST_ARCH SOURCE_DATE_EPOCH

$go run ./hack/manpages "$CRUST_VERSION" "$(date -u -d "@$SOURCE_DATE_EPOCH" +%F)" "$tree/bin" "$tree/man"

rm -f "$out"/crust-proxy*.deb "$out"/crust-proxy*.rpm
for format in deb rpm; do
	$go tool -modfile=tools/nfpm/go.mod nfpm package --config packaging/nfpm.yaml --packager "$format" --target "$out"
done
