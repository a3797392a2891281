//go:build system

package broker

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// roleEnv makes the test binary play another process: a role and its argument.
const roleEnv = "CRUST_TEST_ROLE"

// roles are what a shell's redirection cannot do.
var roles = map[string]func(arg string) error{
	"flap": flapShared, "flap exclusively": flapExclusive,
}

// play does what a role does, and holds it until its input ends.
func play(role string) int {
	name, arg, _ := strings.Cut(role, ":")
	if err := roles[name](arg); err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		return 1
	}
	fmt.Println("open")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}

// inRole prepares a process with a role.
func inRole(name, arg string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe") // another user cannot reach it by its path
	cmd.Env, cmd.Stderr = append(os.Environ(), roleEnv+"="+name+":"+arg), os.Stderr
	return cmd
}

func openDisk(path string, flags int) (int, error) { return unix.Open(path, flags|unix.O_CLOEXEC, 0) }

// span is a time of the kernel's monotonic clock, which all processes share.
type span struct{ from, to int64 }

func now() int64 {
	var at unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &at) // it cannot fail
	return at.Nano()
}

func flapShared(path string) error    { return flap(path, 0) }
func flapExclusive(path string) error { return flap(path, unix.O_EXCL) }

// flap opens and closes a device until its input ends, and writes when it had it open for certain.
func flap(path string, flags int) error {
	ended := make(chan struct{})
	go func() { defer close(ended); _, _ = io.Copy(io.Discard, os.Stdin) }()
	for {
		select {
		case <-ended:
			return nil
		default:
		}
		fd, err := openDisk(path, unix.O_RDONLY|flags)
		if err == nil {
			had := span{from: now()}
			moment(30 * time.Millisecond)
			had.to = now()
			_ = unix.Close(fd)
			fmt.Println(had.from, had.to)
		} else if !errors.Is(err, unix.EBUSY) {
			return err
		}
		moment(10 * time.Millisecond)
	}
}

// moment is a short time, often none.
func moment(most time.Duration) {
	if rand.IntN(3) > 0 {
		time.Sleep(rand.N(most))
	}
}

// flapper is a process that opens and closes a device.
type flapper struct {
	end func()

	mu  sync.Mutex
	had []span
}

func startFlapper(t *testing.T, role, disk string) *flapper {
	t.Helper()
	cmd := inRole(role, disk)
	stdin := check.Value(cmd.StdinPipe())(t)
	stdout := check.Value(cmd.StdoutPipe())(t)
	check.Must(t, cmd.Start())
	f, told := &flapper{}, make(chan struct{})
	go func() {
		defer close(told)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			var had span
			if _, err := fmt.Sscan(lines.Text(), &had.from, &had.to); err != nil {
				return // its last line
			}
			f.mu.Lock()
			f.had = append(f.had, had)
			f.mu.Unlock()
		}
	}()
	f.end = sync.OnceFunc(func() {
		_ = stdin.Close()
		<-told
		check.NoError(t, cmd.Wait(), "the follower")
	})
	t.Cleanup(f.end)
	return f
}

// spans are when it had the device open, as far as it told by now. After its end, they are all.
func (f *flapper) spans() []span {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.had)
}
