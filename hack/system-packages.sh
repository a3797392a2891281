#!/bin/bash
# Lists the packages with system tests; the package test is a step of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
${GO:-go} list -tags system,failpoints -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./test/... |
	grep -v '/test/package$'
