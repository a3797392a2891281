#!/bin/bash
# Builds the .debs and the .rpms, of GOARCH, into the directory that is named.
set -euo pipefail
out=$(realpath -m "${1:?usage: hack/package.sh DIRECTORY}")
cd "$(dirname "$0")/.."
export GO=${GO:-go}
web=https://github.com/crust-proxy/crust-proxy/blob/main

# A release is its tag; anything else sorts before the next release.
version() {
	local exact
	if exact=$(git describe --tags --exact-match --match 'v[0-9]*' 2>/dev/null); then
		echo "${exact#v}"
	else
		echo "0.0.0-dev.$(git log -1 --format=%cd --date=format:%Y%m%d%H%M%S 2>/dev/null || echo 0)+$(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
	fi
}

CRUST_VERSION=$(version)
CRUST_ARCH=$("$GO" env GOARCH)
CRUST_SPLIT='0.0.0~dev.20261126093500' # from here on there are three packages
# The same commit gives the same package.
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || date +%s)
export CRUST_VERSION CRUST_ARCH CRUST_SPLIT SOURCE_DATE_EPOCH
umask 022
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# What is built for this machine is below bin/, where `make build` has linked most of it. Help and
# completion come from there: another architecture's programs cannot be run.
host=$("$GO" env GOHOSTARCH)
machine=${CRUST_ARCH/amd64/x86_64} machine=${machine/arm64/aarch64}
GOARCH=$host hack/build.sh bin
ln -sf crust-proxy bin/kubectl-crust
bin=bin
if [ "$CRUST_ARCH" != "$host" ]; then
	bin=bin/$CRUST_ARCH
	hack/build.sh "$bin"
fi
hack/notice.sh >"$work/NOTICE"
GOARCH=$host "$GO" run ./hack/manpages "$CRUST_VERSION" "$(date -u -d "@$SOURCE_DATE_EPOCH" +%F)" bin "$work/man"

put() { install -D -m 0644 -t "$@"; } # DIRECTORY FILE...

# begin PACKAGE [PROGRAM...] begins a package's tree, with the programs and what explains them.
begin() {
	export CRUST_TREE=$work/$1
	all=$CRUST_TREE/all doc=$CRUST_TREE/all/usr/share/doc/$1
	local name=$1 program page
	shift
	mkdir -p "$CRUST_TREE"/{all/usr/bin,deb,rpm}
	for program; do
		[ -e "$all/usr/bin/$program" ] || install -t "$all/usr/bin" "$bin/$program"
		for page in "$work"/man/man?/"$program".?.gz; do
			put "$all/usr/share/man/$(basename "$(dirname "$page")")" "$page"
		done
	done
	put "$doc" LICENSE "$work/NOTICE"
	put "$CRUST_TREE/rpm/usr/share/licenses/$name" LICENSE
	ln -s LICENSE "$doc/copyright"
}

completion() { # PROGRAM
	local fish=$all/usr/share/fish/vendor_completions.d bash=$all/usr/share/bash-completion/completions site
	mkdir -p "$fish" "$bash"
	"bin/$1" completion bash >"$bash/$1"
	"bin/$1" completion fish >"$fish/$1.fish"
	for site in deb/usr/share/zsh/vendor-completions rpm/usr/share/zsh/site-functions; do
		mkdir -p "$CRUST_TREE/$site"
		"bin/$1" completion zsh >"$CRUST_TREE/$site/_$1"
	done
}

# pages lays the pages out with what they link to; other links lead to the web.
pages() {
	put "$doc" ./*.md
	put "$doc/docs" docs/*.md
	local share=$all/usr/share/crust-proxy page target
	mkdir -p "$share" "$doc/systemd"
	cp -r deploy "$share"
	sed -i -E "s/^(version|appVersion): .*/\1: ${CRUST_VERSION%%+*}/" "$share/deploy/helm/crust-proxy/Chart.yaml"
	find proto -name '*.proto' | while read -r proto; do put "$share/$(dirname "$proto")" "$proto"; done
	chmod -R u=rwX,go=rX "$share"
	ln -s ../../crust-proxy/{deploy,proto} "$doc"
	ln -s ../config.yaml "$doc/systemd"
	for page in "$doc"/*.md "$doc"/docs/*.md; do
		{ grep -oP '\]\(\K(?!https?:|mailto:|#)[^)#]+' "$page" || true; } | sort -u | while read -r target; do
			[ -e "$(dirname "$page")/$target" ] ||
				sed -i "s,](${target//./\\.}\([)#]\),]($web/$(realpath -m --relative-to="$doc" "$(dirname "$page")/$target")\1,g" "$page"
		done
	done
}

begin crust-proxy crust-proxy
for program in crustctl kubectl-crust; do
	ln -s crust-proxy "$all/usr/bin/$program"
	put "$all/usr/share/man/man8" "$work/man/man8/$program.8.gz"
done
put "$all/usr/share/man/man5" "$work"/man/man5/*
put "$all/usr/lib/systemd/system" systemd/*.service systemd/*.socket
put "$all/usr/share/crust-proxy" systemd/*.conf
put "$doc" systemd/config.yaml
put "$CRUST_TREE" packaging/config.yaml # in no tree, since it is a configuration file
completion crustctl
pages
begin crust-runtimes crust-runc crust-runc-agent crust-vm crust-vm-agent crust-conformance
begin crust-backup crust-backup
completion crust-backup

mkdir -p "$out"
for package in crust-proxy crust-runtimes crust-backup; do
	export CRUST_TREE=$work/$package
	find "$CRUST_TREE" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
	cat packaging/$package.yaml packaging/nfpm.yaml >"$work/nfpm.yaml"
	# The package's configuration file never changes: no upgrade asks about one that was edited.
	[ $package != crust-proxy ] ||
		echo '  - {src: "${CRUST_TREE}/config.yaml", dst: /etc/crust-proxy/config.yaml, type: config|noreplace, expand: true}' >>"$work/nfpm.yaml"
	for format in deb rpm; do
		rm -f "$out/$package"[_-][0-9]*[._]"$CRUST_ARCH.$format" "$out/$package"-[0-9]*".$machine.$format"
		GOARCH=$host "$GO" tool -modfile=tools/nfpm/go.mod nfpm package --config "$work/nfpm.yaml" --packager "$format" --target "$out"
	done
done
