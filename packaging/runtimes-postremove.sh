#!/bin/sh
# After removal. dpkg says "remove" or "purge", rpm says 0 (1 on upgrade).
set -e

case "$1" in
remove | purge | 0) ;;
*) exit 0 ;;
esac

# The empty control groups of crust-runc's agent, in every hierarchy.
rmdir /sys/fs/cgroup/crust-runc /sys/fs/cgroup/*/crust-runc 2>/dev/null || true

# What crust-vm has made of the guest's kernel; a sandbox's directory stays.
rm -rf /run/crust-vm/.cache
rmdir /run/crust-vm 2>/dev/null || true

[ "$1" != purge ] || rm -f /etc/crust-proxy/crust-runc.json /etc/crust-proxy/crust-vm.json
[ "$1" != purge ] || rmdir /etc/crust-proxy 2>/dev/null || true
