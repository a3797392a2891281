package vm

import (
	"os"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestWhatACopyCannotBeOf: only of what nobody else is to see changes of.
func TestWhatACopyCannotBeOf(t *testing.T) {
	dir, file := t.TempDir(), t.TempDir()+"/file"
	check.Must(t, os.WriteFile(file, nil, 0o600))
	for _, one := range []struct {
		bind bind
		want string
	}{
		{bind{source: dir}, ""}, // its root filesystem
		{bind{source: dir, destination: "/config", readOnly: true}, ""},
		{bind{source: file, destination: "/dev/termination-log"}, ""},
		{bind{source: dir, destination: "/cache"}, "its mount at /cache is a directory of the node that it may write to"},
		{bind{source: os.DevNull, destination: "/null", readOnly: true}, "its mount at /null is neither a file nor a directory"},
		{bind{source: dir + "/gone", destination: "/gone", readOnly: true}, "no such file"},
	} {
		err := checkCopies([]bind{one.bind})
		if (err == nil) != (one.want == "") || err != nil && !strings.Contains(err.Error(), one.want) {
			t.Errorf("%+v: %v", one.bind, err)
		}
	}
}

// TestMeasure: a filesystem is large enough for many small files as well as for a large one.
func TestMeasure(t *testing.T) {
	tree := t.TempDir()
	for _, name := range []string{"one", "two", "three"} {
		check.Must(t, os.WriteFile(tree+"/"+name, []byte("small"), 0o600))
	}
	check.Must(t, os.Truncate(tree+"/one", 1<<30))
	bytes, inodes, err := measure(t.Context(), tree)
	if err != nil || bytes < 1<<30+4*4096 || inodes < 4 {
		t.Errorf("%d bytes, %d inodes, %v", bytes, inodes, err)
	}
	if _, _, err := measure(t.Context(), tree+"/gone"); err == nil {
		t.Error("a tree that is not there has a size")
	}
	if _, err := makeImage(t.Context(), Config{ImageDir: t.TempDir(), MaxImageMiB: 1024}, tree); err == nil || !strings.Contains(err.Error(), "maxImageMiB") {
		t.Errorf("an image that is too large: %v", err)
	}
}
