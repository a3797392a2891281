#!/bin/bash
# Builds the images of the chart into a directory, as one OCI layout: crust-proxy and crust-driver,
# for amd64 and arm64 or those that ARCHES names. Needs no root, no daemon and nothing that runs
# another architecture's programs. PROGRAMS-DIRECTORY has a directory of programs for each
# architecture. Prints NAME VERSION ARCH of the Debian packages whose files are in the images.
set -euo pipefail
usage='usage: hack/image.sh DIRECTORY VERSION PROGRAMS-DIRECTORY'
out=$(realpath -m "${1:?$usage}") version=${2:?$usage} built=$(realpath "${3:?$usage}")
cd "$(dirname "$0")/.."
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
fail() { echo "image: $*" >&2; exit 1; }

# The base is of Debian 13's packages. Of their programs it has those that look at devices, format
# them and grow them; busybox is the shell for kubectl exec and the chart's copying of crust-runc.
packages=(base-files libc6 libblkid1 libuuid1 libcom-err2 libext2fs2t64 libss2 libinih1 liburcu8t64 libedit2 libbsd0
	libmd0 libtinfo6 zlib1g liblzo2-2 libzstd1 libudev1 libcap2 libgcc-s1 libatomic1 util-linux e2fsprogs xfsprogs btrfs-progs busybox-static ca-certificates)
programs=' blkid mke2fs mkfs.ext2 mkfs.ext3 mkfs.ext4 e2fsck resize2fs debugfs mkfs.xfs mkfs.btrfs busybox '

umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf "$out"
mkdir -p "$out/blobs/sha256"

