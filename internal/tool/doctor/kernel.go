package doctor

import (
	"context"
	"errors"
	"io/fs"
	"strings"
)

// Probe tries kernel features. Each function leaves nothing behind, and returns an error that says why it failed.
type Probe struct {
	Openat2 func() error
	Guard   func() error // makes a guard that is mounted nowhere: fsopen and an immutable file on tmpfs
}

func checkKernel(_ context.Context, n Node, _ Daemon) []Finding {
	release, err := n.read("/proc/sys/kernel/osrelease")
	if err != nil {
		return []Finding{warning("", "the kernel's version cannot be read: %v", err)}
	}
	version := strings.TrimSpace(string(release))
	return []Finding{
		feature(version, "5.6", "openat2", "paths cannot be resolved safely", n.Probe.Openat2()),
		feature(version, "6.0", "tmpfs with immutable files (fsopen)", "targets cannot be guarded", n.Probe.Guard()),
	}
}

// feature judges a feature by what was tried: distributions add features to old kernels.
func feature(version, since, name, without string, tried error) Finding {
	switch {
	case tried == nil:
		return okay("kernel %s: %s was tried and works", version, name)
	case errors.Is(tried, fs.ErrPermission):
		return skipped("kernel %s: %s was not tried (run as root); it comes with %s", version, name, since)
	}
	return failure("run kernel "+since+" or later", "kernel %s: %s was tried and fails, so %s: %v", version, name, without, tried)
}

func checkPrograms(_ context.Context, n Node, _ Daemon) []Finding {
	missing := func(name string) bool {
		return len(n.glob("/usr/sbin/"+name, "/usr/bin/"+name, "/sbin/"+name, "/bin/"+name)) == 0
	}
	var found []Finding
	for _, name := range []string{"blkid", "mkfs.ext4", "e2fsck", "resize2fs", "debugfs"} {
		if missing(name) {
			found = append(found, warning("install e2fsprogs and util-linux", "%s is not installed: crust-proxy examines, makes, checks and grows filesystems with it", name))
		}
	}
	for _, name := range []string{"mkfs.xfs", "mkfs.btrfs"} {
		if missing(name) {
			found = append(found, okay("%s is not installed: a blank device of such a volume is refused", name))
		}
	}
	return orOK(found, "the programs for filesystems are installed")
}
