#!/bin/bash
# Generates the protos' Go code beside the tree and compares; and asks whether
# go.mod names what the code imports.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

buf() { $go tool -modfile=tools/go.mod buf "$@"; }
buf generate proto -o "$fresh"
buf generate reference/vm/wire --template reference/vm/wire/buf.gen.yaml -o "$fresh"
# Only the generated files: what else lies beside them has no counterpart.
generated() { cd "$1" && find proto reference/vm/wire -name '*.pb.go' -exec sha256sum {} + | sort -k2; }
if ! diff <(generated "$fresh") <(generated .); then
	echo "check-generated: generated code differs from its source: run make generate" >&2
	exit 1
fi
$go mod tidy -diff || { echo "check-generated: go.mod is not tidy: run go mod tidy" >&2; exit 1; }
$go mod verify >/dev/null
echo "check-generated: protos and go.mod match"
