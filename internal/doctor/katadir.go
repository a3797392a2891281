package doctor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"
)

func checkKataDir(_ context.Context, n Node, d Daemon) []Finding {
	info, err := os.Lstat(n.at(n.KataDir))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return []Finding{noKataDir(n, d)}
	case err != nil:
		return []Finding{warning("run crustctl doctor as root", "%s cannot be looked at: %v", n.KataDir, err)}
	case !info.IsDir():
		return []Finding{failure("remove it and restart crust-proxy", "%s is not a directory", n.KataDir)}
	}
	var found []Finding
	if mode := info.Mode().Perm(); mode != 0o700 {
		found = append(found, failure("chmod 0700 "+quoted(n.KataDir), "%s has mode %04o, and it says which devices sandboxes get", n.KataDir, mode))
	}
	if owner := ownerOf(info); owner != 0 && owner != n.UID {
		found = append(found, failure("chown root "+quoted(n.KataDir), "%s belongs to uid %d", n.KataDir, owner))
	}
	found = append(found, n.sameFilesystem()...)
	return orOK(found, "%s has mode 0700 and lies on the same mount as %s", n.KataDir, n.RunDir)
}

func noKataDir(n Node, d Daemon) Finding {
	for _, h := range d.Handlers {
		if strings.HasPrefix(h.GetName(), "kata") {
			return failure("systemctl restart crust-proxy, which makes it", "%s does not exist, and handler %s needs it", n.KataDir, h.GetName())
		}
	}
	return okay("%s does not exist; it is made with the first Kata volume", n.KataDir)
}

// sameFilesystem: files are written beside the directory and renamed into it,
// which works within one mount only.
func (n Node) sameFilesystem() []Finding {
	table, err := n.mounts()
	if err != nil {
		return []Finding{warning("", "the mount table cannot be read: %v", err)}
	}
	kata, run := mountOf(table, n.resolve(n.KataDir)), mountOf(table, n.resolve(n.RunDir))
	if kata == nil || run == nil || kata.ID == run.ID {
		return nil
	}
	return []Finding{failure("let both lie on one mount (both below /run), or set the Kata handler's staging directory to one beside direct-volumes",
		"%s lies on the mount %s and %s on %s: files cannot be renamed from one into the other, so no volume can be published whole",
		n.KataDir, kata.Mountpoint, n.RunDir, run.Mountpoint)}
}

// kataEntries lists the volumes' directories; there are none where there is no
// directory at all.
func (n Node) kataEntries() ([]fs.DirEntry, error) {
	entries, err := os.ReadDir(n.at(n.KataDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}
