//go:build system

package package_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const machineName = "crust-package-test"

// machine is a container in which systemd is PID 1; what is written in it is gone with it.
type machine struct {
	t    *testing.T
	init int // systemd's pid, seen from here
}

// boot starts a machine over this machine's own files that has the devices.
func boot(t *testing.T, devices ...string) *machine {
	t.Helper()
	options := []string{"--private-network"}
	for _, device := range devices {
		options = append(options, "--bind="+device)
	}
	return bootOver(t, "/", "size=512m", options...)
}

// bootOver starts a machine over the files of lower, with options of nspawn.
func bootOver(t *testing.T, lower, size string, options ...string) *machine {
	t.Helper()
	rig.Need(t, "systemd-nspawn", "nsenter")
	args := append([]string{
		"--directory=" + overlay(t, lower, size), "--machine=" + machineName, "--boot",
		"--register=no", "--keep-unit", "--link-journal=no", "--capability=all",
		"--system-call-filter=bpf landlock_create_ruleset landlock_add_rule landlock_restrict_self",
	}, options...)
	cmd := exec.Command("systemd-nspawn", append(args, "systemd.unit=basic.target", "SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE=1")...)
	console := new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = console, console
	check.Must(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ended tells nothing that the tests do not
		close(ended)
	}()
	m := &machine{t: t}
	t.Cleanup(func() { m.halt(cmd, ended, console) })
	m.wait("boot", func() bool { m.init = initOf(cmd.Process.Pid); return m.init != 0 })
	m.wait("reach basic.target", func() bool {
		out, err := m.command("systemctl", "is-active", "basic.target").Output()
		return err == nil && strings.TrimSpace(string(out)) == "active"
	})
	return m
}

// overlay gives the files of lower with a layer to write to.
func overlay(t *testing.T, lower, size string) string {
	t.Helper()
	layer := rig.Tmpfs(t, size)
	dirs := map[string]string{}
	for _, name := range []string{"upper", "work", "root"} {
		dirs[name] = filepath.Join(layer, name)
		check.Must(t, os.Mkdir(dirs[name], 0o755))
	}
	err := unix.Mount("overlay", dirs["root"], "overlay", 0, "lowerdir="+lower+",upperdir="+dirs["upper"]+",workdir="+dirs["work"])
	check.Require(t, err == nil, "mount overlay: %v", err)
	// With this machine's id nspawn takes the container for this machine.
	id := filepath.Join(dirs["root"], "etc/machine-id")
	err = os.Remove(id)
	check.Require(t, err == nil || errors.Is(err, fs.ErrNotExist), "%v", err)
	check.Must(t, os.WriteFile(id, []byte("c0ffee00c0ffee00c0ffee00c0ffee00\n"), 0o444))
	return dirs["root"]
}

// initOf finds the container's PID 1, a child of nspawn.
func initOf(nspawn int) int {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", nspawn, nspawn))
	if err != nil {
		return 0
	}
	for _, field := range strings.Fields(string(raw)) {
		status, err := os.ReadFile("/proc/" + field + "/status")
		if err != nil {
			continue
		}
		for line := range strings.SplitSeq(string(status), "\n") {
			if ids, found := strings.CutPrefix(line, "NSpid:"); found && strings.HasSuffix(ids, "\t1") {
				pid, _ := strconv.Atoi(field)
				return pid
			}
		}
	}
	return 0
}

func (m *machine) halt(cmd *exec.Cmd, ended <-chan struct{}, console *bytes.Buffer) {
	if m.t.Failed() && m.init != 0 {
		journal, _ := m.command("journalctl", "--no-pager", "--unit=crust-proxy.service", "--lines=60").CombinedOutput()
		m.t.Logf("journal:\n%s", journal)
	}
	if m.init != 0 {
		_ = m.command("systemctl", "poweroff", "--force", "--force").Run()
	} else {
		_ = cmd.Process.Signal(syscall.SIGTERM)
	}
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		_ = cmd.Process.Kill()
		<-ended
	}
	if m.t.Failed() && m.init == 0 {
		m.t.Logf("console:\n%s", console)
	}
	// nspawn leaves it where /run is no tmpfs.
	_ = os.Remove("/run/systemd/nspawn/propagate/" + machineName)
}

func (m *machine) command(program string, args ...string) *exec.Cmd {
	all := append([]string{"--all", "--target=" + strconv.Itoa(m.init), "--", program}, args...)
	cmd := exec.Command("nsenter", all...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", "SYSTEMD_COLORS=0"}
	return cmd
}

// run runs a program in the machine and gives what it said.
func (m *machine) run(program string, args ...string) string {
	m.t.Helper()
	return strings.TrimSpace(check.Run(m.t, m.command(program, args...)))
}

// property is one of the service's properties.
func (m *machine) property(name string) string {
	m.t.Helper()
	return m.run("systemctl", "show", "--value", "--property="+name, "crust-proxy.service")
}

// path is a path in the machine, seen from here.
func (m *machine) path(inside string) string {
	return fmt.Sprintf("/proc/%d/root%s", m.init, inside)
}

// bring copies a file into the machine and gives its path there.
func (m *machine) bring(file string) string {
	m.t.Helper()
	raw := check.Value(os.ReadFile(file))(m.t)
	inside := "/root/" + filepath.Base(file)
	check.Must(m.t, os.WriteFile(m.path(inside), raw, 0o600))
	return inside
}

var waitForDaemon = grpc.WithDefaultCallOptions(grpc.WaitForReady(true))

// dial connects to a socket in the machine for the time of the test.
func (m *machine) dial(socket string) *grpc.ClientConn {
	m.t.Helper()
	return rig.Dial(m.t, m.path(socket), waitForDaemon)
}

func (m *machine) wait(what string, done func() bool) {
	m.t.Helper()
	check.Eventually(m.t, "the machine: "+what, done)
}

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }
