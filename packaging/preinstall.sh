#!/bin/sh
# Before install. dpkg says "install [version]" or "upgrade version", rpm 1 or 2.
set -e

# dpkg calls the configuration of a package that had been removed but not purged
# like that of an upgrade. This tells postinstall.sh that units are to be enabled.
if [ "$1" = install ] && [ -n "$2" ]; then
	: >/run/crust-proxy.reinstalled
fi
