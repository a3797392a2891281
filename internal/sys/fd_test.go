package sys

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReadLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "line")
	if _, err := ReadLine(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
	for text, want := range map[string]string{"": "", "7:3\n": "7:3", "no newline": "no newline"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := ReadLine(path); got != want || err != nil {
			t.Errorf("%q was read as %q, %v", text, got, err)
		}
	}
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if id, idErr := BootID(); errors.Join(err, idErr) != nil || id != strings.TrimSpace(string(raw)) {
		t.Errorf("the boot is %q, %v, %v", id, err, idErr)
	}
}
