#!/bin/bash
# All tests and checks, each as a step. A failed step does not keep the next ones
# from running, so that one run tells everything; the exit code tells the truth.
# CRUST_SYSTEM=skip leaves out, by the caller's explicit wish, what needs root. CRUST_SOAK=1
# has all tests run in their long forms.
#
# Tests of the real system wait more than they compute. So steps run in four lanes at once:
# tests in the foreground, those in Kubernetes (at last its node in a virtual machine) and those
# in virtual machines (one at a time, whose processor is emulated) beside them, and what only computes (programs for
# tests, packages, lint, fuzzing) at a low priority. Unit tests compute: no other tests run beside them.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=$(mktemp -d)
export CRUST_PACKAGES=$logs/built
lanes=()
trap 'for lane in "${lanes[@]}"; do kill -- "-$lane" 2>/dev/null; done; rm -rf "$logs"' EXIT
summary=()
failed=0

# attempt runs a step and leaves what came of it: result and seconds.
attempt() { # name command...
	local name=$1 start=$SECONDS result=ok
	shift
	"$@" </dev/null >"$logs/$name" 2>&1 || result=FAILED
	echo "$result $((SECONDS - start))" >"$logs/$name.part"
	mv "$logs/$name.part" "$logs/$name.done"
}

# lane runs steps one after another in the background: a nice value, then a function.
lane() {
	set -m # a process group of its own, to be ended as a whole
	(
		renice -n "$1" "$BASHPID" >/dev/null
		"$2"
	) &
	lanes+=($!)
	set +m
}

ended() { until [ -e "$logs/$1.done" ]; do sleep 0.2; done; }

# collect waits for a step of a lane and shows it.
collect() { # name title
	ended "$1"
	echo
	echo "=== $1: $2"
	cat "$logs/$1"
	tell "$1"
}

tell() {
	local result seconds
	read -r result seconds <"$logs/$1.done"
	[ "$result" = ok ] || failed=1
	summary+=("$(printf '%-16s %-7s %4d s  %s' "$1" "$result" "$seconds" "$(closing "$logs/$1")")")
}

# closing is the line in which a step's runner says how many tests it ran.
closing() {
	grep -E '^(DONE|fuzz:|check-|buf |[0-9]+ issues)' "$1" | tail -1
}

step() { # name command...
	local name=$1
	shift
	echo
	echo "=== $name: $*"
	: >"$logs/$name"
	tail -n +1 -f --pid=$$ "$logs/$name" 2>/dev/null &
	local tail=$!
	attempt "$name" "$@"
	sleep 0.3 # tail's last look
	{ kill "$tail" && wait "$tail"; } 2>/dev/null
	tell "$name"
}

compute() {
	if [ "${CRUST_SYSTEM:-}" != skip ]; then
		attempt containerd hack/containerd.sh
		attempt packages hack/package.sh "$CRUST_PACKAGES"
		attempt kubernetes hack/kubernetes.sh kubernetes csi-sidecars kubernetes-1.36
	fi
	renice -n 19 "$BASHPID" >/dev/null # for the rest nobody waits
	attempt deploy make -s check-deploy
	attempt monitoring make -s check-monitoring
	attempt lint make -s lint
	attempt release make -s check-release
	attempt arm64 make -s test-arm64
	attempt fuzz make -s fuzz
}

kubernetes() {
	ended containerd
	ended kubernetes
	ended deploy # built helm and kustomize
	ended unit
	attempt kube make -s test-kube
	ended packages
	attempt kube-node make -s test-node NODE_TESTS=TestKubernetesNode
}

machines() {
	ended containerd
	ended unit
	attempt vm make -s test-vm
	ended packages
	attempt node make -s test-node NODE_SKIP=TestKubernetesNode
}

steps() {
	step setup hack/setup.sh
	[ "$failed" = 0 ] || return
	step build make -s build
	lane 5 compute
	if [ "${CRUST_SYSTEM:-}" != skip ]; then
		lane 0 kubernetes
		lane 2 machines
	fi
	step generated make -s check-generated
	step breaking make -s check-breaking
	step systemd make -s check-systemd
	step unit make -s unit
	if [ "${CRUST_SYSTEM:-}" = skip ]; then
		for name in system vm node kube kube-node package ratios; do
			summary+=("$(printf '%-16s SKIPPED  because CRUST_SYSTEM=skip' $name)")
		done
	else
		collect containerd hack/containerd.sh
		step system make -s system
		collect packages hack/package.sh
		step package make -s package-test
		collect vm "make test-vm"
		collect node "make test-node NODE_SKIP=TestKubernetesNode"
		collect kubernetes hack/kubernetes.sh
		collect kube "make test-kube"
		collect kube-node "make test-node NODE_TESTS=TestKubernetesNode"
	fi
	collect deploy "make check-deploy"
	collect monitoring "make check-monitoring"
	collect lint "make lint"
	collect release "make check-release"
	collect arm64 "make test-arm64"
	collect fuzz "make fuzz"
	[ "${CRUST_SYSTEM:-}" = skip ] || step ratios make -s check-ratios # alone
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
