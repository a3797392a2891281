package sys

import (
	"strings"
	"testing"
)

func FuzzMountinfo(f *testing.F) {
	f.Add("36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n")
	f.Add("1 2 3:4 / / rw - tmpfs crust:abc rw\n\n - \n")
	f.Add("1 2 3:4 /a\\ /b\\7 rw - t \\134\\777 rw")
	f.Fuzz(func(t *testing.T, text string) {
		if _, err := parseMounts(t.Context(), strings.NewReader(text), nil); err != nil {
			t.Error(err)
		}
	})
}

func TestParseMounts(t *testing.T) {
	got, err := parseMounts(t.Context(), strings.NewReader(
		"36 35 98:0 /a\\040b /mnt\\0112 rw shared:1 master:2 - tmpfs crust:ab\\134c rw\nnonsense\n"), nil)
	if err != nil || len(got) != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	want := Mount{Number: "98:0", Root: "/a b", Point: "/mnt\t2", Source: `crust:ab\c`}
	if got[0] != want {
		t.Errorf("got %+v", got[0])
	}
}
