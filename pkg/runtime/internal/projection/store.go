// Package projection manages the projections of a handler's volumes: the directories in which a runtime finds its
// volumes, and which sandbox has each. Only the handlers kata and crust use it.
package projection

import (
	"context"
	"os"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Format is how one kind of runtime names and describes volumes in its tree.
type Format interface {
	// DirOf returns the name of a volume's directory; ok is false if it cannot have one.
	DirOf(v *volume.Volume) (dir string, ok bool)
	// KeyOf returns the key of the volume that a directory is named for; ok is false if the
	// runtime never reads a directory of that name.
	KeyOf(dir string) (key volume.Key, ok bool)
	// Encode returns the content of a volume's file. It is deterministic.
	Encode(v *volume.Volume) ([]byte, error)
	// Read reads a volume back from its directory. It always sets the key, the paths and
	// the handler; the rest if it can be read.
	Read(dir string) *volume.Volume
	// Sandboxes lists the ids that sandboxes left in a directory, the newest first.
	Sandboxes(dir string) ([]string, error)
}

// Hooks are the handler's reactions to changes in its tree.
type Hooks struct {
	// SandboxSeen is called when a sandbox left its id with a tracked volume.
	SandboxSeen func(key volume.Key, sandbox string)
	// OnChange is called after a volume's binding changed. It may be nil.
	OnChange func(volume.Key)
	// Forgotten is called for a volume that is not tracked any more. It may be nil.
	Forgotten func(volume.Key)
	// KeepRemoved: the binding of a volume of ours stays if another program removes its directory.
	KeepRemoved bool
}

// Store publishes volumes to a runtime and learns which sandbox has them. It works right after
// New. While Run runs, it also watches for new bindings.
type Store struct {
	// Bindings is what is known in memory of each volume.
	Bindings *Bindings
	Tree     *Tree
	Watch    *Watch
	format   Format
	hooks    Hooks
}

// New makes the store of a tree.
func New(t *Tree, format Format, hooks Hooks) *Store {
	s := &Store{Tree: t, format: format, hooks: hooks, Bindings: newBindings(hooks.OnChange)}
	s.Watch = &Watch{
		tree: t, store: s, again: make(chan struct{}, 1), byWD: make(map[int32]volume.Key), byKey: make(map[volume.Key]int32),
	}
	return s
}

// Run follows the tree until ctx ends.
func (s *Store) Run(ctx context.Context) error { return s.Watch.Run(ctx) }

// Health returns what keeps the store from working, or nil.
func (s *Store) Health() error {
	if err := s.Tree.Health(); err != nil {
		return err
	}
	return s.Watch.Health()
}

// Retract removes the volume's directory with all that runtimes left in it. A
// directory of another program, or of another key, stays.
func (s *Store) Retract(ctx context.Context, v *volume.Volume) error {
	if err := ctx.Err(); err != nil {
		return guest.ContextError(v, "", err)
	}
	dir, ok := s.format.DirOf(v)
	if !ok { // it was never published, or only its key is known
		s.forget(v.Key)
		return nil
	}
	owner, key, err := s.Tree.OwnerOf(dir)
	if err != nil {
		return s.Tree.Error(v, "looked at", err)
	}
	if owner == Foreign {
		return nil
	}
	s.forget(v.Key)
	if owner == Missing || key != v.Key {
		return nil
	}
	err = s.Tree.Remove(v, dir)
	s.forget(v.Key) // the watch may have found the directory once more before it was gone
	return err
}

// Orphans lists our directories of volumes that are not known.
func (s *Store) Orphans(known func(volume.Key) bool) ([]*volume.Volume, error) {
	names, err := s.Tree.Names()
	if err != nil {
		return nil, err
	}
	var orphans []*volume.Volume
	for _, name := range names {
		if key, ok := s.format.KeyOf(name); !ok || known(key) {
			continue
		}
		owner, key, err := s.Tree.OwnerOf(name)
		if err != nil || owner != OwnedByUs || known(key) {
			continue
		}
		v := s.format.Read(name)
		v.Key = key
		orphans = append(orphans, v)
	}
	return orphans, nil
}

// Adopted lists the volumes that other programs published.
func (s *Store) Adopted() []*volume.Volume {
	return s.Bindings.Foreign(func(e Entry) bool { return e.Volume.Adopted })
}

// AdoptForeign finds the volumes that other programs published. It sets no watches; Run does.
func (s *Store) AdoptForeign() {
	names, err := s.Tree.Names()
	if err != nil {
		return // Run logs what is wrong with the tree
	}
	for _, name := range names {
		if _, ok := s.format.KeyOf(name); !ok {
			continue
		}
		if owner, _, err := s.Tree.OwnerOf(name); err == nil && owner == Foreign {
			s.adopt(name)
		}
	}
}

// adopt tracks a volume of another program, if its file can be read.
func (s *Store) adopt(dir string) {
	v := s.format.Read(dir)
	if v.Device.Path == "" {
		s.Tree.Log.Debug("the mountInfo.json of another program's volume cannot be read (yet)", zap.String("target", v.Target))
		return
	}
	v.Adopted = true
	before, tracked := s.Bindings.Get(v.Key)
	s.Bindings.Track(Entry{Volume: v, Dir: dir, Owner: Foreign})
	if owner, _, err := s.Tree.OwnerOf(dir); err == nil && owner == Missing { // its end may have been handled already
		s.forget(v.Key)
		return
	}
	if !tracked || !before.Volume.Adopted {
		s.Tree.Log.Info("a volume that another program published is served, and left as it is", zap.String("target", v.Target))
	}
	s.Bindings.changed(v.Key)
}

func (s *Store) forget(key volume.Key) {
	s.Watch.Forget(key)
	s.Bindings.Forget(key)
	if s.hooks.Forgotten != nil {
		s.hooks.Forgotten(key)
	}
}

func (s *Store) scan() {
	names, err := s.Tree.Names()
	if err != nil {
		s.Tree.Log.Warn("the tree of volumes cannot be read", zap.Error(err))
		return
	}
	for _, name := range names {
		s.dirAdded(name)
	}
	s.forgetRemoved(names)
}

// forgetRemoved forgets the directories of other programs that were removed while they were
// not watched: AdoptForeign sets no watches.
func (s *Store) forgetRemoved(names []string) {
	there := make(map[string]bool, len(names))
	for _, name := range names {
		there[name] = true
	}
	for _, v := range s.Bindings.Foreign(func(e Entry) bool { return !there[e.Dir] }) {
		e, _ := s.Bindings.Get(v.Key)
		if owner, _, err := s.Tree.OwnerOf(e.Dir); err == nil && owner == Missing {
			s.forget(v.Key)
		}
	}
}

// dirAdded tracks and watches the directory of a volume.
func (s *Store) dirAdded(dir string) {
	named, ok := s.format.KeyOf(dir)
	if !ok || s.Bindings.IsOurs(named) && s.Watch.Has(named) {
		return // usually our own Publish, which should cost no system call here
	}
	owner, key, err := s.Tree.OwnerOf(dir)
	if err != nil || owner == Missing {
		return
	}
	if owner == Foreign {
		key = named
	}
	if !s.watchFound(dir, key, owner) {
		return
	}
	// Read only now, so that no change comes between reading and watching.
	if owner == Foreign {
		s.adopt(dir)
	}
	if ids, _ := s.format.Sandboxes(dir); len(ids) > 0 {
		s.hooks.SandboxSeen(key, ids[0])
	}
}

// watchFound tracks and watches a directory that this process did not publish. It returns
// false if the directory is gone again.
func (s *Store) watchFound(dir string, key volume.Key, owner Owner) bool {
	before, tracked := s.Bindings.Get(key)
	if !tracked || before.Owner != owner {
		v := s.format.Read(dir)
		v.Key = key
		s.Bindings.Track(Entry{Volume: v, Dir: dir, Owner: owner})
	}
	if !IsGone(s.Watch.Add(key, s.Tree.Path(dir), owner)) {
		return true
	}
	if !tracked || owner == Foreign {
		s.forget(key)
	}
	return false
}

// fileWritten handles a sandbox id, and the file of a foreign volume.
func (s *Store) fileWritten(key volume.Key, name string) {
	if name != s.Tree.File {
		s.hooks.SandboxSeen(key, name)
		return
	}
	if e, tracked := s.Bindings.Get(key); tracked && e.Owner == Foreign {
		s.adopt(e.Dir)
	}
}

// dirRemoved forgets a directory that another program removed. The reconciler puts one of ours back.
func (s *Store) dirRemoved(key volume.Key) {
	if !s.hooks.KeepRemoved || !s.Bindings.IsOurs(key) {
		s.forget(key)
	}
}

// Describe sets the fields of v that a valid mountInfo.json has, and when the file was made.
func Describe(v *volume.Volume, info abi.Info, file string) {
	v.FSType, v.MountFlags, v.ReadOnly = info.FSType, slices.Clone(info.Options), info.ReadOnly()
	v.Group, v.GroupPolicy = info.Metadata[abi.MetaGroup], info.GroupPolicy()
	if st, err := os.Lstat(file); err == nil {
		v.Created = st.ModTime().Round(time.Microsecond)
	}
}

// Pods returns the pod of a sandbox, if that is known.
type Pods interface {
	PodOf(sandboxID string) (podUID string, known bool)
}

// OfOtherPod reports whether a sandbox is known to be of another pod than the volume's. pods is
// nil if no container runtime is followed.
func OfOtherPod(pods Pods, sandbox, podUID string) bool {
	if pods == nil || podUID == "" {
		return false
	}
	pod, known := pods.PodOf(sandbox)
	return known && pod != podUID
}
