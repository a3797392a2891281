package process_test

import (
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
