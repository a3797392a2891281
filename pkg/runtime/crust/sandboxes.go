package crust

import (
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// sight is what handlers left in a volume's directory, as it was seen once.
type sight struct {
	ids    []string // of sandboxes, the newest first
	files  map[string]fileID
	cli    string
	socket string
	// unread is why runtime-cli or runtime-socket cannot be used, or nil.
	unread error
}

// fileID tells a file from a later one of the same name.
type fileID struct {
	inode uint64
	mtime int64
}

// look reads a volume's directory. Nothing of it is kept: sandboxes come and go,
// and their handlers with them.
func (h *Handler) look(v *deferral.Volume) (*sight, error) {
	dir, err := abi.Open(h.cfg.Root, string(v.Key))
	if errors.Is(err, os.ErrNotExist) {
		return &sight{}, nil
	}
	if err != nil {
		return nil, h.tree.Error(v, "read", err)
	}
	defer func() { _ = dir.Close() }()
	s := &sight{files: make(map[string]fileID)}
	ids, err := dir.Sandboxes()
	if err != nil {
		return nil, h.tree.Error(v, "read", err)
	}
	s.ids = slices.DeleteFunc(ids, func(id string) bool { return h.ofOtherPod(id, v.PodUID) })
	for _, id := range s.ids {
		s.files[id], _ = h.identify(v.Key, id)
	}
	s.readLines(dir)
	if len(s.ids) > 0 && s.cli == "" && s.unread == nil {
		// A handler writes its id first and its program last. Whoever has the lock has
		// seen it end.
		s.unread = dir.Lock(lockTime)
		if s.unread == nil {
			s.readLines(dir)
			s.unread = errors.Join(s.unread, dir.Unlock())
		}
	}
	return s, nil
}

// readLines reads how the handler wants to be asked.
func (s *sight) readLines(dir *abi.Dir) {
	var cliErr, socketErr error
	s.cli, cliErr = line(dir, abi.CLIName)
	s.socket, socketErr = line(dir, abi.SocketName)
	s.unread = errors.Join(cliErr, socketErr)
}

// line reads a file that need not be there.
func line(dir *abi.Dir, name string) (string, error) {
	text, err := dir.Line(name)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	return text, err
}

func (h *Handler) listIDs(key deferral.Key) []string {
	dir, err := abi.Open(h.cfg.Root, string(key))
	if err != nil {
		return nil
	}
	defer func() { _ = dir.Close() }()
	ids, err := dir.Sandboxes()
	if err != nil {
		return nil
	}
	return ids
}

func (h *Handler) identify(key deferral.Key, name string) (fileID, bool) {
	var st unix.Stat_t
	if unix.Lstat(h.tree.Path(string(key))+"/"+name, &st) != nil {
		return fileID{}, false
	}
	return fileID{inode: st.Ino, mtime: st.Mtim.Nano()}, true
}
