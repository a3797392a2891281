package confine

import (
	"testing"

	"golang.org/x/sys/unix"
)

// TestAFilterThatIsRefusedIsAnError: only a kernel without seccomp does without one.
func TestAFilterThatIsRefusedIsAnError(t *testing.T) {
	err := onThreadOfItsOwn(func() error {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			t.Error(err)
		}
		return install([]unix.SockFilter{{Code: 0xffff}})
	})
	if err == nil {
		t.Error("a program started without the filter")
	}
}
