package sys

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// The newest file counts, wherever the kernel lists it.
func TestNewestFiles(t *testing.T) {
	dir := t.TempDir()
	for i := range 300 {
		check.Must(t, os.WriteFile(filepath.Join(dir, strconv.Itoa(i)), nil, 0o600))
	}
	file := check.Value(os.Open(dir))(t)
	listed, err := file.Readdirnames(-1)
	check.Must(t, errors.Join(err, file.Close()))
	want := []string{listed[299], listed[0], listed[150]}
	for i, name := range want {
		at := time.Now().Add(time.Duration(3-i) * time.Hour)
		check.Must(t, os.Chtimes(filepath.Join(dir, name), at, at))
	}
	got, err := NewestFiles(unix.AT_FDCWD, dir, 3, func(string) bool { return true })
	check.That(t, err == nil && slices.Equal(got, want), "the newest are %q, %v, want %q", got, err, want)
}

func TestReadLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "line")
	check.Is(t, check.Err(ReadLine(path)), os.ErrNotExist) // a file that is not there
	for text, want := range map[string]string{"": "", "7:3\n": "7:3", "no newline": "no newline"} {
		check.Must(t, os.WriteFile(path, []byte(text), 0o600))
		got, err := ReadLine(path)
		check.That(t, got == want && err == nil, "%q was read as %q, %v", text, got, err)
	}
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	id, idErr := BootID()
	check.That(t, errors.Join(err, idErr) == nil && id == strings.TrimSpace(string(raw)), "the boot is %q, %v, %v", id, err, idErr)
}
