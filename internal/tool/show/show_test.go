package show

import (
	"strings"
	"testing"
)

func TestCellsHoldNothingOfUncertainWidth(t *testing.T) {
	for text, want := range map[string]string{
		"plain":          "plain",
		"Größe 容量":       "Größe 容量",
		"e\u0301":        `e\u0301`,
		"a\u200db":       `a\u200db`,
		"\x1b[2J\a":      `\x1b[2J\x07`,
		"two\nlines":     `two\nlines`,
		"\xff":           `\xff`,
		"\u202etxt":      `\u202etxt`,
		"wide\u3000ones": `wide\u3000ones`,
	} {
		if got := EscapeCell(text); got != want {
			t.Errorf("EscapeCell(%q) = %q, want %q", text, got, want)
		}
	}
}

func TestASCIIIsASCII(t *testing.T) {
	got := EscapeASCII("Größe 容量 \u202e\x1b \U0001f600 \xfe")
	if strings.IndexFunc(got, func(r rune) bool { return r > 126 || r < 32 }) >= 0 {
		t.Errorf("%q", got)
	}
	if want := `Gr\xf6\xdfe \u5bb9\u91cf \u202e\x1b \U0001f600 \xfe`; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestPercentOfWhatIsNotEmptyIsNotZero(t *testing.T) {
	for _, c := range []struct {
		used, total int64
		want        string
	}{{0, 100, "0%"}, {1, 1 << 40, "1%"}, {50, 100, "50%"}, {100, 100, "100%"}, {5, 0, ""}, {5, -1, ""}} {
		if got := Percent(c.used, c.total); got != c.want {
			t.Errorf("Percent(%d, %d) = %q, want %q", c.used, c.total, got, c.want)
		}
	}
}
