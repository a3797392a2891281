package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/internal/ground/peercred"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// validate refuses what a start of the daemon refuses, and shows what is in force otherwise.
func validate(_ context.Context, flags *config.Flags, stdout, _ io.Writer) error {
	cfg, err := flags.Load()
	if err != nil {
		return err
	}
	if err := mayStart(&cfg); err != nil {
		return err
	}
	text, err := cfg.YAML()
	if err != nil {
		return err
	}
	for _, line := range slices.Concat(cfg.DeferralPolicy().Explain(), cfg.Warnings(), missingHere(&cfg)) {
		text += "# " + line + "\n"
	}
	_, err = io.WriteString(stdout, "# "+flags.Source()+"\n"+text)
	return err
}

// missingHere lists what the configuration names and this node does not have. It is no error: the
// daemon starts without, systemd may pass the sockets, and the rest may come later.
func missingHere(cfg *config.Config) []string {
	var out []string
	warn := func(key string, err error) {
		if err != nil {
			out = append(out, "on this node: "+key+": "+err.Error())
		}
	}
	warn("runDir", onTmpfs(cfg.RunDir))
	warn("kubeletRoot", is(cfg.KubeletRoot, "a directory", fs.FileMode.IsDir))
	for key, socket := range map[string]config.Socket{"runtimeSocket": cfg.RuntimeSocket, "adminSocket": cfg.AdminSocket} {
		_, err := peercred.GroupID(socket.Group)
		warn(key+".group", err)
		if dir := filepath.Dir(socket.Path); dir != cfg.RunDir { // which the daemon makes
			warn(key+".path", is(dir, "a directory", fs.FileMode.IsDir))
		}
		if err := is(socket.Path, "a socket", isSocket); !errors.Is(err, fs.ErrNotExist) {
			warn(key+".path", err)
		}
	}
	for key, socket := range map[string]string{"containerd.socket": cfg.Containerd.Socket, "cri.socket": cfg.CRI.Socket} {
		if socket != "" {
			warn(key, is(socket, "a socket", isSocket))
		}
	}
	if cfg.Front.Enabled && cfg.Cluster.Kubeconfig != "" {
		_, err := apiserver.Identity{Kubeconfig: cfg.Cluster.Kubeconfig}.Config()
		warn("cluster.kubeconfig", err)
	}
	warnPrograms(cfg, warn)
	slices.Sort(out)
	return out
}

func warnPrograms(cfg *config.Config, warn func(key string, err error)) {
	var filesystems []string
	if cfg.Handlers.Kata.Enabled {
		filesystems = append(filesystems, cfg.Handlers.Kata.Filesystems...)
	}
	if cfg.Handlers.Crust.Enabled {
		filesystems = append(filesystems, cfg.Handlers.Crust.Filesystems...)
		for i, program := range cfg.Handlers.Crust.Programs {
			warn(fmt.Sprintf("handlers.crust.programs[%d]", i),
				is(program, "a program", func(mode fs.FileMode) bool { return mode.IsRegular() && mode&0o111 != 0 }))
		}
	}
	slices.Sort(filesystems)
	for _, fsType := range slices.Compact(filesystems) {
		if cfg.Front.Enabled && cfg.Policy.Format == volume.FormatHost {
			warn("handlers.*.filesystems", mkfs.Installed(fsType))
		}
	}
}

func isSocket(mode fs.FileMode) bool { return mode.Type() == fs.ModeSocket }

// is returns an error unless a file exists and its mode is right.
func is(path, what string, right func(fs.FileMode) bool) error {
	info, err := os.Stat(path)
	if err == nil && !right(info.Mode()) {
		return fmt.Errorf("%s is not %s", path, what)
	}
	return err
}

// onTmpfs returns an error unless a directory is on tmpfs, or will be when it is made.
func onTmpfs(dir string) error {
	var on unix.Statfs_t
	err := unix.Statfs(dir, &on)
	for at := dir; errors.Is(err, unix.ENOENT) && at != "/"; err = unix.Statfs(at, &on) {
		at = filepath.Dir(at)
	}
	if err == nil && on.Type != unix.TMPFS_MAGIC && on.Type != unix.RAMFS_MAGIC {
		return fmt.Errorf("%s is not on tmpfs: its records would outlive a reboot, which the mounts do not", dir)
	}
	return err
}
