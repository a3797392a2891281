// Package kata hands volumes to Kata Containers (its Go runtime and runtime-rs) as
// direct-assigned volumes, and sends requests to their sandboxes.
//
// Where Kata's code differs from its documents, comments describe the code. The package is
// for this project's daemon and may change with any release.
package kata

import (
	"context"
	"slices"
	"strings"

	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// Name is the handler's name.
const Name = "kata"

// Config says where Kata's files are. Every path can be changed, so that several daemons can run side by side.
type Config struct {
	// DirectVolumes is Kata's root of direct-assigned volumes.
	DirectVolumes string
	// GoSandboxes and RustSandboxes hold one directory a sandbox, with the management socket of its shim in it.
	GoSandboxes   string
	RustSandboxes string
	// SharedSandboxes is where runtime-rs keeps what a sandbox shares with the host.
	SharedSandboxes string
	// TempDir is where projections are built and taken apart. It must be on the filesystem of DirectVolumes and outside
	// it: Kata takes every file in there for a sandbox id.
	TempDir string
	// KubeletRoot holds the targets of our volumes; others are another daemon's.
	KubeletRoot string
	// StateDir holds the record of which sandboxes had a volume. Nothing else may be in it.
	StateDir string
	// Filesystems are those that the guest's kernel can mount.
	Filesystems []string
	// OnChange is called after a volume's binding changed. It may be nil.
	OnChange func(volume.Key)
	// Disks reads the devices of volumes.
	Disks Disks
}

// Disks says what is known from volumes' devices, which are on the node.
type Disks interface {
	// Matches reports whether the filesystem on the volume's device can have these totals
	// in statfs, and whether that is known.
	Matches(v *volume.Volume, bytes, inodes int64) (matches, known bool)
	// Condition returns what the device says of the filesystem's health, or nil if that is unknown.
	Condition(v *volume.Volume) *volume.Condition
	// LacksGroup reports whether the root directory of the volume's filesystem is not
	// known to be writable for the volume's group.
	LacksGroup(v *volume.Volume) bool
}

func (c *Config) socketOf(id string, f flavor) string {
	root := c.GoSandboxes
	if f == rustShim {
		root = c.RustSandboxes
	}
	return root + "/" + id + "/shim-monitor.sock"
}

// Sandboxes is what the handler needs to know from the container runtime. It supplements
// Kata's own files; runtime-rs cannot be served without it.
type Sandboxes interface {
	// OfPod lists the pod's live sandboxes, the newest first, from memory.
	OfPod(podUID string) []string
	// PodOf returns the pod of a sandbox, if that is known.
	PodOf(sandboxID string) (podUID string, known bool)
	// Destinations lists where the sandbox's containers mount source.
	Destinations(ctx context.Context, sandboxID, source string) ([]string, error)
	// ContainerIDs lists the sandbox's containers.
	ContainerIDs(ctx context.Context, sandboxID string) ([]string, error)
	// Mounting lists the live sandboxes of all pods with a container that mounts one of
	// the sources, and those of which that cannot be told, with the reason.
	Mounting(ctx context.Context, sources ...string) (found []string, unread map[string]error, err error)
	// Listed asks the container runtime itself for the live sandboxes: nothing comes from memory. Those that
	// are not in only, if that is given, may have ended.
	Listed(ctx context.Context, only ...string) (map[string]bool, error)
	// Ready reports whether the above can be relied on now; LastError returns why not.
	Ready() bool
	LastError() error
}

// Handler is the Kata runtime handler. It works right after New. While Run runs, it also watches for new bindings.
type Handler struct {
	cfg       Config
	sandboxes Sandboxes
	log       *zap.Logger
	store     *projection.Store
	bindings  *bindings
	client    *client
	guests    *guestMemory
}

var (
	_ runtime.Handler  = (*Handler)(nil)
	_ deferral.Tracker = (*Handler)(nil)
)

// New makes the handler and removes what a kill left in TempDir.
func New(cfg Config, sandboxes Sandboxes, log *zap.Logger) (*Handler, error) {
	// Kata takes every other file in a volume's directory for a sandbox id, so we may never put one there.
	opened, err := projection.OpenTree(projection.TreeConfig{
		Name: Name, Root: cfg.DirectVolumes, Temp: cfg.TempDir, File: infoName, What: "Kata's mount information",
		Remedy: "remove the directory once no sandbox uses it (`kata-runtime direct-volume remove`)", Log: log,
		KubeletRoot: cfg.KubeletRoot,
	})
	if err != nil {
		return nil, err
	}
	cfg.DirectVolumes, cfg.TempDir = opened.Root, opened.Temp
	kept, err := openNotes(cfg.StateDir, log)
	if err != nil {
		return nil, err
	}
	h := &Handler{cfg: cfg, sandboxes: sandboxes, log: log, guests: &guestMemory{volumes: make(map[volume.Key]guestVolume)}}
	h.bindings = &bindings{cfg: &h.cfg, layout: layout{root: opened.Root}, notes: kept, sandboxes: sandboxes}
	h.store = projection.New(opened, h.bindings.layout, projection.Hooks{
		SandboxSeen: h.bindings.seen, OnChange: cfg.OnChange, Forgotten: h.guests.drop, KeepRemoved: true,
	})
	h.bindings.store, h.bindings.table = h.store, h.store.Bindings
	h.client = &client{cfg: &h.cfg, bindings: h.bindings}
	return h, nil
}

// Name is "kata".
func (h *Handler) Name() string { return Name }

// Abilities of Kata: it mounts, and no more.
func (h *Handler) Abilities() deferral.Abilities { return deferral.Abilities{} }

// Health returns what keeps the handler from working, or nil.
func (h *Handler) Health(context.Context) error { return h.store.Health() }

// Run watches Kata's tree, and keeps connections, until ctx ends.
func (h *Handler) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { h.client.kept.run(ctx); return nil })
	group.Go(func() error { return h.store.Run(ctx) })
	return group.Wait()
}

