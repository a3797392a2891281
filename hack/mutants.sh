#!/bin/bash
# Brings back the defects of test/mutants, one at a time, in a worktree of its own, and fails unless the test
# that a patch names finds it. A patch begins with two lines: "# what it brings back - which test finds it",
# and "# run: go test ...", whose arguments are separated by spaces. That this test passes without the patch is
# for `make unit` to show. hack/mutants.sh NAME... tries some only.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}
patches=$PWD/test/mutants
tree=$(mktemp -d)
log=$(mktemp)
trap 'git worktree remove --force "$tree"; rm -f "$log"' EXIT
now=$(git stash create) # what is not committed counts too
git worktree add -q --detach "$tree" "${now:-HEAD}"

names=("$@")
[ $# -gt 0 ] || for patch in "$patches"/*.patch; do names+=("$(basename "$patch" .patch)"); done
cd "$tree"
failed=0
fail() { # name message
	failed=$((failed + 1))
	echo "FAIL  $1: $2"
}

run() { # patch
	local words
	read -ra words <<<"$(sed -n '2s/^# run: go test //p' "$1")"
	[ ${#words[@]} -gt 0 ] || { echo "it has no line \"# run: go test ...\"" >"$log"; return 1; }
	"$go" test "${words[@]}" >"$log" 2>&1
}

for name in "${names[@]}"; do
	patch=$patches/$name.patch
	if ! git apply "$patch"; then
		fail "$name" "the patch does not apply"
	elif run "$patch"; then
		fail "$name" "no test finds it"
	elif ! grep -q -- '--- FAIL' "$log"; then # it was not built, for example
		cat "$log"
		fail "$name" "its test did not run"
	else
		echo "ok    $name"
	fi
	git reset -q --hard
done
echo "mutants: ${#names[@]} tried, $failed not found"
[ "$failed" = 0 ]
