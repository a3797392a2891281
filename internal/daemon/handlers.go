package daemon

import (
	"os"
	"path/filepath"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/crust"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
)

// handler is a runtime handler as the daemon runs it.
type handler interface {
	runtime.Handler
	// TakeUp lists the volumes of other programs before anything is served.
	TakeUp()
	// SandboxAdded and SandboxGone are what the container runtime tells.
	SandboxAdded(podUID, id string)
	SandboxGone(id string)
}

// handlers are those that the configuration has on.
type handlers []handler

func (d *daemon) newHandlers(cfg *config.Config) (handlers, error) {
	var on handlers
	if cfg.Handlers.Kata.Enabled {
		made, err := d.newKata(cfg)
		if err != nil {
			return nil, err
		}
		on = append(on, made)
	}
	if cfg.Handlers.Crust.Enabled {
		made, err := d.newCrust(cfg)
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

// adopted lists the volumes that other programs published, to any of them.
func (all handlers) adopted() []*deferral.Volume {
	var out []*deferral.Volume
	for _, h := range all {
		out = append(out, h.Adopted()...)
	}
	return out
}

func (all handlers) takeUp() {
	for _, h := range all {
		h.TakeUp()
	}
}

func (all handlers) sandboxAdded(podUID, id string) {
	for _, h := range all {
		h.SandboxAdded(podUID, id)
	}
}

func (all handlers) sandboxGone(id string) {
	for _, h := range all {
		h.SandboxGone(id)
	}
}

func (d *daemon) newKata(cfg *config.Config) (*kata.Handler, error) {
	k := cfg.Handlers.Kata
	temp, err := tempOf(cfg, kata.Name, k.TempDir, k.DirectVolumes)
	if err != nil {
		return nil, err
	}
	settings := kata.Default()
	settings.DirectVolumes, settings.TempDir = k.DirectVolumes, temp
	settings.GoSandboxes, settings.RustSandboxes, settings.SharedSandboxes = k.GoSandboxes, k.RustSandboxes, k.SharedSandboxes
	settings.Filesystems = k.Filesystems
	settings.OnChange, settings.DeviceSize = d.rebound, d.deviceSize
	var sandboxes kata.Sandboxes
	if d.tracker != nil {
		sandboxes = d.tracker
	}
	return kata.New(settings, sandboxes, d.log.Named(kata.Name))
}

func (d *daemon) newCrust(cfg *config.Config) (*crust.Handler, error) {
	c := cfg.Handlers.Crust
	temp, err := tempOf(cfg, crust.Name, c.TempDir, c.Root)
	if err != nil {
		return nil, err
	}
	var sandboxes crust.Sandboxes
	if d.tracker != nil {
		sandboxes = d.tracker
	}
	_, noLabels := os.Stat("/sys/fs/selinux/enforce")
	return crust.New(crust.Config{
		SELinux: noLabels == nil,
		Root:    c.Root, TempDir: temp, Programs: c.Programs, SocketDirs: c.SocketDirs, Filesystems: c.Filesystems,
		OnChange: d.rebound, DeviceSize: d.deviceSize,
	}, sandboxes, d.log.Named(crust.Name))
}

// deviceSize is asked by handlers, which are made before the broker.
func (d *daemon) deviceSize(v *deferral.Volume) (int64, bool) { return d.broker.DeviceSize(v) }

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
			return "", deferral.Errorf(deferral.Internal, "the directory %s cannot be made: %w", dir, err)
		}
	}
	same, err := sameFilesystem(ours, root)
	if err != nil || same {
		return ours, err
	}
	return filepath.Join(filepath.Dir(root), ".crust-proxy-tmp-"+name), nil
}
