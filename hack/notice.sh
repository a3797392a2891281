#!/bin/bash
# Writes the licences of all that is linked into our programs: who passes these on has to pass on those.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go}

modules() {
	echo "go $($go env GOVERSION) $($go env GOROOT)"
	CGO_ENABLED=0 $go list -deps -f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Version}} {{.Dir}}{{end}}{{end}}' ./cmd/... | sort -u
}

declare -A users # of a text, which many share
while read -r module version dir; do
	text=$(find "$dir" -maxdepth 1 -type f -iregex '.*/\(licen[cs]e\|notice\|copying\|patents\)[^/]*' -print0 | sort -z | xargs -0r cat)
	[ -n "$text" ] || { echo "$module $version: there is no licence in $dir" >&2; exit 1; }
	users[$text]+="$module $version"$'\n'
done < <(modules)

printf 'crust-proxy is under the licence in the file LICENSE. Its programs contain these modules, under their own:\n'
rule=$(printf '%.0s=' {1..80})
for text in "${!users[@]}"; do
	printf '%s\0' "$rule"$'\n'"${users[$text]}$rule"$'\n\n'"$text"
done | sort -z | tr '\0' '\n'
