#!/bin/bash
# Makes all files of a release: hack/release.sh VERSION [DIRECTORY], by default into dist/VERSION.
# It builds a clone of HEAD, tagged with the version, so that neither this folder nor what is
# uncommitted in it has a part in what comes out. ARCHES limits the architectures.
# RELEASE_KEY names a file with the private key (PEM, ECDSA P-256): with it the release is signed.
set -euo pipefail
usage='usage: hack/release.sh VERSION [DIRECTORY], with a VERSION such as v1.2.3 or v1.2.3-rc.1'
fail() { echo "release: $*" >&2; exit 1; }
version=${1:-}
[[ $version =~ ^v[0-9]+\.[0-9]+\.[0-9]+(-[0-9A-Za-z.]+)?$ ]] || fail "$usage"
cd "$(dirname "$0")/.."
out=$(realpath -m "${2:-dist/$version}")
export GO=${GO:-go}
[ -z "${RELEASE_KEY:-}" ] || RELEASE_KEY=$(realpath "$RELEASE_KEY")

commit=$(git rev-parse HEAD)
tagged=$(git rev-parse -q --verify "refs/tags/$version^{commit}" || true)
[ -z "$tagged" ] || [ "$tagged" = "$commit" ] || fail "$version is the commit $tagged already, and this is $commit"
[ ! -e "$out" ] || fail "$out is there already"
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH ARCHES=${ARCHES:-amd64 arm64}

umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone -q "$PWD" "$work/source" 2>/dev/null || fail "cannot clone $PWD"
cd "$work/source"
git -c advice.detachedHead=false checkout -q "$commit"
git tag -f "$version" >/dev/null
mkdir -p "$out"

pack() { # NAME DIRECTORY: DIRECTORY as NAME.tar.gz, the same wherever it is made
	tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$(dirname "$2")" -c "$(basename "$2")" | gzip -n >"$out/$1"
}

binaries=()
for arch in $ARCHES; do
	GOARCH=$arch hack/package.sh "$out" >&2
	directory=$work/crust-proxy-${version#v}-linux-$arch
	mkdir -p "$directory" "$work/programs/$arch"
	built=bin/$arch
	[ "$arch" != "$("$GO" env GOHOSTARCH)" ] || built=bin
	find "$built" -maxdepth 1 -type f -name 'crust*' ! -name crustctl -exec cp -t "$work/programs/$arch" {} +
	cp -r "$work/programs/$arch"/* systemd LICENSE CHANGELOG.md "$directory"
	ln -s crust-proxy "$directory/crustctl"
	ln -s crust-proxy "$directory/kubectl-crust"
	GOARCH=$arch hack/notice.sh >"$directory/NOTICE"
	cp "$directory/NOTICE" "$work/programs/NOTICE"
	pack "$(basename "$directory").tar.gz" "$directory"
	binaries+=("$work/programs/$arch"/crust*)
done

# The chart has the version of all else. The links of files/ become files.
cp -rL deploy/helm/crust-proxy "$work/crust-proxy"
sed -i -E "s/^(version|appVersion): .*/\1: ${version#v}/" "$work/crust-proxy/Chart.yaml"
cp LICENSE "$work/programs/NOTICE" "$work/crust-proxy/"
"$GO" run ./hack/chartreadme deploy/helm/crust-proxy >"$work/crust-proxy/README.md"
pack "crust-proxy-${version#v}.tgz" "$work/crust-proxy"

hack/image.sh "$work/image" "${version#v}" "$work/programs" >"$work/debian"
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$work/image" -cf "$out/crust-proxy-${version#v}-images.tar" blobs index.json oci-layout

# What a cluster without access to the Internet needs: ours are in the file above.
{
	printf '%s\n' "crust-proxy:${version#v}" "crust-driver:${version#v}"
	grep -oE 'registry\.k8s\.io/[^ ]+' deploy/helm/crust-proxy/values.yaml
} >"$out/images.txt"

# The plug-in of kubectl, for krew's index.
krew=$(<deploy/krew/crust.yaml)
for arch in $ARCHES; do
	sum=$(sha256sum <"$out/crust-proxy-${version#v}-linux-$arch.tar.gz" | cut -d' ' -f1)
	krew=$(sed "/linux-$arch\.tar\.gz/,/sha256:/s/0\{64\}/$sum/" <<<"$krew")
done
sed "s/0\.0\.0/${version#v}/g" <<<"$krew" >"$out/crust.yaml"

"$GO" build -o "$work/artefacts" ./hack/artefacts
"$work/artefacts" sbom "$version" "$work/debian" "${binaries[@]}" >"$out/crust-proxy-${version#v}.cdx.json"
cp "$work/programs/NOTICE" LICENSE "$out"
(cd "$out" && sha256sum -- * >"$work/sums" && mv "$work/sums" SHA256SUMS)
"$work/artefacts" provenance "$version" "$commit" "$out/SHA256SUMS" >"$out/crust-proxy-${version#v}.intoto.json"
[ -z "${RELEASE_KEY:-}" ] || "$work/artefacts" sign "$RELEASE_KEY" "$out/SHA256SUMS" "$out/crust-proxy-${version#v}.intoto.json"
echo "release: $version is in $out"
