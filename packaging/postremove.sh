#!/bin/sh
# After removal. dpkg says "remove" or "purge", rpm says 0 (1 on upgrade).
set -e

case "$1" in
purge)
	# dpkg removed config.yaml; what an operator put beside it goes too, but not what the runtimes read, which may stay.
	rm -rf /var/lib/crust-proxy
	find /etc/crust-proxy -depth -mindepth 1 ! -name crust-runc.json ! -name crust-vm.json -delete 2>/dev/null || true
	rmdir /etc/crust-proxy 2>/dev/null || true
	;;
# Nothing is behind what it ran with, by which an empty file would start with the front after the next install.
remove) [ -n "${CRUST_PROXY_ABANDON_VOLUMES:-}" ] || rm -f /var/lib/crust-proxy/accepted.yaml ;;
0) rm -rf /var/lib/crust-proxy ;; # rpm purges
*) exit 0 ;;
esac

# Records of living volumes stay: only directories that are empty go, and none under a
# daemon that has the lock, which is a DaemonSet's.
if [ ! -e /run/crust-proxy/daemon.lock ] || flock --nonblock /run/crust-proxy/daemon.lock true; then
	rm -f /run/crust-proxy/daemon.lock /run/crust-proxy/format.lock /run/crust-proxy/state/events.pb*
	find /run/crust-proxy -depth -type d -empty -delete 2>/dev/null || true
fi

if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
fi
