#!/bin/bash
# Extracts Debian's kernel for clouds (boot/vmlinuz-*, lib/modules, usr/lib/modules) into
# the user's cache directory, and prints where: guests of tests boot it. It is not
# installed on this machine. CRUST_TEST_KERNEL names another such directory.
set -euo pipefail
if [ -n "${CRUST_TEST_KERNEL:-}" ]; then
	echo "$CRUST_TEST_KERNEL"
	exit
fi
meta=linux-image-cloud-amd64
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/crust-proxy

fail() {
	echo "guest-kernel: $*; CRUST_TEST_KERNEL may name a directory with boot/vmlinuz-* and lib/modules" >&2
	exit 1
}

# candidate prints the package of the newest kernel that apt knows, and its version.
candidate() {
	local package version
	package=$(apt-cache depends "$meta" 2>/dev/null | sed -n 's/^ *Depends: \(linux-image-.*-cloud-amd64\)$/\1/p')
	[ -n "$package" ] || return 0
	version=$(apt-cache policy "$package" | sed -n 's/^ *Candidate: //p')
	echo "$package=$version"
}

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian"
wanted=$(candidate)
if [ -z "$wanted" ] && [ "$(id -u)" = 0 ]; then
	apt-get update -q >&2 # a fresh machine has no package lists
	wanted=$(candidate)
fi
[ -n "$wanted" ] || fail "apt knows no $meta"
out=$cache/guest-${wanted/=/-}
if [ ! -d "$out" ]; then
	mkdir -p "$cache"
	# Whole or not there: a download that was cut off must not be found.
	fresh=$(mktemp -d "$cache/building-XXXXXX")
	trap 'rm -rf "$fresh"' EXIT
	(cd "$fresh" && apt-get download -q "$wanted" >&2) || {
		# Old lists name files that are gone.
		[ "$(id -u)" = 0 ] && apt-get update -q >&2 && wanted=$(candidate) && out=$cache/guest-${wanted/=/-} &&
			(cd "$fresh" && apt-get download -q "$wanted" >&2)
	} || fail "$wanted cannot be downloaded"
	mkdir "$fresh/tree"
	dpkg-deb -x "$fresh"/*.deb "$fresh/tree"
	# A package has no modules.dep: depmod writes it when the package is installed.
	depmod=$(PATH=$PATH:/usr/sbin:/sbin type -P depmod) || fail "depmod is missing: install kmod"
	for modules in "$fresh"/tree/lib/modules/*; do
		"$depmod" -b "$fresh/tree" "$(basename "$modules")"
	done
	mv -T "$fresh/tree" "$out" 2>/dev/null || [ -d "$out" ]
fi
echo "$out"
