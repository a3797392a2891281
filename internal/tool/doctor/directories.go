package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
)

func checkKataDir(_ context.Context, n Node, d Daemon) []Finding {
	info, err := os.Lstat(n.at(n.KataDir))
	switch {
	case errors.Is(err, fs.ErrNotExist) && d.has("kata"):
		return []Finding{failure(n.Service.Restart()+", which makes it", "%s does not exist, and handler kata needs it", n.KataDir)}
	case errors.Is(err, fs.ErrNotExist):
		return []Finding{okay("%s does not exist; it is made with the first Kata volume", n.KataDir)}
	case err != nil:
		return []Finding{warning("run crustctl doctor as root", "%s cannot be looked at: %v", n.KataDir, err)}
	case !info.IsDir():
		return []Finding{failure("remove it, then: "+n.Service.Restart(), "%s is not a directory", n.KataDir)}
	}
	var found []Finding
	if mode := info.Mode().Perm(); mode != 0o700 {
		found = append(found, failure("chmod 0700 "+quoted(n.KataDir), "%s has mode %04o, and it says which devices sandboxes get", n.KataDir, mode))
	}
	if owner := ownerOf(info); owner != 0 && owner != n.UID {
		found = append(found, failure("chown root "+quoted(n.KataDir), "%s belongs to uid %d", n.KataDir, owner))
	}
	if d.up() && !d.has("kata") { // nothing is made ready for it
		return orOK(found, "%s has mode 0700, and the daemon has no handler for Kata", n.KataDir)
	}
	found = append(found, sameFilesystem(n)...)
	return orOK(found, "%s has mode 0700 and lies on the same mount as %s", n.KataDir, n.RunDir)
}

// sameFilesystem warns if the directory is on another mount than the one in which files
// are prepared: they are renamed into the directory.
func sameFilesystem(n Node) []Finding {
	table, err := n.table()
	if err != nil {
		return []Finding{noTable(err)}
	}
	temp := cmp.Or(n.KataTempDir, n.RunDir)
	to, from := mountOf(table, n.resolve(n.KataDir)), mountOf(table, n.resolve(temp))
	if to == nil || from == nil || to.ID == from.ID {
		return nil
	}
	do := "set handlers.kata.tempDir to a directory beside " + n.KataDir + ", or let both lie on one mount"
	seen := fmt.Sprintf("%s lies on the mount %s and %s on %s: files cannot be renamed from one into the other",
		n.KataDir, to.Mountpoint, temp, from.Mountpoint)
	if n.KataTempDir != "" {
		return []Finding{failure(do, "%s, so no volume can be published", seen)}
	}
	return []Finding{warning(do, "%s, so crust-proxy must make them ready elsewhere", seen)}
}

// kataEntries lists the volumes' directories; none if Kata's directory is absent.
func kataEntries(n Node) ([]fs.DirEntry, error) {
	entries, err := os.ReadDir(n.at(n.KataDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}

// checkRunDir: records must die with a reboot, as the mounts they speak of do.
func checkRunDir(_ context.Context, n Node, _ Daemon) []Finding {
	info, err := os.Stat(n.at(n.RunDir))
	if err != nil {
		makes := "its unit makes the directory (RuntimeDirectory=)"
		if n.Service.InPod {
			makes = "the daemon makes the directory in the node's /run, which the DaemonSet mounts"
		}
		return []Finding{failure(n.Service.Status()+"; "+makes,
			"the run directory %s cannot be used: %v", n.RunDir, err)}
	}
	if !info.IsDir() {
		return []Finding{failure("remove the file, then: "+n.Service.Restart(), "%s is not a directory", n.RunDir)}
	}
	m, problem := n.mountOf(n.RunDir)
	if m == nil {
		return []Finding{problem}
	}
	if m.FSType != "tmpfs" && m.FSType != "ramfs" {
		return []Finding{failure("set runDir to a directory on tmpfs, below /run on most nodes, or mount a tmpfs there",
			"%s lies on %s (%s), not on tmpfs: its records would outlive a reboot, which the mounts do not", n.RunDir, m.FSType, m.Mountpoint)}
	}
	return []Finding{okay("%s lies on %s", n.RunDir, m.FSType)}
}
