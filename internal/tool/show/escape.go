// Package show formats what the daemon reports for people: sizes, times, states, and text that cannot harm a terminal.
package show

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Escape makes text safe for a terminal. Condition messages come from a guest and paths from other programs: they must
// not move the cursor, set a window's title, hide text or end a table's row.
func Escape(text string) string { return escape(text, Unsafe) }

// EscapeLines keeps line feeds, for our own texts of several lines. At worst, text from
// the daemon in them starts a new line.
func EscapeLines(text string) string {
	return escape(text, func(r rune) bool { return r != '\n' && Unsafe(r) })
}

// EscapeCell is for a screen that is drawn cell by cell. It also escapes combining
// characters, whose widths differ between terminals.
func EscapeCell(text string) string {
	return escape(text, func(r rune) bool { return Unsafe(r) || unicode.Is(unicode.M, r) })
}

// EscapeASCII is EscapeCell for a terminal without Unicode.
func EscapeASCII(text string) string {
	return escape(text, func(r rune) bool { return r > unicode.MaxASCII || Unsafe(r) })
}

func escape(text string, harmful func(rune) bool) string {
	if strings.IndexFunc(text, harmful) < 0 {
		return text
	}
	var b strings.Builder
	for len(text) > 0 {
		r, width := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && width == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case harmful(r):
			b.WriteString(escapeRune(r))
		default:
			b.WriteString(text[:width])
		}
		text = text[width:]
	}
	return b.String()
}

func escapeRune(r rune) string {
	switch {
	case r == '\n':
		return `\n`
	case r == '\t':
		return `\t`
	case r == '\r':
		return `\r`
	case r < 0x100:
		return fmt.Sprintf(`\x%02x`, r)
	case r < 0x10000:
		return fmt.Sprintf(`\u%04x`, r)
	}
	return fmt.Sprintf(`\U%08x`, r)
}

// Unsafe reports whether a character is not plainly visible.
func Unsafe(r rune) bool { return !sys.IsPrintable(r) || r == utf8.RuneError }

// EscapeJSON escapes the characters that JSON allows unescaped and that control a terminal: C1 controls, DEL,
// directional overrides. They occur only inside strings, so a program reads the same text.
func EscapeJSON(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for len(text) > 0 {
		r, width := utf8.DecodeRune(text)
		if r < 0x7f || !Unsafe(r) || r == utf8.RuneError {
			out = append(out, text[:width]...)
		} else {
			for _, unit := range utf16.AppendRune(nil, r) {
				out = fmt.Appendf(out, `\u%04x`, unit)
			}
		}
		text = text[width:]
	}
	return out
}
