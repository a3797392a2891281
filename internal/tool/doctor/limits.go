package doctor

import (
	"context"
	"os"
)

// spare is how much of a limit other programs on the node need.
const spare = 1024

func checkLimits(_ context.Context, n Node, d Daemon) []Finding {
	return []Finding{watchLimit(n, d), mountLimit(n)}
}

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
