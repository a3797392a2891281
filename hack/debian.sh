#!/bin/bash
# Makes a bare Debian of a suite, such as trixie (13) or bookworm (12), with systemd and the packages that are named, in the
# user's cache directory, and prints where: tests do on one what the pages tell newcomers, and boot others as nodes. Delete
# the directory to have Debian's newest packages.
set -euo pipefail
suite=${1:?usage: hack/debian.sh SUITE [PACKAGE...]}
shift
packages=systemd-sysv,dbus$(printf ',%s' "$@" | sed 's/^,$//')
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/crust-proxy
# Other packages are other files.
key=$(cat "$0" - <<<"$packages" | sha256sum | head -c 12)
out=$cache/debian-$suite-$key

if [ ! -d "$out" ]; then
	mkdir -p "$cache"
	# Whole or not there: a download that was cut off must not be found.
	fresh=$(mktemp -d "$cache/building-XXXXXX")
	trap 'rm -rf --one-file-system "$fresh" "$fresh.log"' EXIT
	chmod 755 "$fresh"
	mkdir -p "$cache/debs" # trees have most packages in common; debootstrap cannot share them at the same time
	exec 9>"$cache/debs/.lock"
	flock 9
	for try in 1 2 3; do
		debootstrap --cache-dir="$cache/debs" --variant=minbase --include=$packages --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
			"$suite" "$fresh" http://deb.debian.org/debian >"$fresh.log" 2>&1 && break
		[ "$try" != 3 ] || { tail -20 "$fresh.log" >&2; exit 1; }
		sleep 5
		rm -rf --one-file-system "${fresh:?}"/*
	done
	mv -T "$fresh" "$out" 2>/dev/null || [ -d "$out" ]
fi
echo "$out"
