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
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// validate refuses what a start of the daemon refuses, and shows what is in force otherwise.
func validate(_ context.Context, call invocation) error {
	cfg, err := call.flags.Load()
	if err != nil {
		return err
	}
	if err := mayStart(call.flags, &cfg); err != nil {
		return err
	}
	text, err := cfg.YAML()
	if call.pod != "" {
		text, err = explainFile(&cfg, call.pod)
	}
	if err != nil {
		return err
	}
	for _, line := range slices.Concat(cfg.DeferralPolicy().Explain(), cfg.Warnings(), missingHere(&cfg)) {
		text += "# " + line + "\n"
	}
	_, err = io.WriteString(call.stdout, "# "+call.flags.Source()+"\n"+text)
	return err
}

// missingHere lists what the configuration names and this node does not have. It is no error: the
// daemon starts without, systemd may pass the sockets, and the rest may come later.
func missingHere(cfg *config.Config) (out []string) {
	warn := func(key string, err error) {
		if err != nil {
			out = append(out, "on this node: "+key+": "+err.Error())
		}
	}
	warn("runDir", onTmpfs(cfg.RunDir))
	needed := map[string]string{"kubeletRoot": cfg.KubeletRoot, "containerd.socket": cfg.Containerd.Socket, "cri.socket": cfg.CRI.Socket}
	for key, path := range map[string]string{"runtimeSocket.path": cfg.RuntimeSocket.Path, "adminSocket.path": cfg.AdminSocket.Path} {
		needed[key] = filepath.Dir(path)
		if info, err := os.Lstat(path); err == nil && info.Mode().Type() != fs.ModeSocket {
			warn(key, errors.New(path+" is not a socket"))
		}
	}
	for key, path := range needed {
		if path != "" && path != cfg.RunDir { // which the daemon makes
			_, err := os.Stat(path)
			warn(key, err)
		}
	}
	warnPrograms(cfg, warn)
	if cfg.Front.Enabled && cfg.Cluster.Kubeconfig != "" {
		_, err := apiserver.Identity{Kubeconfig: cfg.Cluster.Kubeconfig}.Config()
		warn("cluster.kubeconfig", err)
	}
	slices.Sort(out)
	return out
}

func warnPrograms(cfg *config.Config, warn func(key string, err error)) {
	var filesystems []string
	if cfg.Handlers.Kata.Enabled {
		filesystems = append(filesystems, cfg.Handlers.Kata.Filesystems...)
	}
	if crust := cfg.Handlers.Crust; crust.Enabled {
		filesystems = append(filesystems, crust.Filesystems...)
		for i, program := range crust.Programs {
			_, err := os.Stat(program)
			warn(fmt.Sprintf("handlers.crust.programs[%d]", i), err)
		}
	}
	slices.Sort(filesystems)
	for _, fsType := range slices.Compact(filesystems) {
		if cfg.Front.Enabled && cfg.Policy.Format == volume.FormatHost {
			warn("handlers.*.filesystems", mkfs.Installed(fsType))
		}
	}
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
