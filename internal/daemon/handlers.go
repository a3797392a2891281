package daemon

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/daemon/sandboxes"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/crust"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

func newHandlers(d *daemon, cfg *config.Config) (sandboxes.Handlers, error) {
	var on sandboxes.Handlers
	if cfg.Handlers.Kata.Enabled {
		made, err := newKata(d, cfg)
		if err != nil {
			return nil, err
		}
		on = append(on, made)
	}
	if cfg.Handlers.Crust.Enabled {
		made, err := newCrust(d, cfg)
		if err != nil {
			return nil, err
		}
		on = append(on, made)
	}
	return on, nil
}

func newKata(d *daemon, cfg *config.Config) (*kata.Handler, error) {
	k := cfg.Handlers.Kata
	temp, err := tempOf(cfg, kata.Name, k.TempDir, k.DirectVolumes)
	if err != nil {
		return nil, err
	}
	return kata.New(kata.Config{
		DirectVolumes: k.DirectVolumes, GoSandboxes: k.GoSandboxes, RustSandboxes: k.RustSandboxes, SharedSandboxes: k.SharedSandboxes,
		TempDir: temp, KubeletRoot: cfg.KubeletRoot, StateDir: filepath.Join(cfg.StateDir(), kata.Name), Filesystems: k.Filesystems,
		OnChange: d.onSandboxChanged, Disks: d.disks,
	}, d.tracker, d.log.Named(kata.Name))
}

func newCrust(d *daemon, cfg *config.Config) (*crust.Handler, error) {
	c := cfg.Handlers.Crust
	temp, err := tempOf(cfg, crust.Name, c.TempDir, c.Root)
	if err != nil {
		return nil, err
	}
	_, noLabels := os.Stat("/sys/fs/selinux/enforce")
	return crust.New(crust.Config{
		SELinux: noLabels == nil,
		Root:    c.Root, TempDir: temp, KubeletRoot: cfg.KubeletRoot, Programs: c.Programs, SocketDirs: c.SocketDirs, Filesystems: c.Filesystems,
		OnChange: d.onSandboxChanged,
	}, d.tracker, d.log.Named(crust.Name))
}

// tempOf returns where a handler prepares volumes: in our state directory, if that is on the
// filesystem of the handler's tree, or else beside the tree. Never in the tree.
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
	// Daemons that share the tree must not remove each other's files.
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
