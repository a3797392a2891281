package mountopt

import (
	"slices"
	"testing"
)

func TestSplit(t *testing.T) {
	got := Split([]string{"noatime,ro", " discard , ,commit=5", `context="u:r:t:s0:c1,c2",rw`, `"a,ro`})
	want := []string{"noatime", "ro", "discard", "commit=5", `context="u:r:t:s0:c1,c2"`, "rw", `"a,ro`}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
	if again := Split(got); !slices.Equal(again, want) {
		t.Errorf("split a second time: %q", again)
	}
}
