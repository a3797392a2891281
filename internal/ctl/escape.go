package ctl

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// escape makes text harmless for a terminal. Condition messages come from a
// guest and paths from other programs: neither may move the cursor, set a
// window's title, hide text or end a table's row.
func escape(text string) string { return escapeBut(text, "") }

// escapeLines leaves line feeds, for our own texts of several lines; what the
// daemon says in them starts a line of its own at worst.
func escapeLines(text string) string { return escapeBut(text, "\n") }

func escapeBut(text, allowed string) string {
	if strings.IndexFunc(text, unsafeRune) < 0 {
		return text
	}
	var b strings.Builder
	for len(text) > 0 {
		r, width := utf8.DecodeRuneInString(text)
		switch {
		case r == utf8.RuneError && width == 1:
			fmt.Fprintf(&b, `\x%02x`, text[0])
		case unsafeRune(r) && !strings.ContainsRune(allowed, r):
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

// unsafeRune tells what is no visible sign: controls, directional overrides,
// zero-width signs, private use, and every space but the plain one.
func unsafeRune(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }

// escapeJSON writes what JSON leaves as it is and a terminal does not: C1
// controls, DEL, directional overrides. Such signs stand only inside of strings,
// so the text means the same to a program.
func escapeJSON(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for len(text) > 0 {
		r, width := utf8.DecodeRune(text)
		switch {
		case r < 0x7f || !unsafeRune(r) || r == utf8.RuneError:
			out = append(out, text[:width]...)
		case r < 0x10000:
			out = fmt.Appendf(out, `\u%04x`, r)
		default:
			r -= 0x10000
			out = fmt.Appendf(out, `\u%04x\u%04x`, 0xd800+r>>10, 0xdc00+r&0x3ff)
		}
		text = text[width:]
	}
	return out
}
