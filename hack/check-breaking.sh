#!/bin/bash
# Checks the protos for breaking changes. What they are compared with:
#   1. $BREAKING_AGAINST, a git revision;
#   2. on a branch: the point where it left origin/main;
#   3. the newest release (tag v*);
#   4. before the first release: the state before the protos' latest change (or
#      HEAD, where the work tree has changed them). A deliberate break is then
#      allowed by a line "Breaking-API: reason" in that change's commit message.
# It works on an export of the revision, so a shallow clone will do.
set -euo pipefail
cd "$(dirname "$0")/.."
protos=(':(glob)proto/**/*.proto')

pass() { echo "check-breaking: $*"; exit 0; }

git rev-parse -q --verify HEAD >/dev/null || pass "no git history here, nothing to compare with"

fork_point() {
	local base
	base=$(git merge-base HEAD origin/main 2>/dev/null) || return 1
	[ "$base" != "$(git rev-parse HEAD)" ] && echo "$base"
}

before_last_change() {
	local change
	git diff --quiet HEAD -- "${protos[@]}" || { git rev-parse HEAD; return; }
	change=$(git log -1 --format=%H -- "${protos[@]}")
	[ -n "$change" ] || return 1
	git rev-parse -q --verify "$change^" || return 1
}

deliberate() {
	git diff --quiet HEAD -- "${protos[@]}" || return 1
	git log -1 --format=%B -- "${protos[@]}" | sed -n 's/^Breaking-API: *//p' | grep .
}

if [ -n "${BREAKING_AGAINST:-}" ]; then
	against=$(git rev-parse --verify "$BREAKING_AGAINST^{commit}")
elif against=$(fork_point); then
	:
elif tag=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null); then
	against=$(git rev-parse "$tag^{commit}")
elif ! against=$(before_last_change); then
	pass "this clone holds no earlier version of the protos, nothing to compare with"
elif reason=$(deliberate); then
	pass "the latest change of the protos breaks on purpose, before the first release: $reason"
fi

old=$(mktemp -d)
trap 'rm -rf "$old"' EXIT
git archive "$against" | tar -x -C "$old"
[ -n "$(find "$old/proto" -name '*.proto' 2>/dev/null | head -1)" ] ||
	pass "no protos at ${against:0:12}, nothing to compare with"
${GO:-go} tool -modfile=tools/go.mod buf breaking --against "$old"
echo "check-breaking: nothing broken since ${against:0:12}"
