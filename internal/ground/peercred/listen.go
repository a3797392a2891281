package peercred

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// Listener is a unix socket that removes its file when it is closed, unless another file
// has replaced it.
type Listener struct {
	*net.UnixListener
	path string
	made unix.Stat_t
	once sync.Once
	err  error
}

// Listen creates a unix socket at path with a mode of 0600 or 0660 and, unless empty, the
// given group. It appears with its final mode and owner: it is created under another name
// with mode 0600, and renamed into place. A stale socket is replaced; a socket that is
// served, a symbolic link and any other file never are.
func Listen(path string, mode fs.FileMode, group string) (*Listener, error) {
	l, err := listen(path, mode, group)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l, nil
}

func listen(path string, mode fs.FileMode, group string) (*Listener, error) {
	if mode != 0o600 && mode != 0o660 {
		return nil, fmt.Errorf("the mode is %#o, allowed are 0600 and 0660", mode)
	}
	if !filepath.IsAbs(path) || len(path) > sys.MaxSocketPath {
		return nil, fmt.Errorf("the path must be absolute and of at most %d bytes", sys.MaxSocketPath)
	}
	gid, err := groupID(group)
	if err != nil {
		return nil, err
	}
	dir, err := lockParent(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.unlock()
	name := filepath.Base(path)
	if err := dir.clear(name, path); err != nil {
		return nil, err
	}
	return dir.install(name, path, uint32(mode), gid)
}

// Addr is the address that clients dial; the socket was bound under another name.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: l.path, Net: "unix"} }

// Close stops listening, and removes the file if it is still the one that Listen created.
func (l *Listener) Close() error {
	l.once.Do(func() {
		var now unix.Stat_t
		if unix.Lstat(l.path, &now) == nil && now.Dev == l.made.Dev && now.Ino == l.made.Ino {
			l.err = os.Remove(l.path)
		}
		l.err = errors.Join(l.err, l.UnixListener.Close())
	})
	return l.err
}

// groupID resolves a name or a number; -1 keeps the group as it is.
func groupID(group string) (int, error) {
	if group == "" {
		return -1, nil
	}
	if id, err := strconv.ParseUint(group, 10, 31); err == nil {
		return int(id), nil
	}
	found, err := user.LookupGroup(group)
	if err != nil {
		return 0, fmt.Errorf("the group %q: %w", group, err)
	}
	return strconv.Atoi(found.Gid)
}
