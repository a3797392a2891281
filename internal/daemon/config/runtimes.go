package config

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
)

// noHandler in policy.runtimes means that deferred volumes of a runtime's pods are refused.
const noHandler = "none"

// baseRuntimes apply unless the configuration has the same runtime or pattern.
func baseRuntimes() map[string]string {
	all := map[string]string{"kata*": kataName, "crust*": crustName}
	for pattern := range neverServed() {
		all[pattern] = noHandler
	}
	return all
}

// neverServed are the runtimes of Kata's own installer whose pods would fail, and why.
func neverServed() map[string]string {
	const confidential = "the policy of a confidential guest's agent refuses to mount it"
	return map[string]string{
		"kata-*snp*": confidential, "kata-*tdx*": confidential, "kata-*cca*": confidential, "kata-*coco*": confidential,
		"kata-*-se": confidential, "kata-*-se-*": confidential,
		"kata-remote*": "the machine of a peer pod is elsewhere, and this node's device cannot be attached to it",
	}
}

// runtimes returns the entries by precedence: names before patterns, and the longest, most specific pattern first.
func runtimes(all map[string]string, handlers []string) []policy.Runtime {
	patterns := slices.SortedFunc(maps.Keys(all), func(a, b string) int {
		isPattern := func(s string) int { return min(strings.Count(s, "*"), 1) }
		return cmp.Or(isPattern(a)-isPattern(b), len(b)-len(a), strings.Compare(a, b))
	})
	out := make([]policy.Runtime, 0, len(all))
	for _, pattern := range patterns {
		entry := policy.Runtime{Pattern: pattern, Handler: all[pattern]}
		switch {
		case entry.Handler == noHandler:
			entry.Refuse = cmp.Or(neverServed()[pattern], "the configuration says so")
		case !slices.Contains(handlers, entry.Handler):
			entry.Refuse = "handlers." + entry.Handler + ".enabled is not set on this node"
		}
		out = append(out, entry)
	}
	return out
}

var runtimePattern = regexp.MustCompile(`^[a-z0-9*]([a-z0-9*-]{0,61}[a-z0-9*])?$`)

func validateRuntimes(all map[string]string) (found []error) {
	for _, pattern := range slices.Sorted(maps.Keys(all)) {
		if !runtimePattern.MatchString(pattern) {
			found = append(found, fmt.Errorf("policy.runtimes[%q]: the key is not a handler of a RuntimeClass, or one with * in it", pattern))
		}
		if err := oneOf(fmt.Sprintf("policy.runtimes[%q]", pattern), all[pattern], kataName, crustName, noHandler); err != nil {
			found = append(found, err)
		}
	}
	return found
}