debs() { # ARCH: downloads the packages, with apt's files apart from this machine's, and prints their directory
	local cache=${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/crust-proxy/image-base-$1 fresh apt
	local wanted
	wanted=$cache/$(echo "${packages[*]}" | sha256sum | cut -c1-12)
	if [ ! -d "$wanted" ] || [ -n "${CRUST_FRESH_BASE:-}" ]; then
		mkdir -p "$cache"
		fresh=$(mktemp -d "$cache/building-XXXXXX")
		mkdir -p "$fresh"/lists/partial "$fresh"/archives/partial "$fresh"/debs
		: >"$fresh/status"
		echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" >"$fresh/list"
		apt=(apt-get -q -o "APT::Architecture=$1" -o "APT::Architectures=$1" -o "Dir::Etc::SourceList=$fresh/list" -o Dir::Etc::SourceParts=/dev/null
			-o "Dir::State::Lists=$fresh/lists" -o "Dir::State::Status=$fresh/status" -o "Dir::Cache=$fresh"
			-o "Dir::Cache::Archives=$fresh/archives" -o APT::Sandbox::User=root -o Acquire::Languages=none)
		"${apt[@]}" update >&2 || fail "Debian 13's lists cannot be downloaded"
		(cd "$fresh/debs" && "${apt[@]}" download "${packages[@]}" >&2) || fail "Debian 13's packages cannot be downloaded"
		rm -rf "$wanted"
		mv -T "$fresh/debs" "$wanted"
		rm -rf "$fresh"
	fi
	echo "$wanted"
}

base() { # ARCH ROOT
	local deb name keep dir
	mkdir -p "$2"/usr/{bin,sbin,lib,lib64} "$2"/var/lib/dpkg/status.d "$2"/var/run/secrets "$2"/{proc,sys,dev,etc,run} "$2"/tmp
	chmod 1777 "$2/tmp"
	for dir in bin sbin lib lib64; do ln -s usr/$dir "$2/$dir"; done
	for deb in "$(debs "$1")"/*.deb; do
		# Through the links: dpkg-deb would put directories in their place.
		dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$2" --keep-directory-symlink --no-same-owner --exclude='./var/run' \
			--exclude='./usr/share/man' --exclude='./usr/share/locale' --exclude='./usr/share/info' --exclude='./usr/share/lintian' --exclude='./etc/init.d'
		# Where scanners look for the packages of an image without dpkg.
		dpkg-deb --field "$deb" >"$2/var/lib/dpkg/status.d/$(dpkg-deb --field "$deb" Package)"
		dpkg-deb --showformat='${Package} ${Version} ${Architecture}\n' --show "$deb"
	done
	find "$2"/usr/{bin,sbin,libexec} ! -type d 2>/dev/null | while read -r name; do
		[[ $programs == *" ${name##*/} "* ]] || rm "$name"
	done
	# As the package does it when it is installed: for tracing.endpoint, and an API server with a public name.
	mkdir -p "$2/etc/ssl/certs"
	cat "$2"/usr/share/ca-certificates/mozilla/*.crt >"$2/etc/ssl/certs/ca-certificates.crt"
	rm -r "$2/usr/share/ca-certificates"
	for name in sh cp mv rm chmod cat ls mkdir sleep; do ln -s busybox "$2/usr/bin/$name"; done
	echo 'root:x:0:0:root:/root:/bin/sh' >"$2/etc/passwd"
	echo 'root:x:0:' >"$2/etc/group"
	# The node's /run is mounted over this one. Were /var/run a link to it, the service
	# account's token would be mounted into the node's /run.
	[ ! -L "$2/var/run" ] || fail "/var/run is a link"
}

add() { # MEDIA-TYPE FILE: a blob of the layout; prints its descriptor, without the closing brace
	local digest
	digest=$(sha256sum <"$2" | cut -d' ' -f1)
	printf '{"mediaType":"application/vnd.oci.image.%s","digest":"sha256:%s","size":%d' "$1" "$digest" "$(stat -c %s "$2")"
	mv "$2" "$out/blobs/sha256/$digest"
}

layer() { # DIRECTORY: makes a layer of it; sets descriptor and diff
	tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$1" -cf "$work/layer" .
	diff=sha256:$(sha256sum <"$work/layer" | cut -d' ' -f1)
	gzip -n "$work/layer"
	descriptor=$(add layer.v1.tar+gzip "$work/layer.gz")'}'
}

created=$(date -u -d "@$SOURCE_DATE_EPOCH" +%FT%TZ)
labels='"org.opencontainers.image.version":"'$version'","org.opencontainers.image.source":"https://github.com/crust-proxy/crust-proxy","org.opencontainers.image.licenses":"Apache-2.0","org.opencontainers.image.revision":"'$(git rev-parse HEAD)'"'

image() { # NAME ARCH ENTRYPOINT-JSON: an image of the base and the directory NAME; prints its descriptor
	local descriptor diff
	layer "$work/$2/$1"
	printf '{"architecture":"%s","os":"linux","created":"%s","config":{"Entrypoint":%s,"Env":["PATH=/usr/sbin:/usr/bin"],"Labels":{%s}},"rootfs":{"type":"layers","diff_ids":["%s","%s"]}}' \
		"$2" "$created" "$3" "$labels" "$base_diff" "$diff" >"$work/config"
	printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":%s},"layers":[%s,%s],"annotations":{%s}}' \
		"$(add config.v1+json "$work/config")" "$base_layer" "$descriptor" "$labels" >"$work/manifest"
	echo "$(add manifest.v1+json "$work/manifest"),\"platform\":{\"architecture\":\"$2\",\"os\":\"linux\"}}"
}

index() { # NAME MANIFEST...: prints the descriptor of an image for several architectures
	local name=$1 IFS=,
	shift
	printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[%s]}' "$*" >"$work/index"
	printf '%s,"annotations":{"org.opencontainers.image.ref.name":"%s:%s","io.containerd.image.name":"docker.io/library/%s:%s"}}' \
		"$(add index.v1+json "$work/index")" "$name" "$version" "$name" "$version"
}

proxies=() drivers=()
for arch in ${ARCHES:-amd64 arm64}; do
	base "$arch" "$work/$arch/base"
	layer "$work/$arch/base"
	base_layer=$descriptor base_diff=$diff
	for name in crust-proxy crust-driver; do
		install -D -m 0644 -t "$work/$arch/$name/usr/share/doc/crust-proxy" LICENSE "$built/NOTICE"
		mkdir -p "$work/$arch/$name/usr/bin"
		install -t "$work/$arch/$name/usr/bin" "$built/$arch/$name"
	done
	# crust-vm is not here: it needs the node's QEMU, virtiofsd and kernel, so it is installed there.
	install -t "$work/$arch/crust-proxy/usr/bin" "$built/$arch"/crust-{backup,runc,runc-agent}
	ln -s crust-proxy "$work/$arch/crust-proxy/usr/bin/crustctl"
	proxies+=("$(image crust-proxy "$arch" '["/usr/bin/crust-proxy"],"Cmd":["--config","/etc/crust-proxy/config.yaml"]')")
	drivers+=("$(image crust-driver "$arch" '["/usr/bin/crust-driver"]')")
done
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[%s,%s]}\n' \
	"$(index crust-proxy "${proxies[@]}")" "$(index crust-driver "${drivers[@]}")" >"$out/index.json"
echo '{"imageLayoutVersion":"1.0.0"}' >"$out/oci-layout"
