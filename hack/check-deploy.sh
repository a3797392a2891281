#!/bin/bash
# Checks deploy/: the chart is linted and rendered in all its variants, kustomize's
# directories are rendered and built, and what comes out is read as the types of
# Kubernetes and by the daemon. Needs no cluster.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
# Built first, and into Go's cache: minutes on a fresh machine, which are no test's.
for tool in helm kustomize; do
	$go tool -n -modfile=tools/kube-deploy/go.mod "$tool" >/dev/null
done
$go tool -modfile=tools/go.mod gotestsum --format pkgname-and-test-fails -- \
	-tags system -count=1 -timeout 5m ./test/deploy
