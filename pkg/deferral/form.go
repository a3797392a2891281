package deferral

import (
	"regexp"
	"sync"
)

// lazily makes a pattern at its first use: a program that is started for each
// container reads volumes by this package, and shall not pay for what it never
// matches.
func lazily(pattern string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
}
