#!/bin/bash
# Makes a release twice, in different folders, and compares; signs it with a throw-away key, and has
# the signatures verified; and looks for its version in what came out. A soak does so for arm64, too.
set -euo pipefail
cd "$(dirname "$0")/.."
export GO=${GO:-go} ARCHES=amd64
[ "${CRUST_SOAK:-}" != 1 ] || ARCHES='amd64 arm64'
fail() { echo "check-release: $*" >&2; exit 1; }
version=v0.0.0-check plain=0.0.0-check
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$GO" build -o "$work/artefacts" ./hack/artefacts
"$work/artefacts" key "$work/key"
RELEASE_KEY=$work/key hack/release.sh $version "$work/one" >"$work/log" 2>&1 || { tail -30 "$work/log" >&2; fail "the first one failed"; }
git clone -q "$PWD" "$work/a/folder/elsewhere"
"$work/a/folder/elsewhere/hack/release.sh" $version "$work/two" >"$work/log" 2>&1 || { tail -30 "$work/log" >&2; fail "the second one failed"; }
diff "$work/one/SHA256SUMS" "$work/two/SHA256SUMS" || fail "two builds of one commit differ"

"$work/artefacts" verify "$work/key.pub" "$work/one"
# By a program that is not ours, too.
openssl base64 -d <"$work/one/SHA256SUMS.sig" >"$work/sig"
openssl dgst -sha256 -verify "$work/key.pub" -signature "$work/sig" "$work/one/SHA256SUMS" >/dev/null || fail "openssl does not verify the signature"
echo >>"$work/one/images.txt"
! "$work/artefacts" verify "$work/key.pub" "$work/one" 2>/dev/null || fail "a changed file passes"

for deb in "$work/one"/*.deb; do
	[ "$(dpkg-deb --field "$deb" Version)" = "${plain/-/\~}" ] || fail "$deb has another version"
done
tar -xzf "$work/one/crust-proxy-$plain-linux-amd64.tar.gz" -C "$work"
"$work/crust-proxy-$plain-linux-amd64/crustctl" version --client | grep -q $version || fail "crustctl is of another version"
grep -q "$(sha256sum <"$work/one/crust-proxy-$plain-linux-amd64.tar.gz" | cut -d' ' -f1)" "$work/one/crust.yaml" || fail "krew's manifest has another sum"
helm=$("$GO" tool -n -modfile=tools/kube-deploy/go.mod helm)
"$helm" lint --quiet "$work/one/crust-proxy-$plain.tgz"
"$helm" template x "$work/one/crust-proxy-$plain.tgz" --kube-version=1.34.4 >"$work/rendered"
grep -q "image: crust-proxy:$plain" "$work/rendered" || fail "the chart uses another image"
tar -xzf "$work/one/crust-proxy-$plain.tgz" -C "$work"
grep -q '^| `daemonset.port` | `9814` | Port' "$work/crust-proxy/README.md" || fail "the chart's README has no table of its values"
for file in "$work/one/NOTICE" "$work/crust-proxy/NOTICE" "$work/crust-proxy-$plain-linux-amd64/NOTICE"; do
	grep -q google.golang.org/grpc "$file" || fail "$file is not there"
done

# The image, by its layers: the programs run on what the base has.
mkdir "$work/layout" "$work/root"
tar -xf "$work/one/crust-proxy-$plain-images.tar" -C "$work/layout"
(cd "$work/layout/blobs/sha256" && for blob in *; do echo "$blob  $blob"; done | sha256sum --check --quiet)
blobs=$work/layout/blobs/sha256
child() { grep -oE '"digest":"sha256:[0-9a-f]{64}' "$1" | cut -d: -f3; }
manifest=$blobs/$(child "$blobs/$(child "$work/layout/index.json" | head -1)" | head -1)
for layer in $(child "$manifest" | tail -n +2); do tar -xzf "$blobs/$layer" -C "$work/root"; done
if [ "$(id -u)" = 0 ]; then
	for program in 'crustctl version --client' 'crust-backup --version' 'blkid -V' 'mkfs.ext4 -V' 'mkfs.xfs -V' 'mkfs.btrfs -V' 'e2fsck -V' 'debugfs -V' 'sh -c ls'; do
		chroot "$work/root" $program >/dev/null 2>"$work/log" || { cat "$work/log" >&2; fail "in the image: $program"; }
	done
fi
echo "check-release: $(wc -l <"$work/two/SHA256SUMS") files, twice the same, signed and verified"
