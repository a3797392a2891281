package sys

import (
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestClipTo(t *testing.T) {
	for _, c := range []struct {
		text string
		most int
		want string
	}{
		{"", 0, ""},
		{"four", 4, "four"},
		{"fives", 4, "five..."},
		{"fünf", 2, "f..."},
		{"fünf", 3, "fü..."},
		{"\x80\x80\x80", 2, "..."},
	} {
		check.Equal(t, ClipTo(c.text, c.most), c.want, "ClipTo(%q, %d)", c.text, c.most)
	}
}

// TestIsText: whatever hides text, or changes how the rest of a line reads, is none.
func TestIsText(t *testing.T) {
	for _, good := range []string{"", "a b", "ü/日本", "𝒳", "e\u0301"} {
		check.That(t, IsText(good), "%q is refused", good)
	}
	for name, r := range map[string]rune{
		"NUL": 0, "escape": 0x1b, "C1": 0x9b, "soft hyphen": 0xad, "no-break space": 0xa0, "combining joiner": 0x34f, "Arabic mark": 0x61c,
		"filler": 0x115f, "zero width": 0x200b, "joiner": 0x200d, "right-to-left mark": 0x200f, "line": 0x2028, "paragraph": 0x2029,
		"override": 0x202e, "isolate": 0x2066, "invisible times": 0x2062, "braille-like filler": 0x3164, "variation": 0xfe0f, "byte order": 0xfeff,
		"annotation": 0xfff9, "private": 0xe000, "tag": 0xe0041, "variation supplement": 0xe0100,
	} {
		check.That(t, !IsText("a"+string(r)+"b"), "%s (%U) is taken", name, r)
	}
	check.That(t, !IsText("\xff"), "broken UTF-8 is taken")
}
