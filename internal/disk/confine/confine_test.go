package confine

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestAFilterThatIsRefusedIsAnError: only a kernel without seccomp does without one.
func TestAFilterThatIsRefusedIsAnError(t *testing.T) {
	err := onThreadOfItsOwn(func() error {
		check.Must(t, unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		return install([]unix.SockFilter{{Code: 0xffff}})
	})
	check.That(t, err != nil, "a program started without the filter")
}
