#!/bin/sh
# After install and upgrade. dpkg says "configure [old version]", rpm says 1 or 2.
set -e

case "$1" in
configure) [ -z "$2" ] || [ -e /run/crust-proxy.reinstalled ] && first=yes || first=no ;;
1) first=yes ;;
2) first=no ;;
*) exit 0 ;; # a failed removal or upgrade is being undone
esac
sockets="crust-proxy-runtime.socket crust-proxy-admin.socket"
units="crust-proxy.service $sockets"

# Beside another daemon, such as a DaemonSet's, nothing is enabled either: at the next boot this one would be first,
# and kubelet would lose the drivers behind the other.
other=no
for lock in /run/crust-proxy/daemon.lock /var/lib/kubelet/crust-proxy/daemon.lock; do
	[ "$first" = no ] || [ ! -e $lock ] || flock --nonblock $lock true || other=yes
done

# What an operator has masked is neither enabled nor started.
managed=no
if command -v systemctl >/dev/null && ! systemctl is-enabled $units 2>/dev/null | grep -q ^masked; then
	managed=yes
	# Also in a chroot or an image build: what is installed there starts at the first boot.
	[ "$first$other" != yesno ] || systemctl enable $units
fi
rm -f /run/crust-proxy.reinstalled

# In a chroot or an image build no systemd runs, and nothing is to be started.
[ -d /run/systemd/system ] || exit 0

systemctl daemon-reload
if [ "$managed" != yes ]; then
	echo "crust-proxy: a unit of it is masked: nothing was started or restarted" >&2
	exit 0
fi
if [ "$other" = yes ]; then
	echo "crust-proxy: another daemon runs, which may be a DaemonSet's: nothing was enabled or started. To change to the package," >&2
	echo "crust-proxy: stop that one on this node, then: systemctl enable --now $units" >&2
	exit 0
fi
start=try-restart outcome=restarted
if [ "$first" = yes ]; then
	systemctl start $sockets
	# kubelet calls sockets of drivers that the daemon makes: they start nothing.
	start="start --no-block" outcome=started
fi
if /usr/bin/crust-proxy validate --quiet --config /etc/crust-proxy/config.yaml; then
	# The two sockets stay open meanwhile: their calls wait, none is refused.
	systemctl $start crust-proxy.service
else
	# No error: it would leave the package half-configured. The old daemon has the configuration
	# that was good, while the new one might not take that either.
	echo "crust-proxy: the new version cannot start with /etc/crust-proxy/config.yaml (see above), so the daemon was not" >&2
	echo "crust-proxy: $outcome. Correct the file, then: systemctl restart crust-proxy" >&2
fi
