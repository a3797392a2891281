package show

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
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
		check.Equal(t, EscapeCell(text), want, "EscapeCell(%q)", text)
	}
}

func TestASCIIIsASCII(t *testing.T) {
	got := EscapeASCII("Größe 容量 \u202e\x1b \U0001f600 \xfe")
	check.That(t, strings.IndexFunc(got, func(r rune) bool { return r > 126 || r < 32 }) < 0, "%q", got)
	want := `Gr\xf6\xdfe \u5bb9\u91cf \u202e\x1b \U0001f600 \xfe`
	check.That(t, got == want, "%q, want %q", got, want)
}

func TestPercentOfWhatIsNotEmptyIsNotZero(t *testing.T) {
	for _, c := range []struct {
		used, total int64
		want        string
	}{{0, 100, "0%"}, {1, 1 << 40, "1%"}, {50, 100, "50%"}, {100, 100, "100%"}, {5, 0, ""}, {5, -1, ""}} {
		check.Equal(t, Percent(c.used, c.total), c.want, "Percent(%d, %d)", c.used, c.total)
	}
}

func TestNamesOfVolumes(t *testing.T) {
	for want, v := range map[string]*adminv1.Volume{
		"data":  {PvcName: "data", TargetPath: "/k/pods/u/volumes/kubernetes.io~csi/pvc-1/mount", VolumeId: "vol-1"},
		"pvc-1": {TargetPath: "/k/pods/u/volumes/kubernetes.io~csi/pvc-1/mount", VolumeId: "vol-1"},
		"vol-1": {TargetPath: "/k/plugins/kubernetes.io/csi/d/4f5e/globalmount", VolumeId: "vol-1"},
		"disk":  {TargetPath: "/data/disk/"}, "/": {TargetPath: "/"}, ".": {}, "mount": {TargetPath: "mount"},
	} {
		check.Equal(t, VolumeName(v), want, "%v", v)
	}
}

func TestSize(t *testing.T) {
	for n, want := range map[int64]string{
		0: "0B", 1023: "1023B", 1024: "1KiB", 1536: "1.5KiB", 1<<20 - 1: "1MiB", 1 << 20: "1MiB", 20 << 30: "20GiB",
		3 << 39: "1.5TiB", math.MaxInt64: "8EiB",
	} {
		check.Equal(t, Size(n), want, "Size(%d)", n)
	}
}

func TestDuration(t *testing.T) {
	for d, want := range map[time.Duration]string{-time.Second: "0s", 119 * time.Second: "119s", 90 * time.Minute: "90m", 2400 * time.Hour: "100d"} {
		check.Equal(t, Duration(d), want, "%s", d)
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
		check.Equal(t, Escape(in), want, "escape(%q)", in)
	}
}

func FuzzEscape(f *testing.F) {
	f.Add("a\x1b]0;x\a\u202e\U000e0041\xff")
	f.Fuzz(func(t *testing.T, s string) {
		got := Escape(s)
		check.That(t, strings.IndexFunc(got, Unsafe) < 0 && utf8.ValidString(got), "escape(%q) = %q", s, got)
		raw := check.Value(json.Marshal(s))(t)
		var a, b string
		check.Must(t, json.Unmarshal(raw, &a))
		err := json.Unmarshal(EscapeJSON(raw), &b)
		check.That(t, err == nil && a == b, "escapeJSON changed %q to %q: %v", a, b, err)
	})
}
