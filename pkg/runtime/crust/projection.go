package crust

import (
	"context"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// Publish makes the volume's directory exist with the right mountInfo.json. For a
// volume that was there before, it also looks whether its sandbox still lives.
func (h *Handler) Publish(ctx context.Context, v *deferral.Volume) error {
	if err := ctx.Err(); err != nil {
		return contextError(v, "", err)
	}
	raw, err := abi.Encode(v)
	if err != nil {
		return h.tree.Error(v, "encoded", err)
	}
	err = h.tree.Publish(&tree.Projection{
		Volume: v, Dir: string(v.Key), Raw: raw,
		// Watched before anybody can reach it, so that no sandbox id is missed. Where
		// that fails, Health says so and the id is found when it is needed.
		Built:   func(path string) { h.track(v, tree.Us); _ = h.watch.Add(v.Key, path, tree.Us) },
		Dropped: func() { h.untrack(v.Key) },
	})
	if err != nil {
		return err
	}
	h.track(v, tree.Us)
	h.suspect(v)
	return nil
}

// Retract takes the volume's directory away, and all that handlers left in it.
// What another program put there is left alone.
func (h *Handler) Retract(ctx context.Context, v *deferral.Volume) error {
	if err := ctx.Err(); err != nil {
		return contextError(v, "", err)
	}
	if !abi.IsDirName(string(v.Key)) {
		return nil
	}
	whose, _, err := h.tree.OwnerOf(string(v.Key))
	if err != nil {
		return h.tree.Error(v, "looked at", err)
	}
	if whose == tree.Stranger {
		return nil
	}
	h.untrack(v.Key)
	if whose == tree.Nobody {
		return nil
	}
	return h.tree.Remove(v, string(v.Key))
}

// Orphans lists our directories of volumes that nobody knows any more.
func (h *Handler) Orphans(known func(deferral.Key) bool) ([]*deferral.Volume, error) {
	names, err := h.tree.Names()
	if err != nil {
		return nil, err
	}
	var orphans []*deferral.Volume
	for _, name := range names {
		if !abi.IsDirName(name) || known(deferral.Key(name)) {
			continue
		}
		if whose, _, err := h.tree.OwnerOf(name); err == nil && whose == tree.Us {
			orphans = append(orphans, h.readVolume(name))
		}
	}
	return orphans, nil
}

// readVolume reads a volume back from its directory. Of one that does not say its
// target, that is the directory itself: it needs a name in lists and errors.
func (h *Handler) readVolume(name string) *deferral.Volume {
	path := h.tree.Path(name)
	v := &deferral.Volume{Key: deferral.Key(name), Target: path, ResolvedTarget: path, Handler: Name}
	dir, err := abi.Open(h.cfg.Root, name)
	if err != nil {
		return v
	}
	defer func() { _ = dir.Close() }()
	info, err := dir.Info()
	if err != nil {
		return v
	}
	if target := info.Target(); target != "" {
		v.Target, v.ResolvedTarget = target, target
	}
	describe(v, &info)
	if st, err := os.Lstat(path + "/" + abi.InfoName); err == nil {
		v.Created = st.ModTime().Round(time.Microsecond)
	}
	return v
}

func describe(v *deferral.Volume, info *abi.Info) {
	v.PodUID, v.FSType = info.PodUID(), info.FSType
	v.MountFlags, v.ReadOnly = slices.Clone(info.Options), info.ReadOnly()
	v.GroupPolicy = info.GroupPolicy()
	if gid, wanted, err := info.Group(); err == nil && wanted {
		v.Group = strconv.FormatUint(uint64(gid), 10)
	}
	v.Device = tree.Identify(info.Device)
}
