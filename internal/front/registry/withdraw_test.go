package registry

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestWithdraw(t *testing.T) {
	dir, err := os.MkdirTemp("", "wd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	listen := func(name string) *net.UnixListener {
		t.Helper()
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	for _, name := range []string{"dead" + Suffix, "foreign-reg.sock"} {
		if err := listen(name).Close(); err != nil {
			t.Fatal(err)
		}
	}
	listen("served" + Suffix)
	if err := os.WriteFile(filepath.Join(dir, "file"+Suffix), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if gone := Withdraw(dir); !slices.Equal(gone, []string{filepath.Join(dir, "dead"+Suffix)}) {
		t.Errorf("withdrawn: %q", gone)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 3 {
		t.Errorf("left: %v, %v", left, err)
	}
	if gone := Withdraw(dir + "/nowhere"); gone != nil {
		t.Errorf("withdrawn: %q", gone)
	}
}
