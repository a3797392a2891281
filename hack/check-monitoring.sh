#!/bin/bash
# Checks deploy/monitoring with Prometheus' own code: every query's metrics and labels
# are in the table of docs/operations.md, and each alert fires when it should. Unit tests
# of internal/ground/telemetry compare that table, and values of labels, with the daemon's.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
$go -C tools/prometheus vet ./...
$go -C tools/prometheus test -count=1 ./...
$go -C tools/prometheus mod tidy -diff || { echo "check-monitoring: tools/prometheus/go.mod is not tidy" >&2; exit 1; }
echo "check-monitoring: $(grep -c 'alert:' deploy/monitoring/alerts.yaml) alerts and $(grep -c '"expr":' deploy/monitoring/dashboard.json) queries of the dashboard fit the daemon's metrics"
