#!/bin/sh
# After install and upgrade. dpkg says "configure [old version]", rpm says 1 or 2.
set -e

case "$1" in
configure) [ -z "$2" ] || [ -e /run/crust-proxy.reinstalled ] && first=yes || first=no ;;
1) first=yes ;;
2) first=no ;;
*) exit 0 ;; # a failed removal or upgrade is being undone
esac
rm -f /run/crust-proxy.reinstalled

# In a chroot or an image build no systemd runs, and nothing is to be started.
[ -d /run/systemd/system ] || exit 0

systemctl daemon-reload
if [ "$first" = yes ]; then
	# The sockets start the daemon when first called; the boot does so anyway.
	systemctl enable crust-proxy.service
	systemctl enable --now crust-proxy-runtime.socket crust-proxy-admin.socket
elif /usr/bin/crust-proxy validate --quiet --config /etc/crust-proxy/config.yaml; then
	# The sockets stay open meanwhile: calls wait, none is refused.
	systemctl try-restart crust-proxy.service
else
	# No error: it would leave the package half-configured. The old daemon has the configuration
	# that was good, while the new one might not take that either.
	echo "crust-proxy: the new version cannot start with /etc/crust-proxy/config.yaml (see above), so the daemon was not" >&2
	echo "crust-proxy: restarted. Correct the file, then: systemctl restart crust-proxy" >&2
fi
