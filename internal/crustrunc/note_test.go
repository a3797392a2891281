package crustrunc

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

func TestPauseIsToldByItsStart(t *testing.T) {
	self, err := identify(os.Getpid())
	must(t, err)
	if !self.lives() {
		t.Fatal("this process does not live")
	}
	other := self
	other.Start++
	if other.lives() || (pause{}).lives() {
		t.Fatal("a process of another start is taken for the same")
	}
	if _, err := other.open("x", 0); err == nil {
		t.Fatal("opened in a process of another start")
	}
}

func TestZombieIsGone(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	must(t, cmd.Start())
	child, err := identify(cmd.Process.Pid)
	must(t, err)
	must(t, cmd.Process.Kill())
	for deadline := time.Now().Add(5 * time.Second); child.lives(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a killed process that nobody waited for is taken for alive")
		}
	}
	_ = cmd.Wait()
}
