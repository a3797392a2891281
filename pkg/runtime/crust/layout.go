package crust

import (
	"errors"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// layout is the tree of the directory ABI: a directory for each volume, named by its key.
type layout struct{ tree *projection.Tree }

func (l layout) DirOf(v *volume.Volume) (string, bool) {
	return string(v.Key), abi.IsDirName(string(v.Key))
}

func (l layout) KeyOf(dir string) (volume.Key, bool) { return volume.Key(dir), abi.IsDirName(dir) }

// Encode returns a volume's mountInfo.json.
func (l layout) Encode(v *volume.Volume) ([]byte, error) { return abi.Encode(v) }

// Read reads a volume back. If the file does not name a target, the directory stands for it:
// lists and errors need a name.
func (l layout) Read(name string) *volume.Volume {
	path := l.tree.Path(name)
	v := &volume.Volume{Key: volume.Key(name), Target: path, ResolvedTarget: path, Handler: Name}
	dir, err := abi.Open(l.tree.Root, name)
	if err != nil {
		return v
	}
	defer func() { _ = dir.Close() }()
	info, err := dir.Info()
	if err != nil {
		// The device has an owner, whatever else is wrong.
		if raw, err := dir.Read(abi.InfoName, abi.MaxInfo); err == nil {
			v.Device = projection.DeviceIn(raw)
		}
		return v
	}
	if target := info.Target(); target != "" {
		v.Target, v.ResolvedTarget = target, target
	}
	v.PodUID, v.Device = info.PodUID(), claim.Identify(info.Device)
	projection.Describe(v, info, path+"/"+abi.InfoName)
	return v
}

// Sandboxes lists the sandbox ids in a volume's directory, the newest first.
func (l layout) Sandboxes(name string) ([]string, error) {
	dir, err := abi.Open(l.tree.Root, name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dir.Close() }()
	return dir.Sandboxes()
}

type dirSnapshot struct {
	bound  string   // the sandbox that was known to have the volume before
	ids    []string // of sandboxes, the newest first
	files  map[string]fileID
	cli    string
	socket string
	// unread is why runtime-cli or runtime-socket cannot be used, or nil.
	unread error
}

// fileID distinguishes a file from a later one of the same name.
type fileID struct {
	inode uint64
	mtime int64
}

// readDir reads a volume's directory, without the sandboxes for which skip is true. The
// result is not cached: sandboxes come and go, and their handlers with them.
func (l layout) readDir(v *volume.Volume, skip func(id string) bool) (*dirSnapshot, error) {
	dir, err := abi.Open(l.tree.Root, string(v.Key))
	if errors.Is(err, os.ErrNotExist) {
		return &dirSnapshot{}, nil
	}
	if err != nil {
		return nil, l.tree.Error(v, "read", err)
	}
	defer func() { _ = dir.Close() }()
	s := &dirSnapshot{files: make(map[string]fileID)}
	ids, err := dir.Sandboxes()
	if err != nil {
		return nil, l.tree.Error(v, "read", err)
	}
	s.ids = slices.DeleteFunc(ids, skip)
	for _, id := range s.ids {
		s.files[id], _ = l.identify(v.Key, id)
	}
	s.readLines(dir)
	if len(s.ids) > 0 && s.cli == "" && s.unread == nil {
		// A handler writes its id first and its program last. Once we have the lock, it has finished.
		s.unread = dir.Lock(lockTime)
		if s.unread == nil {
			s.readLines(dir)
			s.unread = errors.Join(s.unread, dir.Unlock())
		}
	}
	return s, nil
}

func (s *dirSnapshot) readLines(dir *abi.Dir) {
	var cliErr, socketErr error
	s.cli, cliErr = line(dir, abi.CLIName)
	s.socket, socketErr = line(dir, abi.SocketName)
	s.unread = errors.Join(cliErr, socketErr)
}

func line(dir *abi.Dir, name string) (string, error) {
	text, err := dir.Line(name)
	if errors.Is(err, os.ErrNotExist) {
		return "", nil
	}
	return text, err
}

func (l layout) identify(key volume.Key, name string) (fileID, bool) {
	var st unix.Stat_t
	if unix.Lstat(l.tree.Path(string(key))+"/"+name, &st) != nil {
		return fileID{}, false
	}
	return fileID{inode: st.Ino, mtime: st.Mtim.Nano()}, true
}

// bindings records which sandbox has a volume, for lists and to report changes. Calls read
// the volume's directory each time.
type bindings struct {
	table     *projection.Bindings
	layout    layout
	sandboxes Sandboxes // nil where no container runtime is followed
}

func (b *bindings) bind(key volume.Key, id string) { b.table.Bind(key, id, Name) }

// seen records a new sandbox-id file: the newest sandbox counts as live until shown otherwise.
func (b *bindings) seen(key volume.Key, id string) {
	if e, tracked := b.table.Get(key); tracked && abi.IsSandboxID(id) && !b.ofOtherPod(id, e.Volume) {
		b.bind(key, id)
	}
}

// readDir leaves out the ids of other pods' sandboxes: these cannot have the volume.
func (b *bindings) readDir(v *volume.Volume) (*dirSnapshot, error) {
	before, _ := b.table.Get(v.Key)
	seen, err := b.layout.readDir(v, func(id string) bool { return b.ofOtherPod(id, v) })
	if err == nil {
		seen.bound = before.Live.Sandbox
	}
	return seen, err
}

func (b *bindings) ofOtherPod(id string, v *volume.Volume) bool {
	return projection.OfOtherPod(b.sandboxes, id, v.PodUID)
}

// isGone reports whether the container runtime has no such sandbox, or none reported yet.
func (b *bindings) isGone(id string) bool {
	if b.sandboxes == nil || !b.sandboxes.Ready() {
		return false
	}
	_, known := b.sandboxes.PodOf(id)
	return !known
}
