package runc

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestDirectoriesHaveTheirModeAtOnce(t *testing.T) {
	const umask = 0o027
	before := unix.Umask(umask)
	defer unix.Umask(before)
	dir, done := t.TempDir(), make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- errors.Join(setApart(), unix.Mkdir(dir+"/apart", 0o777))
	}()
	check.Must(t, <-done)
	is, err := os.Stat(dir + "/apart")
	if err != nil || is.Mode().Perm() != 0o777 {
		t.Errorf("%v, %v", is.Mode(), err)
	}
	if left := unix.Umask(umask); left != umask {
		t.Errorf("all others have the umask %o, and had %o", left, umask)
	}
}
