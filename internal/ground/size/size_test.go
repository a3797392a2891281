package size

import (
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]int64{
		"20Gi": 20 << 30, "20GiB": 20 << 30, "1.5Ti": 3 << 39, "4096": 4096, "10G": 1e10, "1k": 1000, "0.5Ki": 512, "7Ei": 7 << 60,
		"1.0001Ki": 1025, "512B": 512,
	} {
		got, err := Parse(text)
		check.That(t, err == nil && got == want, "Parse(%s) = %d, %v; want %d", text, got, err, want)
	}
	for _, text := range []string{"", "Gi", "-1Gi", "0", "8Ei", "1e9", "0x10", "1/2", "1 Gi", "1.2.3", "20gi", "1KiKi", "1_0"} {
		got, err := Parse(text)
		check.That(t, err != nil, "Parse(%q) = %d", text, got)
	}
}

func TestFlag(t *testing.T) {
	f := Flag(1 << 30)
	check.That(t, f.String() == "1Gi" && f.Set("1.5Gi") == nil && f == 3<<29 && f.String() == "1536Mi" && f.Set("0") == nil && f == 0 && f.Set("lots") != nil,
		"%v", f)
}
