#!/bin/sh
# Before removal. dpkg says "remove" or "upgrade VERSION", rpm says 0 or 1.
set -e

case "$1" in
remove | 0) ;;
*) exit 0 ;; # an upgrade: the new version restarts the daemon
esac

# Guards and records of living volumes stay as they are: pods run on them. The
# sandboxes keep their devices; only staging, stats and growth stop.
live=$(grep -c ' - tmpfs crust:' /proc/self/mountinfo 2>/dev/null || true)
if [ "${live:-0}" -gt 0 ]; then
	echo "crust-proxy: warning: $live deferred volume(s) are live on this node. Their guard mounts and" >&2
	echo "crust-proxy: records in /run/crust-proxy stay; drain the node, or install crust-proxy again," >&2
	echo "crust-proxy: so that kubelet can unpublish them." >&2
fi

[ -d /run/systemd/system ] || exit 0
systemctl disable --now crust-proxy-runtime.socket crust-proxy-admin.socket crust-proxy.service
