package projection

import (
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Scan reads the whole tree.
func (s *Store) Scan() {
	names, err := s.Tree.Names()
	if err != nil {
		s.Tree.Log.Warn("the tree of volumes cannot be read", zap.Error(err))
		return
	}
	for _, name := range names {
		s.DirAdded(name)
	}
}

// DirAdded tracks and watches the directory of a volume.
func (s *Store) DirAdded(dir string) {
	named, ok := s.format.KeyOf(dir)
	if !ok || s.isWatchedOwn(named) {
		return // as a rule our own Publish, which shall cost no system call here
	}
	owner, key, err := s.Tree.OwnerOf(dir)
	if err != nil || owner == tree.Missing {
		return
	}
	if owner == tree.Foreign {
		key = named
	}
	if !s.watchFound(dir, key, owner) {
		return
	}
	// Read only now, so that no change comes between reading and watching.
	if owner == tree.Foreign {
		s.adopt(dir)
	}
	if ids := s.format.Sandboxes(dir); len(ids) > 0 {
		s.hooks.SandboxSeen(key, ids[0])
	}
}

// isWatchedOwn tells whether a volume of ours has its watch already.
func (s *Store) isWatchedOwn(key volume.Key) bool {
	return s.Bindings.IsOurs(key) && s.Watch.Has(key)
}

// watchFound tracks and watches a directory that was not published by this process.
// It is false for a directory that is gone again.
func (s *Store) watchFound(dir string, key volume.Key, owner tree.Owner) bool {
	before, tracked := s.Bindings.Get(key)
	if !tracked || before.Owner != owner {
		v := s.format.Read(dir)
		v.Key = key
		s.Bindings.Track(Entry{Volume: v, Dir: dir, Owner: owner})
	}
	if !tree.IsGone(s.Watch.Add(key, s.Tree.Path(dir), owner)) {
		return true
	}
	if !tracked || owner == tree.Foreign {
		s.forget(key)
	}
	return false
}

// FileWritten handles a sandbox id, and the file of a foreign volume.
func (s *Store) FileWritten(key volume.Key, name string) {
	if name != s.Tree.File {
		s.hooks.SandboxSeen(key, name)
		return
	}
	if e, tracked := s.Bindings.Get(key); tracked && e.Owner == tree.Foreign {
		s.adopt(e.Dir)
	}
}

// DirRemoved forgets a directory that another program removed. The reconciler puts one
// of ours back.
func (s *Store) DirRemoved(key volume.Key) {
	if !s.hooks.KeepRemoved || !s.Bindings.IsOurs(key) {
		s.forget(key)
	}
}
