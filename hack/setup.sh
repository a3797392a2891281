#!/bin/bash
# Installs what builds and tests need beyond Go, on Debian and Ubuntu: only
# packages whose programs are missing, so that a machine with, say, runc
# from another source keeps it.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin

command -v go >/dev/null || { echo "setup: Go is missing; install the version that go.mod names" >&2; exit 1; }

wanted='
git git
gcc gcc
pkg-config pkg-config
mkfs.ext4 e2fsprogs
mkfs.xfs xfsprogs
mkfs.btrfs btrfs-progs
losetup mount
blkid util-linux
sfdisk fdisk
setpriv util-linux
ip iproute2
runc runc
crun crun
busybox busybox-static
script bsdutils
systemd-analyze systemd
systemd-nspawn systemd-container
kill procps
qemu-system-x86_64 qemu-system-x86
qemu-img qemu-utils
depmod kmod
fio fio
rpm rpm
dpkg-deb dpkg
man man-db
'
missing=()
while read -r program package; do
	[ -z "$program" ] || type -P "$program" >/dev/null || missing+=("$package")
done <<<"$wanted"
[ -e /usr/include/stdlib.h ] || missing+=(libc6-dev)
[ -e /usr/include/seccomp.h ] || missing+=(libseccomp-dev)
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
