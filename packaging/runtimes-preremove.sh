#!/bin/sh
# Before removal. dpkg says "remove" or "upgrade VERSION", rpm says 0 or 1.
set -e

case "$1" in
remove | 0) ;;
*) exit 0 ;; # an upgrade: running containers keep the old programs
esac
[ -z "${CRUST_PROXY_ABANDON_VOLUMES:-}" ] || exit 0

# Without its runtime nobody can exec into a container, kill it and delete it, with or
# without deferred volumes.
for runtime in /usr/bin/crust-runc /usr/bin/crust-vm; do
	[ -x $runtime ] && ! $runtime crust removable || continue
	echo "crust-runtimes: not removed. To remove it all the same, set CRUST_PROXY_ABANDON_VOLUMES=1 in the environment" >&2
	echo "crust-runtimes: of dpkg, apt or rpm; exec, kill and delete fail then until it is installed again." >&2
	exit 1
done
