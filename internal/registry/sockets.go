package registry

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// socketID tells a socket from another one that takes its name. Inodes are used
// again soon; the time is that of the making, which a chmod does not change.
type socketID struct {
	inode uint64
	made  syscall.Timespec
}

func idOf(info fs.FileInfo) socketID {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return socketID{inode: st.Ino, made: st.Mtim}
	}
	return socketID{}
}

// idAt is the socket that stands at a path now; there is none with a zero id.
func idAt(path string) socketID {
	info, err := os.Lstat(path)
	if err != nil {
		return socketID{}
	}
	return idOf(info)
}

// socketsIn lists the sockets in a directory. A name that begins with a dot is
// not meant for us, as with kubelet.
func socketsIn(dir string) map[string]socketID {
	found := make(map[string]socketID)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return found // missing, or being made again: looked at the next time
	}
	for _, entry := range entries {
		note(found, filepath.Join(dir, entry.Name()), entry)
	}
	return found
}

// socketsBelow lists those in sub-directories too, as kubelet does.
func socketsBelow(dir string) map[string]socketID {
	found := make(map[string]socketID)
	_ = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil {
			note(found, path, entry)
		}
		return nil // what went meanwhile is missing the next time too
	})
	return found
}

func note(found map[string]socketID, path string, entry fs.DirEntry) {
	if entry.Type() != fs.ModeSocket || strings.HasPrefix(entry.Name(), ".") {
		return
	}
	if info, err := entry.Info(); err == nil {
		found[path] = idOf(info)
	}
}

// socketPath is where the CSI socket of a driver lies.
func socketPath(dir, name string) string { return fitting(dir, name, ".sock") }

// registrationPath is where kubelet finds a driver of ours.
func registrationPath(dir, name string) string { return fitting(dir, name, Suffix) }

// fitting is a path by name, or by the name's hash where that is too long.
func fitting(dir, name, suffix string) string {
	if path := filepath.Join(dir, name+suffix); len(path) <= sys.MaxSocketPath {
		return path
	}
	sum := sha256.Sum256([]byte(name))
	return filepath.Join(dir, hex.EncodeToString(sum[:8])+suffix)
}
