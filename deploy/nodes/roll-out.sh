#!/bin/sh
# Installs crust-proxy on nodes, or upgrades it, one node after the other, by ssh as root. It stops at the first node
# that refuses, or that is not healthy afterwards; nodes after it are not touched. To roll back, give the older package.
#
#   roll-out.sh PACKAGE [CONFIG.yaml] -- NODE...
#
# PACKAGE is a .deb or .rpm. CONFIG.yaml replaces the node's configuration if the node's own crust-proxy accepts it.
# WAIT is how long a node may take until `crustctl doctor` finds no error (2m), PAUSE the seconds between two nodes (0),
# and SSH and SCP are the programs with their options.
set -eu
usage() {
	sed -n 's/^#  *\(roll-out.sh\)/usage: \1/p' "$0" >&2
	exit 2
}
package=${1:-} config='' ssh=${SSH:-ssh -o BatchMode=yes} scp=${SCP:-scp -q -o BatchMode=yes}
case $package in
*.deb) install='apt-get install -qq -y --no-install-recommends --allow-downgrades -o Dpkg::Options::=--force-confold' ;;
*.rpm) install='rpm -U --oldpackage' ;;
*) usage ;;
esac
shift
[ "${1:---}" = -- ] || { config=$1 && shift; }
[ "${1:-}" = -- ] && [ $# -gt 1 ] || usage
shift

failed() {
	echo "$1: $2. Stopped: the nodes after it are as they were." >&2
	exit 1
}

for node; do
	file=/var/tmp/$(basename "$package")
	$scp "$package" "$node:$file" || failed "$node" "the package cannot be copied"
	$ssh "$node" "DEBIAN_FRONTEND=noninteractive $install $file && rm -f $file" || failed "$node" "the package was not installed"
	if [ -n "$config" ]; then
		$scp "$config" "$node:/var/tmp/crust-proxy.yaml" || failed "$node" "the configuration cannot be copied"
		$ssh "$node" "crust-proxy validate --quiet --config /var/tmp/crust-proxy.yaml &&
			install -m 0644 /var/tmp/crust-proxy.yaml /etc/crust-proxy/config.yaml && systemctl restart crust-proxy.service" ||
			failed "$node" "the configuration was not accepted"
	fi
	$ssh "$node" "crustctl doctor --quiet --wait ${WAIT:-2m}" || failed "$node" "crustctl doctor finds errors"
	echo "$node: installed and healthy"
	sleep "${PAUSE:-0}"
done
