#!/bin/bash
# Runs a demonstration: hack/demo.sh [pod | vm]. First it checks what the demonstration needs of
# this machine, and names all that is missing with the remedy, before it downloads, installs or
# builds anything. Then it installs and builds only what that demonstration runs.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PATH:/usr/sbin:/sbin
go=${GO:-go}
kind=${1:-demo}
target=demo-$kind
programs=(crust-proxy crustctl crust-driver)
case $kind in
demo) target=demo ;;
pod) programs+=(crust-runc crust-runc-agent) ;;
vm) programs+=(crust-vm crust-vm-agent) ;;
*) echo "demo: make demo, make demo-pod or make demo-vm" >&2 && exit 2 ;;
esac

problems=0
problem() { # what, remedy
	[ "$problems" != 0 ] || echo "The demonstration cannot run here:" >&2
	problems=$((problems + 1))
	printf '  - %s\n    %s\n' "$1" "$2" >&2
}

# older reports whether version $1 is older than $2.
older() { [ "$1" != "$2" ] && [ "$(printf '%s\n' "$1" "$2" | sort -V | head -1)" = "$1" ]; }

check_go() {
	local has wanted remedy
	wanted=$(sed -n 's/^go //p' go.mod)
	remedy="Install Go $wanted or newer: https://go.dev/dl/"
	if ! type -P "$go" >/dev/null; then
		problem "Go is missing." "$remedy"
		return
	fi
	has=$(GOTOOLCHAIN=local "$go" version | awk '{ sub("go", "", $3); print $3 }')
	# Since 1.21, Go fetches the version that go.mod names, unless it is told not to.
	if older "$has" "$wanted" && { older "$has" 1.21 || [[ $(cd / && "$go" env GOTOOLCHAIN) != *auto* ]]; }; then
		problem "Go $has is too old." "$remedy"
	elif ! has_modules && ! has_certificates; then
		problem "Go modules have to be downloaded, and no CA certificates are installed." \
			"apt-get update && apt-get install -y ca-certificates"
	fi
}

# has_modules reports whether nothing has to be downloaded by Go. containerd has modules of its own.
has_modules() {
	[ "$kind" = demo ] && GOPROXY=off "$go" list -deps ./test/demo "${programs[@]/#/./cmd/}" >/dev/null 2>&1
}

has_certificates() {
	local file
	for file in ${CRUST_CERTIFICATES:-${SSL_CERT_FILE:-} /etc/ssl/certs/ca-certificates.crt /etc/ssl/cert.pem \
		/etc/ssl/ca-bundle.pem /etc/pki/tls/certs/ca-bundle.crt /etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem}; do
		[ ! -s "$file" ] || return 0
	done
	return 1
}

privileged="A container has to be privileged, with the node's /dev: docker run --privileged -v /dev:/dev ..."

# check_kernel tries what only root may do, and what a container often may not.
check_kernel() {
	if [ "$(id -u)" != 0 ]; then
		problem "This is not root: the demonstration makes mounts and loop devices, and removes them." \
			"sudo -E make $target"
		return
	fi
	unshare -m mount -t tmpfs tmpfs /mnt 2>/dev/null ||
		problem "It cannot have a mount namespace of its own, or mount nothing there (unshare -m)." "$privileged"
	attach_loop ||
		problem "No loop device can be attached (losetup --find --show)." \
			"modprobe loop. $privileged"
}

attach_loop() {
	local image device
	type -P losetup >/dev/null || { [ -e /dev/loop-control ] && return; } # it is installed later
	image=$(mktemp)
	truncate -s 1M "$image"
	device=$(losetup --find --show "$image" 2>/dev/null) && losetup --detach "$device"
	local result=$?
	rm -f "$image"
	return "$result"
}

check_kernel
check_go
[ "$problems" = 0 ] || exit 1

hack/setup.sh "$kind"
if [ "$kind" != demo ]; then
	echo "Building containerd (the first time, this takes minutes)..."
	GO=$go hack/containerd.sh >/dev/null
fi
[ "$kind" != vm ] || hack/guest-kernel.sh >/dev/null
echo "Building ${programs[*]}..."
export CGO_ENABLED=0
GO=$go hack/build.sh bin "${programs[@]}"
"$go" build -o bin/demo ./test/demo
case $kind in
demo) exec bin/demo ;;
*) exec bin/demo "$kind" ;;
esac
