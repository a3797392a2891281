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
	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/crust"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
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

// explainer decides as the front does.
func explainer(cfg *config.Config) *decision.Rules {
	return &decision.Rules{Policy: cfg.DeferralPolicy(), DefaultHandler: cfg.Handlers.Default, Abilities: func(handler string) (can deferral.Abilities) {
		if handler == crust.Name {
			can = new(crust.Handler).Abilities()
		}
		return can // Kata's have none
	}}
}

// explainFile explains the pod of a file, for drivers that report SINGLE_NODE_MULTI_WRITER and for others.
func explainFile(cfg *config.Config, file string) (text string, err error) {
	raw, err := os.ReadFile(file) // #nosec G304 -- the operator names it
	if err != nil {
		return "", err
	}
	pod, err := pods.Read(raw)
	if err != nil {
		return "", fmt.Errorf("%s: %w", file, err)
	}
	rules, known := explainer(cfg), cfg.Cluster.On()
	for i := range pod.Volumes {
		usual := rules.Explain(&pod, &pod.Volumes[i], known, cfg.Front.DefaultFSType, decision.Driver{})
		multi := rules.Explain(&pod, &pod.Volumes[i], known, cfg.Front.DefaultFSType, decision.Driver{MultiWriter: true})
		if text += usual.String(); multi.Outcome != usual.Outcome {
			text += "with a driver that reports SINGLE_NODE_MULTI_WRITER, " + multi.String()
		}
	}
	return text, nil
}

func (f *driverFront) explain(ctx context.Context, cfg *config.Config, name string) (out []*adminv1.ExplainedVolume, err error) {
	pod, err := f.cluster.ByName(ctx, name)
	drivers := shown(f.drivers.List())
	ready := slices.DeleteFunc(slices.Clone(drivers), func(one *adminv1.Driver) bool { return !one.GetReady() })
	drivers = append(ready, drivers...) // of two registrars, the one that serves the driver
	for i := range pod.Volumes {
		of := decision.Driver{Elsewhere: true}
		if n := slices.IndexFunc(drivers, func(one *adminv1.Driver) bool { return one.GetName() == pod.Volumes[i].Driver }); n >= 0 {
			reports := func(capability string) bool { return slices.Contains(drivers[n].GetCapabilities(), capability) }
			of = decision.Driver{
				Native: drivers[n].GetMode() == volume.WayNative, MultiWriter: reports("SINGLE_NODE_MULTI_WRITER"), MountGroup: reports("VOLUME_MOUNT_GROUP"),
			}
		}
		pod.Volumes[i].Mark = f.front.Mark(pod.Volumes[i].Driver, pod.Volumes[i].VolumeID)
		e := explainer(cfg).Explain(&pod, &pod.Volumes[i], true, cfg.Front.DefaultFSType, of)
		out = append(out, &adminv1.ExplainedVolume{Volume: e.Volume, Outcome: e.Outcome, Because: e.Because})
	}
	return out, err
}
