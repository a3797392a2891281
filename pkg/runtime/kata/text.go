package kata

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	maxMessage   = 1 << 10 // of a volume's condition
	maxErrorText = 512     // of a shim's error, in ours
)

// clip bounds text by whole runes.
func clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}

// printable makes a guest's text safe to show: bounded, valid UTF-8, nothing
// that moves a terminal's cursor or starts a new log line.
func printable(s string, most int) string {
	if len(s) > 4*most {
		s = s[:4*most] // bounds the work, too
	}
	clean := strings.Map(func(r rune) rune {
		switch {
		case r == utf8.RuneError:
			return '?'
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, s)
	return clip(strings.TrimSpace(clean), most)
}
