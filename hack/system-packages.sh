#!/bin/bash
# Lists the packages with system tests; those of the package, of deploy/, of virtual
# machines, of a node and of a whole Kubernetes are steps of their own.
set -euo pipefail
cd "$(dirname "$0")/.."
${GO:-go} list -tags system,failpoints -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./test/... |
	grep -v -e '/test/package$' -e '/test/deploy\(/\|$\)' -e '/test/kube\(/\|$\)' -e '/test/vm$' -e '/test/node$'
