package guest

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxErrorText bounds what of a sandbox's error stands in ours.
const MaxErrorText = 512

// Clip bounds text by whole runes.
func Clip(s string, most int) string {
	if len(s) <= most {
		return s
	}
	for most > 0 && !utf8.RuneStart(s[most]) {
		most--
	}
	return s[:most]
}

// Printable makes a guest's text safe to show: bounded, valid UTF-8, nothing
// that moves a terminal's cursor or starts a new log line.
func Printable(s string, most int) string {
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
	return Clip(strings.TrimSpace(clean), most)
}
