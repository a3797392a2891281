#!/bin/bash
# Checks the units: systemd-analyze verify is clean, the exposure is at or below
# the limit, and no directive gives the service a mount namespace of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
limit=${CRUST_EXPOSURE_LIMIT:-4.5}
unit=systemd/crust-proxy.service

fail() { echo "check-systemd: $*" >&2; exit 1; }

command -v systemd-analyze >/dev/null || fail "systemd-analyze is missing; hack/setup.sh installs it"

# Read by exec_needs_mount_namespace() in systemd's src/core (252 to 258).
namespace_directives='ProtectSystem|ProtectHome|PrivateTmp|PrivateDevices|PrivateMounts|MountFlags
ProtectKernelTunables|ProtectKernelModules|ProtectKernelLogs|ProtectControlGroups|ProtectProc|ProcSubset
ReadOnlyPaths|ReadWritePaths|InaccessiblePaths|ExecPaths|NoExecPaths
ReadOnlyDirectories|ReadWriteDirectories|InaccessibleDirectories
TemporaryFileSystem|BindPaths|BindReadOnlyPaths|MountImages|ExtensionImages|ExtensionDirectories
RootDirectory|RootImage|RootHash|MountAPIVFS|BindLogSockets
PrivateIPC|IPCNamespacePath|PrivateNetwork|NetworkNamespacePath|JoinsNamespaceOf
PrivatePIDs|PrivateBPF|PrivateUsers|LogNamespace|DynamicUser'
pattern="^[[:space:]]*(${namespace_directives//$'\n'/|})[[:space:]]*="
if found=$(grep -nE "$pattern" "$unit"); then
	fail "kubelet would not see the guard mounts, for this gives the service its own mount namespace:"$'\n'"$found"
fi

# The kernel kills the daemon last of all: without a bound it could take the node.
for directive in MemoryHigh MemoryMax TasksMax RestartSec ExecStopPost; do
	grep -q "^$directive=" "$unit" || fail "$unit sets no $directive"
done

# verify wants every program to exist, so it gets a tree where they do: the
# machine's own units below it, ours and stand-ins for our programs in it.
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{usr/lib/systemd/system,usr/bin,bin,etc/systemd/system}
cp systemd/*.service systemd/*.socket "$root/usr/lib/systemd/system/"
# With the drop-ins that an administrator may add.
mkdir "$root/etc/systemd/system/crust-proxy.service.d"
cp systemd/*.conf "$root/etc/systemd/system/crust-proxy.service.d/"
for dir in /lib/systemd/system /usr/lib/systemd/system; do
	[ -d "$dir" ] && cp -rn "$dir/." "$root/usr/lib/systemd/system/"
done
while read -r program; do
	mkdir -p "$root$(dirname "$program")"
	printf '#!/bin/sh\n' >"$root$program"
	chmod 755 "$root$program"
done < <(sed -nE 's/^Exec[A-Za-z]+=[-@:+!]*([^ ]+).*/\1/p' systemd/*.service | sort -u)

if ! said=$(systemd-analyze verify --root="$root" --man=no --recursive-errors=no \
	crust-proxy.service crust-proxy-runtime.socket crust-proxy-admin.socket 2>&1) || [ -n "$said" ]; then
	fail "systemd-analyze verify complains:"$'\n'"$said"
fi

if ! report=$(systemd-analyze security --offline=true --no-pager "$unit"); then
	fail "systemd-analyze security failed"
fi
exposure=$(sed -nE 's/.*Overall exposure level[^:]*: ([0-9.]+).*/\1/p' <<<"$report")
[ -n "$exposure" ] || fail "no exposure level in the report of systemd-analyze security"
awk -v have="$exposure" -v most="$limit" 'BEGIN { exit !(have <= most) }' ||
	fail "exposure $exposure is above $limit:"$'\n'"$(grep '✗' <<<"$report")"
echo "check-systemd: units verified, exposure $exposure (at most $limit), no mount namespace"
