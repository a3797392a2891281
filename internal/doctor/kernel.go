package doctor

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
)

// Probe tries kernel features. Each function does nothing that outlives it, and gives
// an error that says why it failed.
type Probe struct {
	// Openat2 tries openat2, which resolves paths safely.
	Openat2 func() error
	// Guard makes a guard that is mounted nowhere: fsopen, fsmount and an immutable
	// file on tmpfs.
	Guard func() error
}

// KernelProbe tries the running kernel.
func KernelProbe() Probe { return Probe{Openat2: probeOpenat2, Guard: guard.Probe} }

func probeOpenat2() error {
	fd, err := sys.OpenBeneath(unix.AT_FDCWD, ".", unix.O_PATH, 0)
	sys.CloseFD(fd)
	return err
}

type feature struct {
	name         string
	major, minor int
	need         string
	probe        func() error
}

func checkKernel(_ context.Context, n Node, _ Daemon) []Finding {
	release, err := n.read("/proc/sys/kernel/osrelease")
	if err != nil {
		return []Finding{warning("", "the kernel's version cannot be read: %v", err)}
	}
	version := strings.TrimSpace(string(release))
	features := []feature{
		{"openat2", 5, 6, "paths cannot be resolved safely", n.Probe.Openat2},
		{"tmpfs with immutable files (fsopen)", 6, 0, "targets cannot be guarded", n.Probe.Guard},
	}
	var found []Finding
	for _, f := range features {
		found = append(found, f.finding(version))
	}
	return found
}

// finding believes what was tried; the version decides only where trying is
// not allowed.
func (f feature) finding(version string) Finding {
	upgrade := fmt.Sprintf("run kernel %d.%d or later", f.major, f.minor)
	err := f.probe()
	switch {
	case err == nil:
		return okay("kernel %s: %s was tried and works", version, f.name)
	case !mayNotTry(err):
		return failure(upgrade, "kernel %s: %s was tried and fails, so %s: %v", version, f.name, f.need, err)
	case atLeast(version, f.major, f.minor):
		return okay("kernel %s has %s by its version (to have it tried, run as root)", version, f.name)
	}
	return failure(upgrade, "kernel %s is too old for %s, so %s", version, f.name, f.need)
}

func mayNotTry(err error) bool {
	return errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES)
}

func atLeast(version string, major, minor int) bool {
	var a, b int
	if _, err := fmt.Sscanf(version, "%d.%d", &a, &b); err != nil {
		return false
	}
	return a > major || a == major && b >= minor
}
