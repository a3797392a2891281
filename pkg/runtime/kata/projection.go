package kata

import (
	"context"
	"path/filepath"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// openTree opens Kata's tree. Every file in a volume's directory but infoName is a
// sandbox id to Kata, so nothing of ours may ever stand there beside it.
func openTree(cfg *Config, log *zap.Logger) (*tree.Tree, error) {
	opened, err := tree.Open(tree.Config{
		Name: Name, Root: cfg.DirectVolumes, Temp: cfg.TempDir, File: infoName, What: "Kata's mount information",
		Remedy: "remove the directory once no sandbox uses it (`kata-runtime direct-volume remove`)", Log: log,
	})
	if err != nil {
		return nil, err
	}
	cfg.DirectVolumes, cfg.TempDir = opened.Root, opened.Temp
	return opened, nil
}

// Publish makes the volume's directory exist with the right mountInfo.json.
func (h *Handler) Publish(ctx context.Context, v *deferral.Volume) error {
	if err := ctx.Err(); err != nil {
		return contextError(v, "", err)
	}
	raw, err := encodeInfo(v)
	if err != nil {
		return h.tree.Error(v, "encoded", err)
	}
	err = h.tree.Publish(&tree.Projection{
		Volume: v, Dir: nameOf(v), Raw: raw,
		// Watched before anybody can reach it, so that no sandbox id is missed. Where
		// that fails, Health says so and the tree is read now and then.
		Built:   func(path string) { h.track(v); _ = h.watch.Add(v.Key, path, tree.Us) },
		Dropped: func() { h.untrack(v.Key) },
	})
	if err == nil {
		h.track(v)
	}
	return err
}

// Retract takes the volume's directory away, and the sandbox ids in it. What
// another program put there is left alone.
func (h *Handler) Retract(ctx context.Context, v *deferral.Volume) error {
	if err := ctx.Err(); err != nil {
		return contextError(v, "", err)
	}
	if !hasName(v) {
		return nil // Kata cannot name it, so it was never published
	}
	dir := nameOf(v)
	whose, _, err := h.tree.OwnerOf(dir)
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
	return h.tree.Remove(v, dir)
}

func (h *Handler) volumeDir(v *deferral.Volume) string {
	return h.tree.Path(nameOf(v))
}

// Orphans lists our directories of volumes that nobody knows any more.
func (h *Handler) Orphans(known func(deferral.Key) bool) ([]*deferral.Volume, error) {
	names, err := h.tree.Names()
	if err != nil {
		return nil, err
	}
	var orphans []*deferral.Volume
	for _, name := range names {
		target, ok := targetOf(name)
		if !ok {
			continue
		}
		if whose, key, err := h.tree.OwnerOf(name); err == nil && whose == tree.Us && !known(key) {
			orphan := readVolume(filepath.Join(h.cfg.DirectVolumes, name), target)
			orphan.Key = key
			orphans = append(orphans, orphan)
		}
	}
	return orphans, nil
}
