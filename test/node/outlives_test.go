//go:build system

package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const (
	// kept is the machine's second disk. The daemon keeps it for a machine, by the handler kata.
	kept       = "/dev/vdb"
	keptTarget = "/var/lib/kubelet/pods/11111111-2222-4333-8444-555555555555/volumes/kubernetes.io~csi/kept/mount"
	// lasting is the image of a volume that the reboot meets.
	lasting = "/var/lib/lasting"
)

// outlives runs in the machine: whatever happens to the daemon, a pod goes on that has a volume, and nobody gets
// the device that is kept.
func outlives(t *testing.T) {
	l := prepare(t, "xfs")
	l.image = rig.Image(t, size)
	rig.Mkfs(t, l.fs, l.image)
	l.device = rig.Loop(t, l.image, loopdev.Options{})
	l.start(0)
	for _, event := range []struct {
		name string
		is   func(life)
	}{
		{"restarted", func(l life) { rig.Command(l.t, "systemctl", "restart", "crust-proxy") }},
		{"killed", func(l life) { l.another(unix.SIGKILL) }},
		{"hung", life.hung},
		{"upgraded", func(l life) {
			rig.Command(l.t, "dpkg", "-i", "/root/next-crust-runtimes.deb", "/root/next-crust-proxy.deb")
		}},
		{"not removed", life.notRemoved},
	} {
		t.Run(event.name, l.of(func(l life) {
			started := property(l.t, "ExecMainStartTimestampMonotonic")
			held, answered := throughout(isHeld), throughout(answers)
			event.is(l)
			check.Must(l.t, held())
			err := answered() // on a connection of its own each time: a restart breaks none
			check.That(l.t, err == nil || event.name != "restarted", "a call failed: %v", err)
			l.wantStats()
			l.wantWrites()
			check.That(l.t, property(l.t, "NFileDescriptorStore") == "1", "systemd keeps %s descriptors", property(l.t, "NFileDescriptorStore"))
			again := property(l.t, "ExecMainStartTimestampMonotonic") != started
			check.That(l.t, again == (event.name != "not removed"), "the daemon was started again: %v", again)
		}))
	}
	l.end()
}

func property(t *testing.T, name string) string {
	t.Helper()
	return strings.TrimSpace(rig.Command(t, "systemctl", "show", "--value", "--property="+name, "crust-proxy.service"))
}

// throughout repeats something until it is told to stop, or that fails.
func throughout(do func() error) (stop func() error) {
	end, result := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			if err := do(); err != nil {
				result <- err
				return
			}
			select {
			case <-end:
				result <- nil
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	}()
	return func() error { close(end); return <-result }
}

// isHeld tries to take the device that is kept.
func isHeld() error {
	if err := rig.Exclusive(kept); !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("taking the device that is kept: %w, want EBUSY", err)
	}
	return nil
}

// answers makes a call on a connection of its own.
func answers() error {
	conn, err := rig.Connect("/run/crust-proxy/admin.sock", grpc.WithDefaultCallOptions(grpc.WaitForReady(true)))
	if err != nil {
		return err
	}
	_, err = healthv1.NewHealthClient(conn).Check(context.Background(), &healthv1.HealthCheckRequest{})
	return errors.Join(err, conn.Close())
}

// another sends a signal to the daemon, and waits for the next one.
func (l life) another(signal unix.Signal) {
	l.t.Helper()
	pid := property(l.t, "MainPID")
	check.Must(l.t, unix.Kill(check.Value(strconv.Atoi(pid))(l.t), signal))
	check.Must(l.t, check.Until(8*time.Minute, 100*time.Millisecond, func() error { // the unit allows two for one that hangs
		now, state := property(l.t, "MainPID"), property(l.t, "ActiveState")
		if now == pid || now == "0" || state != "active" {
			return fmt.Errorf("no other daemon runs: it has the pid %s, and is %s", now, state)
		}
		return nil
	}))
}

// hung: systemd's watchdog ends a daemon that does not answer, which then logs where it was.
func (l life) hung() {
	l.another(unix.SIGSTOP)
	rig.Command(l.t, "journalctl", "--sync")
	said := rig.Command(l.t, "journalctl", "--no-pager", "--boot", "--unit=crust-proxy.service")
	check.Says(l.t, "the journal", said, "Watchdog timeout", "SIGABRT: abort", "goroutine ")
}

// notRemoved: neither package goes while a pod has a volume.
func (l life) notRemoved() {
	for name, why := range map[string]string{"crust-proxy": l.target, "crust-runtimes": "crust-runc"} {
		out, err := exec.Command("dpkg", "--remove", name).CombinedOutput()
		check.That(l.t, err != nil, "dpkg removed %s", name)
		check.Says(l.t, "dpkg", string(out), why)
	}
}

// startsToLast runs in the machine, and leaves a pod with a volume.
func startsToLast(t *testing.T) {
	l := prepare(t, "ext4")
	check.Must(t, os.WriteFile(lasting, nil, 0o600))
	check.Must(t, os.Truncate(lasting, size))
	rig.Mkfs(t, l.fs, lasting)
	l.attach()
	l.start(0)
	l.exec("echo lasts >/data/lasts; sync")
}

func (l *life) attach() {
	l.image = lasting
	l.device = check.Value(loopdev.Attach(l.image, loopdev.Options{}))(l.t)
}

// lasts runs in the machine after its reboot, and does what kubelet then does: it publishes again, and makes another
// sandbox of the pod.
func lasts(t *testing.T) {
	l := prepare(t, "ext4")
	left, err := filepath.Glob("/run/crust/*")
	check.That(t, err == nil && len(left) == 0, "the boot before left %q, %v", left, err)
	check.Must(t, l.node.RemovePods())
	l.attach()
	t.Cleanup(func() { check.Must(t, loopdev.Detach(l.device)) })
	l.start(1)
	check.Equal(t, l.exec("cat /data/lasts"), "lasts", "the volume has")
	l.end()
}
