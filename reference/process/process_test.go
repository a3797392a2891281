package process_test

import (
	"bufio"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestZombieIsGone(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	check.Must(t, cmd.Start())
	child := check.Value(process.Of(cmd.Process.Pid))(t)
	check.Must(t, cmd.Process.Kill())
	check.Eventually(t, "a killed process that nobody waited for counts as ended", func() bool { return child.Ended() && !child.Lives() })
	_ = cmd.Wait()
}

// Who has no descriptor left must not take the living for dead.
func TestWhatCannotBeExaminedHasNotEnded(t *testing.T) {
	self := check.Value(process.Of(os.Getpid()))(t)
	var limit, none unix.Rlimit
	check.Must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	none.Max = limit.Max
	check.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &none))
	lives, ended := self.Lives(), self.Ended()
	check.Must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	check.That(t, !lives && !ended, "without a descriptor it is certain that it lives (%v) or has ended (%v)", lives, ended)
	check.That(t, self.Lives() && !self.Ended(), "it does not live")
}

func TestDirectoriesHaveTheirModeAtOnce(t *testing.T) {
	check.NeedsRoot(t)
	const umask = 0o027
	before := unix.Umask(umask)
	defer unix.Umask(before)
	dir := t.TempDir() + "/apart"
	self := check.Value(process.Of(os.Getpid()))(t)
	check.Must(t, self.Inside(func() error { return unix.Mkdir(dir, 0o777) }))
	check.Equal(t, check.Value(os.Stat(dir))(t).Mode().Perm(), 0o777, "the mode")
	check.Equal(t, unix.Umask(umask), umask, "the umask of all others")
	self.Start++
	check.Is(t, self.Inside(func() error { return nil }), process.ErrEnded)
}

// asChild is set in the environment of a process that closes what it has inherited.
const asChild = "CRUST_TEST_CLOSE_INHERITED"

func TestMain(m *testing.M) {
	if os.Getenv(asChild) != "" {
		process.CloseInherited(3)
		_, _ = os.Stdout.WriteString("closed\n")
		_, _ = os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestWhatIsInheritedByAccidentIsClosed: whoever reads from a pipe until its end does not wait
// for a process that only came to have it.
func TestWhatIsInheritedByAccidentIsClosed(t *testing.T) {
	wanted, wantedEnd, err := os.Pipe()
	check.Must(t, err)
	left, leftEnd, err := os.Pipe()
	check.Must(t, err)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env, cmd.ExtraFiles = []string{asChild + "=1"}, []*os.File{wantedEnd, leftEnd}
	stdin := check.Value(cmd.StdinPipe())(t)
	stdout := check.Value(cmd.StdoutPipe())(t)
	check.Must(t, cmd.Start())
	_, _ = wantedEnd.Close(), leftEnd.Close()
	check.Must(t, check.Err(bufio.NewReader(stdout).ReadString('\n')))
	ended := func(pipe *os.File) bool {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pipe.Fd()), Events: unix.POLLIN}}, 0) //nolint:gosec // descriptors are small
		return err == nil && n == 1
	}
	check.That(t, ended(left) && !ended(wanted), "open: what it was given %v, what was left %v", !ended(wanted), !ended(left))
	check.Must(t, stdin.Close())
	check.Must(t, cmd.Wait())
}
