#!/bin/bash
# All tests and checks, each as a step. A failed step does not keep the next ones
# from running, so that one run tells everything; the exit code tells the truth.
# CRUST_SYSTEM=skip leaves out, by the caller's explicit wish, what needs root.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
summary=()
failed=0

step() { # name command...
	local name=$1 start=$SECONDS result=ok
	shift
	echo
	echo "=== $name: $*"
	if ! "$@" </dev/null 2>&1 | tee "$logs/$name"; then
		result=FAILED
		failed=1
	fi
	summary+=("$(printf '%-16s %-7s %4d s  %s' "$name" "$result" $((SECONDS - start)) "$(closing "$logs/$name")")")
}

# closing is the line in which a step's runner says how many tests it ran.
closing() {
	grep -E '^(DONE|fuzz:|check-|buf |[0-9]+ issues)' "$1" | tail -1
}

steps() {
	step setup hack/setup.sh
	[ "$failed" = 0 ] || return
	step build make -s build
	step generated make -s check-generated
	step breaking make -s check-breaking
	step systemd make -s check-systemd
	step deploy make -s check-deploy
	step monitoring make -s check-monitoring
	step lint make -s lint
	step unit make -s unit
	step fuzz make -s fuzz
	if [ "${CRUST_SYSTEM:-}" = skip ]; then
		summary+=("system           SKIPPED  because CRUST_SYSTEM=skip")
		summary+=("kube             SKIPPED  because CRUST_SYSTEM=skip")
		summary+=("package          SKIPPED  because CRUST_SYSTEM=skip")
		return
	fi
	step containerd hack/containerd.sh
	step kubernetes hack/kubernetes.sh
	step system make -s system
	step kube make -s test-kube
	step package make -s package-test
}

steps
echo
echo "=== summary"
printf '%s\n' "${summary[@]}"
grep -hE '^DONE ' "$logs"/* 2>/dev/null
if [ "$failed" != 0 ]; then
	echo "make test: FAILED"
	exit 1
fi
echo "make test: ok"
