package cli

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0B", 1023: "1023B", 1024: "1KiB", 1536: "1.5KiB", 1<<20 - 1: "1MiB", 1 << 20: "1MiB", 20 << 30: "20GiB",
		3 << 39: "1.5TiB", math.MaxInt64: "8EiB",
	} {
		if got := show.Size(n); got != want {
			t.Errorf("size(%d) = %s, want %s", n, got, want)
		}
	}
}

func TestParseSize(t *testing.T) {
	for text, want := range map[string]int64{
		"20Gi": 20 << 30, "20GiB": 20 << 30, "1.5Ti": 3 << 39, "4096": 4096, "10G": 1e10, "1k": 1000, "0.5Ki": 512, "7Ei": 7 << 60,
		"1.0001Ki": 1025, "512B": 512,
	} {
		if got, err := parseSize(text); err != nil || got != want {
			t.Errorf("parseSize(%s) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "Gi", "-1Gi", "0", "8Ei", "1e9", "0x10", "1/2", "1 Gi", "1.2.3", "20gi", "1KiKi", "1_0"} {
		if got, err := parseSize(text); err == nil {
			t.Errorf("parseSize(%q) = %d", text, got)
		}
	}
}

func TestHumanDuration(t *testing.T) {
	const day = 24 * time.Hour
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 119 * time.Second: "119s", 2 * time.Minute: "2m", 150 * time.Second: "2m30s", 90 * time.Minute: "90m",
		3*time.Hour + 5*time.Minute: "3h5m", 30 * time.Hour: "30h", 50 * time.Hour: "2d2h", 100 * day: "100d", 3 * 365 * day: "3y", 800 * day: "2y70d",
	} {
		if got := show.Duration(d); got != want {
			t.Errorf("%s: %s, want %s", d, got, want)
		}
	}
}

func TestEscape(t *testing.T) {
	for in, want := range map[string]string{
		"plain ü 漢":     "plain ü 漢",
		"\x1b[31m":      `\x1b[31m`,
		"a\nb\tc\rd":    `a\nb\tc\rd`,
		"\x7f\u009b":    `\x7f\x9b`,
		"\u202etxt":     `\u202etxt`,
		"\u200b\ufeff":  `\u200b\ufeff`,
		"bad \xff utf8": `bad \xff utf8`,
		"\U000e0041":    `\U000e0041`,
	} {
		if got := show.Escape(in); got != want {
			t.Errorf("escape(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzEscape(f *testing.F) {
	f.Add("a\x1b]0;x\a\u202e\U000e0041\xff")
	f.Fuzz(func(t *testing.T, s string) {
		if got := show.Escape(s); strings.IndexFunc(got, show.Unsafe) >= 0 || !utf8.ValidString(got) {
			t.Errorf("escape(%q) = %q", s, got)
		}
		raw, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var a, b string
		if err := json.Unmarshal(raw, &a); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(show.EscapeJSON(raw), &b); err != nil || a != b {
			t.Errorf("escapeJSON changed %q to %q: %v", a, b, err)
		}
	})
}

func FuzzParseSize(f *testing.F) {
	f.Add("1.5Gi")
	f.Fuzz(func(t *testing.T, s string) {
		if n, err := parseSize(s); err == nil && n <= 0 {
			t.Errorf("%q is %d", s, n)
		}
	})
}
