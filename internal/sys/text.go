// Package sys has the small helpers that more than one package needs, each once.
package sys

import (
	"regexp"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// Clip shortens a long value, so that a hostile one cannot fill a log.
func Clip(s string) string { return ClipTo(s, 256) }

// ClipTo shortens a text to at most so many bytes and "...", by whole characters.
func ClipTo(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most] + "..."
}

// IsText tells whether s is valid UTF-8 without control characters.
func IsText(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

// LazyRegexp compiles a pattern at its first use. A program that is started for each
// container does not pay for patterns that it never matches.
func LazyRegexp(pattern string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(pattern) })
}
