package process_test

import (
	"os/exec"
	"testing"

	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestZombieIsGone(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	check.Must(t, cmd.Start())
	child, err := process.Of(cmd.Process.Pid)
	check.Must(t, err)
	check.Must(t, cmd.Process.Kill())
	check.Eventually(t, "a killed process that nobody waited for counts as ended", func() bool { return !child.Lives() })
	_ = cmd.Wait()
}
