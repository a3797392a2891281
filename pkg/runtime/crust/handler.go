// Package crust is the broker's side of the directory ABI. It publishes volumes to runtime handlers such as crust-runc,
// learns from them which sandbox has a volume, and asks them about it over their socket or, if there is none, by their
// program. It is for this project's daemon and may change with any release.
package crust

import (
	"context"
	"slices"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Name is the handler's name.
const Name = "crust"

// Config says where volumes are published to runtime handlers of the directory ABI, and which
// programs and sockets of theirs are trusted.
type Config struct {
	// Root holds one directory a volume.
	Root string
	// TempDir is where projections are built: on the filesystem of Root and outside it.
	TempDir string
	// KubeletRoot holds the targets of our volumes; others are another daemon's.
	KubeletRoot string
	// Programs are the absolute paths of the only programs that are run.
	Programs []string
	// SocketDirs are the directories below which a handler's socket may lie.
	SocketDirs []string
	// Owner is the user who must own programs and sockets, and serve the sockets: 0 except in tests.
	Owner uint32
	// Filesystems are those that the handlers can mount.
	Filesystems []string
	// SELinux is set where mount options such as context= mean something to the kernel.
	SELinux bool
	// OnChange is called after a volume's binding changed. It may be nil.
	OnChange func(volume.Key)
}

// Sandboxes is what the handler needs to know from the container runtime; it must not block.
// The handler also works without: the files of the ABI say the same, a little later.
type Sandboxes interface {
	// PodOf returns the pod of a sandbox, if that is known.
	PodOf(sandboxID string) (podUID string, known bool)
	// Ready reports whether the above can be relied on now.
	Ready() bool
}

// Handler is the runtime handler of the directory ABI. It works right after New. While Run runs, it also watches for
// new bindings, keeps connections, and removes the files of dead sandboxes.
type Handler struct {
	cfg      Config
	store    *projection.Store
	bindings *bindings
	asker    *asker
	cleaner  *cleaner
	expiry   *expiry
}

var _ runtime.Handler = (*Handler)(nil)

// New makes the handler and removes what a kill left in TempDir. Sandboxes is nil if no container runtime is followed.
func New(cfg Config, sandboxes Sandboxes, log *zap.Logger) (*Handler, error) {
	opened, err := projection.OpenTree(projection.TreeConfig{
		Name: Name, Root: cfg.Root, Temp: cfg.TempDir, File: abi.InfoName, What: "the volume's mount information",
		Remedy: "remove the directory once no sandbox uses it", Log: log, KubeletRoot: cfg.KubeletRoot,
	})
	if err != nil {
		return nil, err
	}
	cfg.Root, cfg.TempDir = opened.Root, opened.Temp
	h := &Handler{cfg: cfg, expiry: newExpiry(cfg, log)}
	h.bindings = &bindings{layout: layout{tree: opened}, sandboxes: sandboxes}
	h.store = projection.New(opened, h.bindings.layout, projection.Hooks{SandboxSeen: h.bindings.seen, OnChange: cfg.OnChange})
	h.bindings.table = h.store.Bindings
	h.cleaner = &cleaner{bindings: h.bindings, log: log, inUse: h.InUse, jobs: make(chan job, maxJobs)}
	h.asker = &asker{
		cfg: &h.cfg, bindings: h.bindings, cleaner: h.cleaner,
		conns:    &conns{sockets: sockets{dirs: cfg.SocketDirs, owner: cfg.Owner}, open: make(map[string]*keptConn)},
		programs: newRunner(1),
	}
	return h, nil
}

// Name is "crust".
func (h *Handler) Name() string { return Name }

// Abilities are those of crust-runc, which the ABI requires of every handler.
func (h *Handler) Abilities() deferral.Abilities {
	return deferral.Abilities{GrowsAtMount: true, HostMounts: true, SELinux: h.cfg.SELinux, SubPaths: true}
}

// Health returns what keeps the handler from working, or nil.
func (h *Handler) Health(context.Context) error {
	for _, path := range h.cfg.Programs {
		file, err := openProgram(path, h.cfg.Owner)
		if err != nil {
			return volume.Errorf(volume.KindOf(err), "crust: %w", err)
		}
		_ = file.Close()
	}
	return h.store.Health()
}

// Run watches the tree, keeps connections and removes the files of dead sandboxes until ctx ends.
func (h *Handler) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return h.store.Run(ctx) })
	for range cleaners {
		group.Go(func() error { h.cleaner.run(ctx); return nil })
	}
	group.Go(func() error { h.asker.conns.run(ctx); return nil })
	group.Go(func() error { h.expiry.run(ctx); return nil })
	return group.Wait()
}

// Check returns why no handler can serve the volume, or nil.
func (h *Handler) Check(v *volume.Volume) error {
	if !sys.IsText(v.ResolvedTarget) || !strings.HasPrefix(v.ResolvedTarget, "/") {
		return volume.Errorf(volume.Invalid, "volume %q: the target is not an absolute path of printable text", v.Target)
	}
	if v.Device.Kind == volume.ImageFile {
		return volume.Errorf(volume.Unsupported, "volume %s: %s is an image file, and crust-runc mounts block devices: "+
			"attach it to a loop device and hand that over", v.Target, v.Device.Path)
	}
	if !slices.Contains(h.cfg.Filesystems, v.FSType) {
		return volume.Errorf(volume.Unsupported, "volume %s: the filesystem %q is not among those that crust-runc "+
			"may mount (%s): use one of these, or add it to handlers.crust.filesystems",
			v.Target, v.FSType, strings.Join(h.cfg.Filesystems, ", "))
	}
	return nil
}

// Publish makes sure that the volume's directory exists with the right mountInfo.json, and
// lets Run check whether the sandbox of a volume that was there before still lives.
func (h *Handler) Publish(ctx context.Context, v *volume.Volume) (changed bool, err error) {
	if changed, err = h.store.Publish(ctx, v); err != nil {
		return false, err
	}
	h.cleaner.suspect(v)
	return changed, nil
}

// Retract removes the volume's directory with all that handlers left in it. A directory of another program stays.
func (h *Handler) Retract(ctx context.Context, v *volume.Volume) error {
	return h.store.Retract(ctx, v)
}

// Orphans lists our directories of volumes that are not known.
func (h *Handler) Orphans(known func(volume.Key) bool) ([]*volume.Volume, error) {
	return h.store.Orphans(known)
}

// Binding is the last known binding, from memory.
func (h *Handler) Binding(v *volume.Volume) (runtime.Binding, bool) {
	return h.store.Bindings.Shown(v.Key)
}

// AdoptForeign finds the volumes that other programs published.
func (h *Handler) AdoptForeign() { h.store.AdoptForeign() }

// Adopted lists the volumes that other programs published.
func (h *Handler) Adopted() []*volume.Volume { return h.store.Adopted() }

// SandboxAdded does nothing: the sandbox's files say which volumes it mounts.
func (h *Handler) SandboxAdded(string, string) {}

// SandboxGone reports that a sandbox has ended.
func (h *Handler) SandboxGone(id string) {
	if !abi.IsSandboxID(id) {
		return
	}
	for _, key := range h.store.Bindings.DropSandbox(id) {
		h.cleaner.enqueue(job{key: key, gone: id})
	}
}
