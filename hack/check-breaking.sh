#!/bin/bash
# Checks the protos for breaking changes. What they are compared with:
#   1. $BREAKING_AGAINST, a git revision;
#   2. the newest release (tag v*);
#   3. before the first release, on a branch: the point where it left origin/main;
#   4. else the state before the protos' latest change (or HEAD, where the work
#      tree has changed them).
# Before the first release a deliberate break is allowed by a line "Breaking-API:
# reason" in the change's commit message.
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

deliberate() { # since
	git diff --quiet HEAD -- "${protos[@]}" || return 1
	git log --format=%B "$1..HEAD" -- "${protos[@]}" | sed -n 's/^Breaking-API: *//p' | grep .
}

released=no
if [ -n "${BREAKING_AGAINST:-}" ]; then
	against=$(git rev-parse --verify "$BREAKING_AGAINST^{commit}")
elif tag=$(git describe --tags --abbrev=0 --match 'v*' 2>/dev/null); then
	against=$(git rev-parse "$tag^{commit}")
	released=yes
elif ! against=$(fork_point || before_last_change); then
	pass "this clone holds no earlier version of the protos, nothing to compare with"
fi
if [ "$released" = no ] && reason=$(deliberate "$against"); then
	pass "a change since ${against:0:12} breaks on purpose, before the first release: $reason"
fi

old=$(mktemp -d)
trap 'rm -rf "$old"' EXIT
git archive "$against" | tar -x -C "$old"
[ -n "$(find "$old/proto" -name '*.proto' 2>/dev/null | head -1)" ] ||
	pass "no protos at ${against:0:12}, nothing to compare with"
${GO:-go} tool -modfile=tools/go.mod buf breaking --against "$old"
echo "check-breaking: nothing broken since ${against:0:12}"
