package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/crust"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

type handlers []runtime.Handler

// handlerParts are what handlers are made of and ask of the daemon.
type handlerParts struct {
	cfg     *config.Config
	tracker tracker // nil where no container runtime is configured
	disks   *disks
	log     *zap.Logger
	// onChange is called when the sandbox of a volume changed.
	onChange   func(volume.Key)
	deviceSize func(*volume.Volume) (int64, bool)
}

func newHandlers(p handlerParts) (handlers, error) {
	var on handlers
	if p.cfg.Handlers.Kata.Enabled {
		made, err := p.newKata()
		if err != nil {
			return nil, err
		}
		on = append(on, made)
	}
	if p.cfg.Handlers.Crust.Enabled {
		made, err := p.newCrust()
		if err != nil {
			return nil, err
		}
		on = append(on, made)
	}
	return on, nil
}

func (all handlers) projectors() []deferral.Projector {
	out := make([]deferral.Projector, 0, len(all))
	for _, h := range all {
		out = append(out, h)
	}
	return out
}

func (all handlers) byName() map[string]runtime.Handler {
	out := make(map[string]runtime.Handler, len(all))
	for _, h := range all {
		out[h.Name()] = h
	}
	return out
}

func (all handlers) adopted() []*volume.Volume {
	var out []*volume.Volume
	for _, h := range all {
		out = append(out, h.Adopted()...)
	}
	return out
}

// sandboxOf is the sandbox that has a volume now, as far as its handler knows.
func (all handlers) sandboxOf(key volume.Key) string {
	for _, h := range all {
		if binding, bound := h.Binding(&volume.Volume{Key: key}); bound {
			return binding.Sandbox
		}
	}
	return ""
}

func (all handlers) each(do func(runtime.Handler)) {
	for _, h := range all {
		do(h)
	}
}

func (p handlerParts) newKata() (*kata.Handler, error) {
	cfg, k := p.cfg, p.cfg.Handlers.Kata
	temp, err := tempOf(cfg, kata.Name, k.TempDir, k.DirectVolumes)
	if err != nil {
		return nil, err
	}
	return kata.New(kata.Config{
		DirectVolumes: k.DirectVolumes, GoSandboxes: k.GoSandboxes, RustSandboxes: k.RustSandboxes, SharedSandboxes: k.SharedSandboxes,
		TempDir: temp, KubeletRoot: cfg.KubeletRoot, StateDir: filepath.Join(cfg.StateDir(), kata.Name), Filesystems: k.Filesystems,
		OnChange: p.onChange, DeviceSize: p.deviceSize, Matches: p.disks.matches,
		Condition: p.disks.condition, LacksGroup: p.disks.lacksGroup,
	}, p.tracker, p.log.Named(kata.Name))
}

func (p handlerParts) newCrust() (*crust.Handler, error) {
	cfg, c := p.cfg, p.cfg.Handlers.Crust
	temp, err := tempOf(cfg, crust.Name, c.TempDir, c.Root)
	if err != nil {
		return nil, err
	}
	_, noLabels := os.Stat("/sys/fs/selinux/enforce")
	return crust.New(crust.Config{
		SELinux: noLabels == nil,
		Root:    c.Root, TempDir: temp, KubeletRoot: cfg.KubeletRoot, Programs: c.Programs, SocketDirs: c.SocketDirs, Filesystems: c.Filesystems,
		OnChange: p.onChange, DeviceSize: p.deviceSize,
	}, p.tracker, p.log.Named(crust.Name))
}

// tempOf is where a handler makes volumes ready: in our state directory where that
// is on the filesystem of the handler's tree, or else beside that tree. Never in
// it.
func tempOf(cfg *config.Config, name, configured, root string) (string, error) {
	if configured != "" {
		return configured, nil
	}
	ours := filepath.Join(cfg.StateDir(), "tmp", name)
	for _, dir := range []string{ours, root} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return "", volume.Errorf(volume.Internal, "the directory %s cannot be made: %w", dir, err)
		}
	}
	same, err := sameFilesystem(ours, root)
	if err != nil || same {
		return ours, err
	}
	// Daemons that share the tree must not clear away each other's files.
	sum := sha256.Sum256([]byte(filepath.Clean(cfg.RunDir)))
	return filepath.Join(filepath.Dir(root), ".crust-proxy-tmp-"+name+"-"+hex.EncodeToString(sum[:4])), nil
}

func sameFilesystem(a, b string) (bool, error) {
	var x, y unix.Stat_t
	if err := unix.Stat(a, &x); err != nil {
		return false, volume.Errorf(volume.Internal, "%s cannot be looked at: %w", a, err)
	}
	if err := unix.Stat(b, &y); err != nil {
		return false, volume.Errorf(volume.Internal, "%s cannot be looked at: %w", b, err)
	}
	return x.Dev == y.Dev, nil
}
