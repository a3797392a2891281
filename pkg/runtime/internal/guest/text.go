package guest

import (
	"context"
	"errors"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// MaxErrorText bounds what of a sandbox's error stands in ours.
const MaxErrorText = 512

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
	return sys.ClipTo(strings.TrimSpace(clean), most-len("..."))
}

// ContextError is what a call gives whose context has ended. Who is the one that was
// asked, such as "Kata sandbox 1234", or "" where nobody was.
func ContextError(v *volume.Volume, who string, err error) error {
	kind := volume.Timeout
	text := "did not answer in time; it may be overloaded or hung"
	if errors.Is(err, context.Canceled) {
		kind, text = volume.Canceled, "was not waited for: the caller went away"
	}
	if who == "" {
		return volume.Errorf(kind, "volume %s: the call ended before anything was done: %w", v.Target, err)
	}
	return volume.Errorf(kind, "volume %s: %s %s: %w", v.Target, who, text, err)
}
