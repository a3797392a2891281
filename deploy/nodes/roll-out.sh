#!/bin/sh
# Installs crust-proxy on nodes, or upgrades it, one node after the other, by ssh as root. It stops at the first node
# that refuses, or that is not healthy afterwards; nodes after it are not touched. To roll back, give the older package.
#
#   roll-out.sh PACKAGE [CONFIG.yaml] -- NODE...
#
# PACKAGE is a .deb or .rpm. CONFIG.yaml replaces the node's configuration if the node's own crust-proxy accepts it;
# what it replaces stays as config.yaml.old.
# WAIT is how long a node may take until `crustctl doctor` finds no error (2m), PAUSE the seconds between two nodes (0),
# and SSH and SCP are the programs with their options.
set -eu
usage() {
	sed -n 's/^#  *\(roll-out.sh\)/usage: \1/p' "$0" >&2
	exit 2
}
options='-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4'
package=${1:-} config='' ssh=${SSH:-ssh $options} scp=${SCP:-scp -q $options}
case $package in
*.deb) install='apt-get install -qq -y --no-install-recommends --allow-downgrades -o Dpkg::Options::=--force-confold' ;;
*.rpm) install='rpm -U --oldpackage --replacepkgs' ;;
*) usage ;;
esac
shift
[ "${1:---}" = -- ] || { config=$1 && shift; }
[ "${1:-}" = -- ] && [ $# -gt 1 ] || usage
shift

dir=''
failed() {
	[ -z "$dir" ] || $ssh "$1" "rm -rf $dir" || true
	echo "$1: $2. Stopped: the nodes after it are as they were." >&2
	exit 1
}

for node; do
	dir=''
	made=$($ssh "$node" 'mktemp -d /var/tmp/crust-proxy.XXXXXXXX') || failed "$node" "it cannot be reached"
	case $made in
	/var/tmp/crust-proxy.????????) dir=$made ;;
	*) failed "$node" "it has no directory for the package" ;;
	esac
	file=$dir/$(basename "$package")
	$scp "$package" "$node:$file" || failed "$node" "the package cannot be copied"
	$ssh "$node" "DEBIAN_FRONTEND=noninteractive $install $file" || failed "$node" "the package was not installed"
	if [ -n "$config" ]; then
		new=$dir/config.yaml now=/etc/crust-proxy/config.yaml
		$scp "$config" "$node:$new" || failed "$node" "the configuration cannot be copied"
		$ssh "$node" "crust-proxy validate --quiet --config $new" || failed "$node" "the configuration was not accepted"
		$ssh "$node" "{ cmp -s $new $now || ! test -e $now || cp -p $now $now.old; } && install -m 0644 $new $now" ||
			failed "$node" "the configuration cannot be replaced"
		$ssh "$node" "systemctl restart crust-proxy.service" ||
			failed "$node" "crust-proxy does not start; its configuration was $now.old"
	fi
	$ssh "$node" "rm -rf $dir" || failed "$node" "$dir cannot be removed"
	$ssh "$node" "crustctl doctor --quiet --wait ${WAIT:-2m}" || failed "$node" "crustctl doctor finds errors"
	# A package whose daemon cannot start with the configuration leaves the one before it running.
	$ssh "$node" '[ "$(crustctl version | awk "NR < 3 { print \$2 }" | uniq | wc -l)" = 1 ]' ||
		failed "$node" "another version than the installed one runs"
	echo "$node: installed and healthy"
	sleep "${PAUSE:-0}"
done
