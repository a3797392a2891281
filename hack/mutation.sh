#!/bin/bash
# Changes one operator at a time in the packages that decide, and counts how many of these mutants their unit tests
# find. Prints the score of each package and the mutants that no test finds, and fails if a function has more of
# them than test/mutants/survivors.txt has reasons for. hack/mutation.sh PACKAGE... tries some only.
set -euo pipefail
cd "$(dirname "$0")/.."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
packages=("$@")
[ $# -gt 0 ] || packages=(pkg/deferral/claim pkg/deferral internal/front/csi/{decision,staging} internal/front/policy)
failed=0

survivors() { # package: file:line:column, mutator, file and function of each
	sed -nE 's/^ *LIVED ([A-Z_]+) at (.*)$/\2 \1/p' "$log" | while read -r at mutator; do
		file=$1/${at%%:*} line=${at#*:}
		echo "$1/$at $mutator $file $(head -n "${line%:*}" "$file" | sed -nE 's/^func (\([^)]*\) )?(\w+).*/\2/p' | tail -1)"
	done
}

for package in "${packages[@]}"; do
	"${GO:-go}" tool -modfile=tools/gremlins/go.mod gremlins unleash "./$package" \
		--exclude-files / --workers 2 --timeout-coefficient 20 --invert-logical >"$log"
	echo "$package: $(sed -nE 's/^(Test efficacy|Mutator coverage): //p' "$log" | paste -sd ' ' | sed 's/ / found, / ; s/$/ covered/')"
	survivors "$package" | awk '
		NR == FNR { if (!/^#/) reasons[$1 " " $2] = $3; next }
		{ print "  " $1, $2, "in", $4; count[$3 " " $4]++ }
		END { for (one in count) if (count[one] > reasons[one]) { print "FAIL  " one ": " count[one] " survive"; bad = 1 }; exit bad }
	' test/mutants/survivors.txt - || failed=1
done
exit "$failed"
