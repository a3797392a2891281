package vm

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/reference/cgroup"
	"github.com/crust-proxy/crust-proxy/reference/process"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func sleeper(t *testing.T) (process.Process, *exec.Cmd) {
	t.Helper()
	cmd := exec.Command("sleep", "100")
	check.Must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	p := check.Value(process.Of(cmd.Process.Pid))(t)
	go func() { _ = cmd.Wait() }()
	return p, cmd
}

// TestSandboxThatIsNotRemoved does not hold up a new one, nor the removal of the others.
func TestSandboxThatIsNotRemoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goes := make(chan struct{})
		removed := make(chan string, 4)
		began := time.Now()
		err := removeAll([]string{"hangs", "slow", "hangs-too", "fails"}, func(id string) error {
			switch id {
			case "slow":
				time.Sleep(removeTimeout / 2)
			case "fails":
				return errors.New("busy")
			default:
				<-goes
			}
			removed <- id
			return nil
		})
		took := time.Since(began)
		check.That(t, took == removeTimeout && len(removed) == 1, "after %v %d are removed", took, len(removed))
		for _, id := range []string{"hangs cannot", "hangs-too cannot", "fails cannot be removed: busy"} {
			check.That(t, err != nil && strings.Contains(err.Error(), "sandbox "+id), "%q is not told: %v", id, err)
		}
		close(goes)
		for range 3 {
			<-removed
		}
	})
}

func TestRecords(t *testing.T) {
	cfg := Config{StateDir: t.TempDir()}
	process, cmd := sleeper(t)
	r := &record{ID: "c1", Sandbox: "sb", Bundle: "/b", Process: process}
	check.Must(t, os.Mkdir(string(cfg.sandbox("sb")), 0o700))
	check.Must(t, cfg.createRecord(r))
	check.Is(t, cfg.createRecord(&record{ID: "c1", Sandbox: "sb", Bundle: "/other"}), os.ErrExist) // two creates at once
	check.Must(t, os.WriteFile(cfg.StateDir+"/a-stray-file", nil, 0o600))
	found := check.Value(cfg.findRecord("c1"))(t)
	check.That(t, *found == *r && found.status() == "created" && !found.isSandbox(), "%+v", found)
	r.Started = true
	check.Must(t, cfg.writeRecord(r))
	found, err := cfg.findRecord("c1")
	check.That(t, err == nil && found.status() == "running", "%+v, %v", found, err)
	left := check.Value(os.ReadDir(string(cfg.sandbox("sb"))))(t)
	check.That(t, len(left) == 1, "beside the records: %v", left)
	check.Must(t, cmd.Process.Kill())
	check.Eventually(t, "it is stopped", func() bool { return found.status() == "stopped" })
	check.Must(t, cfg.deleteRecord(r))
	check.Is(t, check.Err(cfg.findRecord("c1")), errUnknown)
	// What cannot be examined is not known not to be there: a forced delete would succeed.
	for _, dir := range []string{cfg.sandbox("sb").records(), string(cfg.sandbox("sb")), cfg.StateDir} {
		check.Must(t, os.RemoveAll(dir))
		check.Must(t, os.Symlink(dir, dir)) // leads nowhere, for root too
		_, err = cfg.findRecord("c1")
		check.That(t, err != nil && !errors.Is(err, errUnknown), "%s cannot be read: %v", dir, err)
		check.Must(t, os.Remove(dir))
	}
	for _, id := range []string{"../c1", "*", "", ".c1"} {
		_, err = cfg.findRecord(id)
		check.That(t, err != nil && !errors.Is(err, errUnknown), "%q: %v", id, err)
	}
}

// A number that was given again is not killed.
func TestKillKillsNoOther(t *testing.T) {
	process, cmd := sleeper(t)
	other := process
	other.Start++
	check.Must(t, kill(other, killTimeout))
	check.Must(t, cmd.Process.Signal(syscall.Signal(0)))
	check.Must(t, kill(process, killTimeout))
	check.That(t, !process.Lives(), "it lives")
}

// What nobody knows any more is ended, and what somebody knows is not.
func TestRemoveAbandoned(t *testing.T) {
	check.NeedsRoot(t)
	for name, c := range map[string]struct{ shimLives, bundle, answers, stays bool }{
		"known": {true, true, false, true}, "shim gone": {false, true, false, false}, "bundle gone": {true, false, false, false},
		"ends in order": {false, true, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{StateDir: t.TempDir()}
			supervisor, _ := sleeper(t)
			shim, _ := sleeper(t)
			r := &record{ID: "sb", Sandbox: "sb", Bundle: t.TempDir(), Process: supervisor, Shim: shim}
			if !c.shimLives {
				r.Shim.Start++
			}
			if !c.bundle {
				r.Bundle += "/gone"
			}
			check.Must(t, os.Mkdir(string(cfg.sandbox("sb")), 0o700))
			check.Must(t, cfg.writeRecord(r))
			s := &sandbox{stop: make(chan struct{})}
			if c.answers {
				go func() { _ = s.serveControl(t.Context(), check.Value(listen(cfg.sandbox("sb").controlSocket()))(t)) }()
				check.Eventually(t, "its supervisor answers", func() bool { return cfg.sandbox("sb").end(time.Second) == nil })
			}
			check.Must(t, cfg.removeAbandoned())
			_, err := os.Stat(string(cfg.sandbox("sb")))
			check.That(t, supervisor.Lives() == c.stays && (err == nil) == c.stays,
				"the supervisor lives: %v, its directory: %v", supervisor.Lives(), err)
		})
	}
}

// TestGroupOfAProcessThatStays: whoever is left in the control group is killed, or the pod could never be deleted.
func TestGroupOfAProcessThatStays(t *testing.T) {
	check.NeedsRoot(t)
	r := &record{Group: "/crust-vm-test-" + strconv.Itoa(os.Getpid())}
	process, _ := sleeper(t)
	check.Must(t, cgroup.Join(process.PID, r.Group))
	check.Must(t, r.removeGroup())
	check.That(t, process.Ended(), "it lives")
}

// A killed `create` or `delete` leaves a directory without the sandbox's record. It is removed
// when neither can still be running.
func TestRemoveAbandonedWithoutARecord(t *testing.T) {
	check.NeedsRoot(t)
	cfg := Config{StateDir: t.TempDir(), BootTimeoutSeconds: 60}
	ended, _ := sleeper(t)
	check.Must(t, kill(ended, killTimeout))
	for _, id := range []string{"young", "old", "half"} {
		check.Must(t, os.Mkdir(string(cfg.sandbox(id)), 0o700))
		check.Must(t, os.WriteFile(cfg.sandbox(id).log(), nil, 0o600))
	}
	check.Must(t, os.MkdirAll(cfg.cache(), 0o700))
	check.Must(t, cfg.writeRecord(&record{ID: "c1", Sandbox: "half", Process: ended}))
	past := time.Now().Add(-cfg.bootTime() - readyTimeout - time.Second)
	for _, id := range []string{"old", "half"} {
		check.Must(t, os.Chtimes(string(cfg.sandbox(id)), past, past))
	}
	check.Must(t, os.Chtimes(cfg.cache(), past, past))
	check.Must(t, cfg.removeAbandoned())
	left := check.Value(filepath.Glob(cfg.StateDir + "/*"))(t)
	check.Same(t, cmp.Diff([]string{cfg.cache(), string(cfg.sandbox("young"))}, left), "-want +got")
}
