#!/bin/sh
# Before removal. dpkg says "remove" or "upgrade VERSION", rpm says 0 or 1.
set -e

case "$1" in
remove | 0) ;;
*) exit 0 ;; # an upgrade: the new version restarts the daemon
esac

units="crust-proxy-runtime.socket crust-proxy-admin.socket crust-proxy.service"

insisted() { [ -n "${CRUST_PROXY_ABANDON_VOLUMES:-}" ]; }

refuse() {
	echo "crust-proxy: not removed. To remove it all the same, set CRUST_PROXY_ABANDON_VOLUMES=1 in the environment" >&2
	echo "crust-proxy: of dpkg, apt or rpm." >&2
	echo "crust-proxy: Where a DaemonSet's daemon has the volumes, first: systemctl disable --now $units" >&2
	exit 1
}

# The daemon of a second kubelet has volumes of its own, and could not start again. After an upgrade of the package it
# may still run the file before: the same path, and not a container's.
second() {
	own=$(systemctl show --property=MainPID --value crust-proxy.service 2>/dev/null)
	for exe in /proc/[0-9]*/exe; do
		[ "$exe" != "/proc/$own/exe" ] || continue
		case $(readlink "$exe") in # first: a program of others may be on a server that hangs
		/usr/bin/crust-proxy) [ "$exe" -ef /usr/bin/crust-proxy ] || continue ;;
		"/usr/bin/crust-proxy (deleted)") [ "${exe%exe}root/usr/bin/crust-proxy" -ef /usr/bin/crust-proxy ] || continue ;;
		*) continue ;;
		esac
		echo "crust-proxy: ${exe%/exe} still runs this program: stop it first" >&2
		return 0
	done
	return 1
}
insisted || ! second || refuse

# Beside another daemon, such as a DaemonSet's, all volumes are in its care. Its run directory may be another one.
held() { [ -e "$1" ] && ! flock --nonblock "$1" true; }
if [ -d /run/systemd/system ] && { held /run/crust-proxy/daemon.lock || held /var/lib/kubelet/crust-proxy/daemon.lock; }; then
	case $(systemctl is-active crust-proxy.service) in
	inactive | failed)
		systemctl disable --now $units
		exit 0
		;;
	esac
fi

# Pods may run on deferred volumes. Without crust-proxy their sandboxes keep the
# devices, and nobody takes those back: so it is not removed under them, unless
# somebody insists. Then guards and records stay as they are, for the next install.
set --
[ ! -e /etc/crust-proxy/config.yaml ] || set -- --config /etc/crust-proxy/config.yaml
! insisted || set -- "$@" --abandon-volumes
/usr/bin/crust-proxy removable "$@" >/dev/null || insisted || refuse

if [ ! -d /run/systemd/system ]; then
	! command -v systemctl >/dev/null || systemctl disable --quiet $units
	exit 0
fi
was=
for unit in $units; do
	case $(systemctl is-active "$unit") in
	inactive | failed) ;;
	*) was="$was $unit" ;;
	esac
done
systemctl stop $units
# Until it had ended, the daemon took volumes.
if ! insisted && ! /usr/bin/crust-proxy removable "$@" >/dev/null; then
	[ -z "$was" ] || systemctl start $was
	refuse
fi
systemctl disable $units
# kubelet would call sockets that nobody serves, and take the drivers from nobody else.
# With a bad configuration they are looked for in the usual place.
/usr/bin/crust-proxy withdraw "$@" >/dev/null || /usr/bin/crust-proxy withdraw >/dev/null
