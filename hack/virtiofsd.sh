#!/bin/bash
# Extracts the virtiofsd of Debian 13, which is the one in Rust, with its libraries into the
# user's cache directory, and prints a program that runs it: Debian 12 has QEMU's own in C.
# Nothing is installed on this machine, and apt's lists stay as they are.
set -euo pipefail
packages=(virtiofsd libc6 libcap-ng0 libseccomp2 libgcc-s1)
cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/crust-proxy
out=$cache/virtiofsd-trixie

fail() { echo "virtiofsd: $*" >&2; exit 1; }

if [ ! -d "$out" ]; then
	command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian"
	mkdir -p "$cache"
	# Whole or not there: a download that was cut off must not be found.
	fresh=$(mktemp -d "$cache/building-XXXXXX")
	trap 'rm -rf "$fresh"' EXIT
	mkdir -p "$fresh"/lists/partial "$fresh"/archives/partial "$fresh"/debs "$fresh"/tree
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" >"$fresh/list"
	apt=(apt-get -q -o "Dir::Etc::SourceList=$fresh/list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$fresh/lists"
		-o "Dir::Cache=$fresh" -o "Dir::Cache::Archives=$fresh/archives" -o APT::Sandbox::User=root)
	"${apt[@]}" update >&2 || fail "Debian 13's lists cannot be downloaded"
	(cd "$fresh/debs" && "${apt[@]}" download "${packages[@]/%//trixie}" >&2) || fail "Debian 13's packages cannot be downloaded"
	for deb in "$fresh"/debs/*.deb; do
		dpkg-deb -x "$deb" "$fresh/tree"
	done
	cat >"$fresh/tree/run" <<-END
		#!/bin/sh
		exec "$out/usr/lib64/ld-linux-x86-64.so.2" --library-path "$out/usr/lib/x86_64-linux-gnu" "$out/usr/libexec/virtiofsd" "\$@"
	END
	chmod +x "$fresh/tree/run"
	mv -T "$fresh/tree" "$out" 2>/dev/null || [ -d "$out" ]
fi
echo "$out/run"
