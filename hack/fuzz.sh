#!/bin/bash
# Runs every fuzz target of the module for FUZZTIME each, on one processor: tests of the
# real system run beside it.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
each=${FUZZTIME:-3s}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
count=0
failed=0

# go test ends a run at its time limit with this message when a worker was still
# busy (golang/go#75804); it is a failure only if an input was found as well.
only_ran_out_of_time() {
	grep -q 'context deadline exceeded' "$log" && ! grep -q 'Failing input written' "$log"
}

run() { # package target
	count=$((count + 1))
	if $go test -run '^$' -fuzz "^$2\$" -fuzztime "$each" -parallel 1 "$1" >"$log" 2>&1 </dev/null || only_ran_out_of_time; then
		echo "ok    $2  $(grep -oE 'execs: [0-9]+' "$log" | tail -1)  ($1)"
	else
		failed=$((failed + 1))
		cat "$log"
		echo "FAIL  $2  ($1)"
	fi
}

dirs=$(grep -rlE --include='*_test.go' '^func Fuzz[A-Z_0-9]' . | xargs -r -n1 dirname | sort -u)
for dir in $dirs; do
	listed=$($go test -list '^Fuzz' "$dir")
	for target in $(grep '^Fuzz' <<<"$listed" || true); do
		run "$dir" "$target"
	done
done
echo "fuzz: $count targets, $each each, $failed failed"
[ "$count" -gt 0 ] || { echo "fuzz: no target found" >&2; exit 1; }
[ "$failed" = 0 ]