// Check returns why Kata cannot serve the volume, or nil.
func (h *Handler) Check(v *volume.Volume) error {
	if _, ok := (layout{}).DirOf(v); !ok {
		return volume.Errorf(volume.Invalid, "volume %s: the target path has %d bytes and Kata can name volumes "+
			"of at most %d: use a shorter kubelet root directory, driver name or volume name",
			v.Target, len(v.Target), maxTarget)
	}
	if !slices.Contains(h.cfg.Filesystems, v.FSType) {
		return volume.Errorf(volume.Unsupported, "volume %s: the filesystem %q is not among those that Kata's guest "+
			"may mount (%s): use one of these, or add it to the handler's configuration",
			v.Target, v.FSType, strings.Join(h.cfg.Filesystems, ", "))
	}
	if v.Group == "0" && !v.ReadOnly {
		return volume.Errorf(volume.Unsupported, "volume %s: Kata cannot apply the group 0: "+
			"leave fsGroup out, or give a group above 0", v.Target)
	}
	return nil
}

// Publish makes sure that the volume's directory exists with the right mountInfo.json.
func (h *Handler) Publish(ctx context.Context, v *volume.Volume) (changed bool, err error) {
	return h.store.Publish(ctx, v)
}

// Retract removes the volume's directory with the sandbox ids in it, if it is ours, and the record of its sandboxes.
func (h *Handler) Retract(ctx context.Context, v *volume.Volume) error {
	if err := h.store.Retract(ctx, v); err != nil {
		return err
	}
	return h.bindings.notes.forget(v.Key)
}

// Tracking asks the container runtime about the sandboxes of volumes.
func (h *Handler) Tracking() deferral.Tracking { return h.bindings }

// Orphans lists the volumes that are not known and have a directory of ours or a record.
func (h *Handler) Orphans(known func(volume.Key) bool) ([]*volume.Volume, error) {
	orphans, err := h.store.Orphans(known)
	if err != nil {
		return nil, err
	}
	noted := h.bindings.notes.all()
	for _, v := range orphans {
		delete(noted, v.Key)
	}
	for key := range noted {
		if !known(key) {
			orphans = append(orphans, &volume.Volume{Key: key, Handler: Name})
		}
	}
	return orphans, nil
}

// InUse returns a sandbox that has the volume or may have it. If that cannot be found out,
// the error is Busy and says what is unknown.
func (h *Handler) InUse(ctx context.Context, v *volume.Volume) (string, error) {
	return h.bindings.inUse(ctx, v)
}

// Binding returns the last known binding. A sandbox counts from when it left its id with the
// volume or answered for it, until it answers that it does not have it.
func (h *Handler) Binding(v *volume.Volume) (runtime.Binding, bool) {
	return h.store.Bindings.Shown(v.Key)
}

// AdoptForeign finds the volumes that other programs published to Kata.
func (h *Handler) AdoptForeign() { h.store.AdoptForeign() }

// Adopted lists the volumes that other programs published to Kata.
func (h *Handler) Adopted() []*volume.Volume { return h.store.Adopted() }

// SandboxAdded reports a new sandbox of a pod. The next call about one of the pod's volumes
// finds out which of its sandboxes is alive.
func (h *Handler) SandboxAdded(podUID, id string) { h.bindings.added(podUID, id) }

// SandboxGone reports that a sandbox has ended.
func (h *Handler) SandboxGone(id string) { h.store.Bindings.DropSandbox(id) }
