#!/bin/sh
# Before install. dpkg says "install [version]" or "upgrade version", rpm 1 or 2.
set -e

# crust-runc and crust-vm were in this package, and running pods may need them. dpkg takes them away
# during the upgrade: so crust-runtimes has to have taken them over before.
case "$1" in
upgrade | 2)
	for runtime in /usr/bin/crust-runc /usr/bin/crust-vm; do
		[ -x $runtime ] && ! $runtime crust removable || continue
		if [ "$1" = 2 ]; then
			# What else rpm installs in this transaction is not known: see posttrans.sh.
			ln -f $runtime $runtime.kept
		elif ! dpkg-query --search $runtime | grep -q ^crust-runtimes:; then
			echo "crust-proxy: not upgraded, because pods run by $runtime, which is in the package crust-runtimes now:" >&2
			echo "crust-proxy: install that one first." >&2
			exit 1
		fi
	done
	;;
install)
	# dpkg calls the configuration of a package that had been removed but not purged
	# like that of an upgrade. This tells postinstall.sh that units are to be enabled.
	[ -z "$2" ] || : >/run/crust-proxy.reinstalled
	;;
esac
