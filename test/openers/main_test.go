//go:build system

package openers

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const (
	mib = 1 << 20
	// patience is for other programs, which look at new devices, and for the kernel, which may close
	// a device a moment after the end of a process.
	patience = 30 * time.Second
	// roleEnv makes this program another process, which plays a role in a test.
	roleEnv = "CRUST_TEST_OPENER"
)

func TestMain(m *testing.M) {
	run, has := roles[os.Getenv(roleEnv)]
	if !has {
		os.Exit(rig.Main(m))
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// untilEnd prints that the device is open, and keeps it open until the test ends this process.
func untilEnd() error {
	fmt.Println("open")
	return check.Err(io.Copy(io.Discard, os.Stdin))
}

// inRole makes a command of this program in a role.
func inRole(role, argument string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", argument)
	cmd.Env, cmd.Stderr = append(os.Environ(), roleEnv+"="+role), os.Stderr
	return cmd
}

// opening makes a command that runs a copy of cat, which has a device open by a shell's redirection
// before it prints anything.
func opening(t *testing.T, program, how, device string) *exec.Cmd {
	t.Helper()
	word := filepath.Join(t.TempDir(), "word")
	check.Must(t, os.WriteFile(word, []byte("open\n"), 0o600))
	return exec.Command("sh", "-c", `exec 3`+how+`"$0"; exec "$1" "$2" -`, device, program, word)
}

// counting makes a finder that counts: as root, on the kernels of these tests, it must.
func counting(t *testing.T) *openers.Finder {
	t.Helper()
	f := openers.New()
	method, why := f.Method()
	check.Require(t, method == openers.Counts, "the method is %s: %v", method, why)
	return f
}

func scanning() *openers.Finder { return openers.NewScanner(errors.New("it is tested")) }

// open opens a file for the time of the test.
func open(t *testing.T, path string) int {
	t.Helper()
	fd := check.Value(unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0))(t)
	t.Cleanup(func() { sys.CloseFD(fd) })
	return fd
}

// wantUsers checks who has a device open: a part of the names, or nobody.
func wantUsers(t *testing.T, f *openers.Finder, q openers.Query, want string) {
	t.Helper()
	kernel := want != "" && !strings.HasPrefix(want, "process ")
	err := check.Until(patience, 10*time.Millisecond, func() error {
		users, err := f.Await(t.Context(), q, 0)
		if err == nil && (!names(users.Names, want) || users.Kernel != kernel) {
			err = fmt.Errorf("it is open in %+v; want %q", users, want)
		}
		return err
	})
	check.That(t, err == nil, "%v", err)
}
