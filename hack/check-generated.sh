#!/bin/bash
# Generates the protos' Go code beside the tree and compares; and asks whether
# go.mod names what the code imports.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT

$go tool -modfile=tools/go.mod buf generate -o "$fresh"
# Sources are not generated: leave them out on both sides.
if ! diff -ru --exclude='*.proto' "$fresh/proto" proto; then
	echo "check-generated: generated code differs from its source: run make generate" >&2
	exit 1
fi
$go mod tidy -diff || { echo "check-generated: go.mod is not tidy: run go mod tidy" >&2; exit 1; }
$go mod verify >/dev/null
echo "check-generated: protos and go.mod match"
