package registry

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// socketID tells a socket from another one that takes its name. Inodes are used
// again soon; the time is that of the making, which a chmod does not change.
type socketID struct {
	inode uint64
	made  unix.Timespec
}

// idAt is the socket that stands at a path now; there is none with a zero id.
func idAt(path string) socketID {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return socketID{}
	}
	return socketID{inode: st.Ino, made: st.Mtim}
}

// socketsIn lists the sockets in a directory, and in those below it if that is wanted, as
// kubelet does in its own. A name that begins with a dot is not meant for us, as with
// kubelet. After an error there may be more.
func socketsIn(dir string, below bool) (found map[string]socketID, err error) {
	found = make(map[string]socketID)
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // being made again: looked at the next time
		case err != nil:
			return err
		case entry.IsDir() && path != dir && !below:
			return fs.SkipDir
		case entry.Type() != fs.ModeSocket || strings.HasPrefix(entry.Name(), "."):
		default:
			if id := idAt(path); id != (socketID{}) {
				found[path] = id
			}
		}
		return nil
	})
	return found, err
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
