package qemu

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// The guest that proves KVM runs: here by emulation, which is everywhere.
func TestTheSmallestGuestEnds(t *testing.T) {
	program, err := exec.LookPath("qemu-system-x86_64")
	check.Needs(t, err == nil && os.Getuid() == 0, "QEMU and root")
	check.Succeeds(t, "the smallest guest ends", func() error { return probe(program, 1_900_000_000, false) })
	t.Log("by KVM:", ProbeKVM(program, 1_900_000_000))
}

// TestBothEndsAreReported: virtiofsd ends with QEMU, so which was first is not known.
func TestBothEndsAreReported(t *testing.T) {
	ended := func(text string) *child {
		c := &child{done: make(chan struct{}), err: errors.New(text)}
		close(c.done)
		return c
	}
	m := &Machine{qemu: ended("no such accelerator"), fs: ended("exit status 0")}
	err := m.withExit(errors.New("no answer"))
	check.That(t, err.Error() == "no answer; it ended: no such accelerator; virtiofsd ended: exit status 0", "%v", err)
}

// TestAQEMUThatEndsAtOnce is told of at once, with how it ended.
func TestAQEMUThatEndsAtOnce(t *testing.T) {
	check.NeedsRoot(t)
	file := filepath.Join(t.TempDir(), "file")
	check.Must(t, os.WriteFile(file, nil, 0o644)) //nolint:gosec // QEMU's user reads it
	ctx := check.Within(t, 30*time.Second)
	_, err := Start(ctx, Config{Program: "/bin/false", Virtiofsd: "/bin/false", Kernel: file, Initramfs: file, User: 1_900_000_000, Dir: t.TempDir()})
	check.That(t, err != nil && ctx.Err() == nil && strings.Contains(err.Error(), "exit status 1"), "%v, %v", err, ctx.Err())
}

// TestVirtiofsdThatHangs when it is killed keeps neither the disks nor the supervisor.
func TestVirtiofsdThatHangs(t *testing.T) {
	cmd := exec.Command("sleep", "100")
	check.Must(t, cmd.Start())
	disk := check.Value(os.Open(os.DevNull))(t)
	synctest.Test(t, func(t *testing.T) {
		m := &Machine{fs: &child{cmd: cmd, done: make(chan struct{})}, disks: map[string]*Disk{"disk": {file: disk}}}
		killed := make(chan struct{})
		go func() { m.Kill(); close(killed) }()
		synctest.Wait()                         // it waits for virtiofsd
		check.Is(t, disk.Close(), os.ErrClosed) // and has closed the disks before
		<-killed
	})
	_ = cmd.Wait()
}
