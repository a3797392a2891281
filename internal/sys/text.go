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

var (
	driverForm = LazyRegexp(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$`)
	podUIDForm = LazyRegexp(`^[A-Za-z0-9][A-Za-z0-9-]{0,63}$`)
)

// IsDriverName tells whether CSI allows a text as the name of a driver. Such a name can be
// a part of a path.
func IsDriverName(s string) bool { return driverForm().MatchString(s) }

// IsPodUID tells whether a text can be the UID of a pod and a part of a path. It is
// generous: static pods have a hash for a UID.
func IsPodUID(s string) bool { return podUIDForm().MatchString(s) }
