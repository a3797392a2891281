package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// checkKataDir checks who may write to Kata's directory; that it can be used is the handler's health.
func checkKataDir(_ context.Context, n Node, _ Daemon) []Finding {
	dir := n.Config.Handlers.Kata.DirectVolumes
	info, err := os.Lstat(n.at(dir))
	if err != nil {
		return []Finding{skipped("not looked at: %v", err)}
	}
	var found []Finding
	if mode := info.Mode().Perm(); mode != 0o700 {
		found = append(found, failure("chmod 0700 "+quoted(dir), "%s has mode %04o, and it says which devices sandboxes get", dir, mode))
	}
	if owner := ownerOf(info); owner != 0 && owner != n.UID {
		found = append(found, failure("chown root "+quoted(dir), "%s belongs to uid %d", dir, owner))
	}
	return orOK(found, "%s has mode 0700", dir)
}

// With less, the daemon does not write the history: what is left is for the records.
const leastFree, leastInodes = 16 << 20, 100

// checkRunDir: records must die with a reboot, as the mounts they speak of do.
func checkRunDir(_ context.Context, n Node, _ Daemon) []Finding {
	dir := n.Config.RunDir
	info, err := os.Stat(n.at(dir))
	if err != nil {
		makes := show.Either(n.Service.InPod, "the daemon makes the directory in the node's /run, which the DaemonSet mounts", "its unit makes the directory (RuntimeDirectory=)")
		return []Finding{failure(n.Service.Status()+"; "+makes, "the run directory %s cannot be used: %v", dir, err)}
	}
	if !info.IsDir() {
		return []Finding{failure("remove the file, then: "+n.Service.Restart(), "%s is not a directory", dir)}
	}
	var st unix.Statfs_t
	if err := unix.Statfs(n.at(dir), &st); err == nil {
		free := st.Bavail * uint64(st.Bsize)                                                            //nolint:gosec // no block has a negative size
		if st.Flags&unix.ST_RDONLY != 0 || free < leastFree || st.Files > 0 && st.Ffree < leastInodes { // some have no inodes to count
			return []Finding{failure("mount it read-write, or find out what fills it: du -xs, du -xs --inodes", "the run directory %s is "+
				"almost full or read-only: events are not recorded, and soon no volume can be published: %d MiB and %d inodes are free", dir, free>>20, st.Ffree)}
		}
	}
	m, problem := n.mountOf(dir)
	if m == nil {
		return []Finding{problem}
	}
	if m.FSType != "tmpfs" && m.FSType != "ramfs" {
		return []Finding{failure("set runDir to a directory on tmpfs, below /run on most nodes, or mount a tmpfs there",
			"%s lies on %s (%s), not on tmpfs: its records would outlive a reboot, which the mounts do not", dir, m.FSType, m.Mountpoint)}
	}
	return []Finding{okay("%s lies on %s", dir, m.FSType)}
}

func checkSockets(_ context.Context, n Node, _ Daemon) []Finding {
	return append(checkSocket(n, "admin", n.AdminSocket), checkSocket(n, "runtime", n.Config.RuntimeSocket.Path)...)
}

func checkSocket(n Node, name, path string) []Finding {
	look, recreate := "systemctl status crust-proxy-runtime.socket crust-proxy-admin.socket crust-proxy",
		"systemctl restart crust-proxy-runtime.socket crust-proxy-admin.socket, and see that the units' SocketMode is 0600 or 0660"
	if n.Service.InPod {
		look, recreate = n.Service.Logs(),
			n.Service.Restart()+", and see that the configuration's runtimeSocket.mode and adminSocket.mode are 0600 or 0660"
	}
	info, err := os.Lstat(n.at(path))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return []Finding{failure(look, "the %s socket %s does not exist", name, path)}
	case err != nil:
		return []Finding{failure("run crustctl doctor as root", "the %s socket %s cannot be looked at: %v", name, path, err)}
	case info.Mode().Type() != fs.ModeSocket:
		return []Finding{failure("remove the file, then: "+n.Service.Restart(), "%s is not a socket", path)}
	}
	var found []Finding
	mode := info.Mode().Perm()
	if mode&0o007 != 0 {
		found = append(found, failure(recreate, "the %s socket %s is open to every user: mode %04o", name, path, mode))
	}
	if owner := ownerOf(info); owner != 0 && owner != n.UID {
		found = append(found, failure(recreate, "the %s socket %s belongs to uid %d, who can put a program of his own behind it", name, path, owner))
	}
	return orOK(append(found, checkParent(n, filepath.Dir(path))...), "the %s socket %s has mode %04o", name, path, mode)
}

// checkParent checks the directory of a socket: whoever can write to it can replace the socket.
func checkParent(n Node, dir string) []Finding {
	info, err := os.Stat(n.at(dir))
	if err != nil {
		return []Finding{warning("run crustctl doctor as root", "%s cannot be looked at: %v", dir, err)}
	}
	if info.Mode().Perm()&0o022 != 0 && info.Mode()&fs.ModeSticky == 0 {
		return []Finding{failure("chmod go-w "+quoted(dir), "others than its owner may write to %s (mode %04o) and so replace the socket",
			dir, info.Mode().Perm())}
	}
	return nil
}

func ownerOf(info fs.FileInfo) int {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return int(st.Uid)
	}
	return -1
}

// manyMarks is how many marks are counted: a node that has more keeps those of volumes that no longer exist.
const manyMarks = 100_000

// checkMarks counts the volumes that the host does not mount after a sandbox. Rules that depend
// on the pod are no error, but are always named, because another node does not have the mark.
func checkMarks(_ context.Context, n Node, _ Daemon) []Finding {
	if !n.Config.Front.Enabled {
		return []Finding{okay("the front is off, so there are no marks")}
	}
	var names []string
	dir := n.Config.Front.MarksDir
	file, err := os.Open(n.at(dir))
	if err == nil {
		names, err = file.Readdirnames(manyMarks)
		_ = file.Close()
	}
	if errors.Is(err, fs.ErrPermission) {
		return []Finding{warning("run crustctl doctor as root", "the marks in %s cannot be counted: %v", dir, err)}
	} else if err != nil && !errors.Is(err, io.EOF) {
		return []Finding{failure("mount or restore the directory, or move the old one there if front.marksDir or kubeletRoot was changed; if it is "+
			"lost for good, as after kubeadm reset, the node's kernel will mount what guests wrote before, after: mkdir -p -m 0700 "+quoted(dir),
			"the marks in %s cannot be read, so no volume that a rule could defer is mounted on the host: %v", dir, err)}
	}
	if len(names) == manyMarks {
		return []Finding{warning("remove the files of volumes that no longer exist", "%s has %d marks or more", dir, manyMarks)}
	}
	seen := fmt.Sprintf("%d volumes were read-write in a sandbox of this node and are not mounted on the host", len(names))
	var byPod []string
	for _, rule := range n.Config.Policy.Rules {
		if len(rule.ByPod()) > 0 {
			byPod = append(byPod, strconv.Quote(rule.Name))
		}
	}
	if len(byPod) > 0 {
		seen += "; other nodes do not know that, and the rules " + strings.Join(byPod, ", ") + " depend on the pod"
	}
	return []Finding{okay("%s", seen)}
}
