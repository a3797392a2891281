#!/bin/bash
# Installs what builds and tests need beyond Go, on Debian and Ubuntu: only
# packages whose programs are missing, so that a machine with, say, runc
# from another source keeps it. With the name of a demonstration (demo, pod, vm) or of a
# lane (browser, which all others do without), only what that one needs.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
for=${1:-}

command -v "${GO:-go}" >/dev/null || { echo "setup: Go is missing; install the version that go.mod names" >&2; exit 1; }

# A program, its package, and the demonstrations that need it, too.
wanted='
git git
gcc gcc pod vm
pkg-config pkg-config pod vm
mkfs.ext4 e2fsprogs demo pod vm
mkfs.xfs xfsprogs
mkfs.btrfs btrfs-progs
losetup mount demo pod vm
blkid util-linux demo pod vm
sfdisk fdisk
setpriv util-linux
ip iproute2
runc runc
crun crun
busybox busybox-static pod vm
script bsdutils
systemd-analyze systemd
systemd-nspawn systemd-container
debootstrap debootstrap
kill procps
qemu-system-x86_64 qemu-system-x86 vm
qemu-img qemu-utils
qemu-aarch64-static qemu-user-static
depmod kmod vm
fio fio
rpm rpm
openssl openssl
dpkg-deb dpkg vm
man man-db
chromium chromium browser
'
missing=()
while read -r program package demos; do
	if [ -z "$for" ]; then
		[ "$demos" != browser ] || continue
	elif [[ " $demos " != *" $for "* ]]; then
		continue
	fi
	[ -z "$program" ] || type -P "$program" >/dev/null || missing+=("$package")
done <<<"$wanted"
if [ "$for" != demo ] && [ "$for" != browser ]; then # containerd's runc is built
	[ -e /usr/include/stdlib.h ] || missing+=(libc6-dev)
	[ -e /usr/include/seccomp.h ] || missing+=(libseccomp-dev)
fi
[ -n "$for" ] || [ -e /usr/share/keyrings/debian-archive-keyring.gpg ] || missing+=(debian-archive-keyring) # Ubuntu
[ "${#missing[@]}" -gt 0 ] || exit 0

if ! command -v apt-get >/dev/null; then
	echo "setup: missing: ${missing[*]}. This is no Debian or Ubuntu: install them by hand." >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "setup: missing: ${missing[*]}. Run as root: apt-get install ${missing[*]}" >&2
	exit 1
fi
echo "setup: installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install -y -q --no-install-recommends "${missing[@]}")
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# A fresh machine has no package lists, and old lists name files that are gone.
if ! "${install[@]}" >"$log" 2>&1 </dev/null; then
	{ apt-get update -q && "${install[@]}"; } >"$log" 2>&1 </dev/null || {
		cat "$log" >&2
		echo "setup: could not install ${missing[*]}" >&2
		exit 1
	}
fi
