package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
)

// Probe tries kernel features. Each function leaves nothing behind, and returns an error that
// says why it failed.
type Probe struct {
	Openat2 func() error
	Guard   func() error // makes a guard that is mounted nowhere: fsopen and an immutable file on tmpfs
}

// KernelProbe tries the running kernel.
func KernelProbe() Probe { return Probe{Openat2: sys.ProbeOpenat2, Guard: guard.Probe} }

func checkKernel(_ context.Context, n Node, _ Daemon) []Finding {
	release, err := n.read("/proc/sys/kernel/osrelease")
	if err != nil {
		return []Finding{warning("", "the kernel's version cannot be read: %v", err)}
	}
	version := strings.TrimSpace(string(release))
	return []Finding{
		feature(version, 5, 6, "openat2", "paths cannot be resolved safely", n.Probe.Openat2()),
		feature(version, 6, 0, "tmpfs with immutable files (fsopen)", "targets cannot be guarded", n.Probe.Guard()),
	}
}

// feature judges a feature by what was tried, and by the version only if trying is not allowed.
func feature(version string, major, minor int, name, without string, tried error) Finding {
	upgrade := fmt.Sprintf("run kernel %d.%d or later", major, minor)
	switch {
	case tried == nil:
		return okay("kernel %s: %s was tried and works", version, name)
	case !mayNotTry(tried):
		return failure(upgrade, "kernel %s: %s was tried and fails, so %s: %v", version, name, without, tried)
	case atLeast(version, major, minor):
		return okay("kernel %s has %s by its version (to have it tried, run as root)", version, name)
	}
	return failure(upgrade, "kernel %s is too old for %s, so %s", version, name, without)
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

// spare is how much of a limit other programs on the node need.
const spare = 1024

// watchLimit checks the limit of inotify watches: the daemon has one for each volume's directory.
func watchLimit(n Node, d Daemon) Finding {
	const file = "/proc/sys/fs/inotify/max_user_watches"
	limit, err := n.readInt(file)
	if err != nil {
		return warning("", "the limit of inotify watches cannot be read: %v", err)
	}
	entries, _ := kataEntries(n) // the Kata checks report an error; the daemon's number is used then
	volumes := int64(max(len(d.Volumes), len(entries)))
	do := "sysctl fs.inotify.max_user_watches=524288, and put it in /etc/sysctl.d"
	switch {
	case limit < volumes:
		return failure(do, "fs.inotify.max_user_watches is %d with %d volumes: new sandboxes are not noticed", limit, volumes)
	case limit < 2*volumes+spare:
		return warning(do, "fs.inotify.max_user_watches is %d with %d volumes: other programs of the same user need watches too", limit, volumes)
	}
	return okay("fs.inotify.max_user_watches is %d with %d volumes", limit, volumes)
}

// mountLimit checks the limit of mounts: a guard for each volume, and the binds of containers.
func mountLimit(n Node) Finding {
	limit, err := n.readInt("/proc/sys/fs/mount-max")
	if err != nil {
		return warning("", "the limit of mounts cannot be read: %v", err)
	}
	table, err := n.table()
	if err != nil {
		return noTable(err)
	}
	count := int64(len(table))
	do := "sysctl fs.mount-max=1000000, and put it in /etc/sysctl.d"
	switch {
	case count+spare/8 >= limit:
		return failure(do, "%d of at most %d mounts (fs.mount-max) are in use: the next publish fails", count, limit)
	case count > limit/2:
		return warning(do, "%d of at most %d mounts (fs.mount-max) are in use", count, limit)
	}
	return okay("%d of at most %d mounts are in use", count, limit)
}

// checkLoop reports whether there are loop devices. Only runtimes on the host's own kernel need
// them, so their absence is no fault by itself.
func checkLoop(_ context.Context, n Node, _ Daemon) []Finding {
	if _, err := os.Stat(n.at("/dev/loop-control")); err != nil {
		return []Finding{okay("there are no loop devices; image files then work only where the VMM opens them itself")}
	}
	return []Finding{okay("loop devices are there")}
}
