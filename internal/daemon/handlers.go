package daemon

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/daemon/sandboxes"
	csifront "github.com/crust-proxy/crust-proxy/internal/front/csi"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/crust"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/kata"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/sandbox"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

func newHandlers(d *daemon, cfg *config.Config) (on sandboxes.Handlers, err error) {
	for _, one := range []struct {
		enabled bool
		make    func(*daemon, *config.Config) (runtime.Handler, error)
	}{{cfg.Handlers.Kata.Enabled, newKata}, {cfg.Handlers.Crust.Enabled, newCrust}} {
		if !one.enabled {
			continue
		}
		made, err := one.make(d, cfg)
		if err != nil {
			return nil, err
		}
		on = append(on, made)
	}
	return on, nil
}

func newKata(d *daemon, cfg *config.Config) (runtime.Handler, error) {
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

func newCrust(d *daemon, cfg *config.Config) (runtime.Handler, error) {
	c := cfg.Handlers.Crust
	temp, err := tempOf(cfg, crust.Name, c.TempDir, c.Root)
	if err != nil {
		return nil, err
	}
	// /sys/fs/selinux is empty in a pod; the kernel registers this where SELinux is on.
	filesystems, _ := os.ReadFile("/proc/filesystems")
	return crust.New(crust.Config{
		SELinux: bytes.Contains(filesystems, []byte("\tselinuxfs\n")),
		Root:    c.Root, TempDir: temp, KubeletRoot: cfg.KubeletRoot, Programs: c.Programs, SocketDirs: c.SocketDirs, Filesystems: c.Filesystems,
		OnChange: d.onSandboxChanged,
	}, d.tracker, d.log.Named(crust.Name))
}

// tempOf returns where a handler prepares volumes, a directory that is emptied at each start: below parent, if that is
// configured, or else in our state directory, if that is on the filesystem of the handler's tree, or else beside the
// tree. Never in the tree.
func tempOf(cfg *config.Config, name, parent, root string) (string, error) {
	if parent == "" {
		ours := filepath.Join(cfg.StateDir(), "tmp", name)
		var found [2]unix.Stat_t
		for i, dir := range []string{ours, root} {
			if err := errors.Join(os.MkdirAll(dir, 0o700), unix.Stat(dir, &found[i])); err != nil {
				return "", volume.Errorf(volume.Internal, "the directory %s cannot be made or looked at: %w", dir, err)
			}
		}
		if found[0].Dev == found[1].Dev {
			return ours, nil
		}
		parent = filepath.Dir(root)
	}
	// What others have there stays, and daemons that share it do not remove each other's files.
	sum := sha256.Sum256([]byte(filepath.Clean(cfg.RunDir)))
	return filepath.Join(parent, ".crust-proxy-tmp-"+name+"-"+hex.EncodeToString(sum[:4])), nil
}

// tracker follows the container runtime's sandboxes.
type tracker interface {
	Run(ctx context.Context) error
	kata.Sandboxes
}

// newTracker completes the configuration with the container runtime. It returns nil if none is configured.
func newTracker(cfg *config.Config, of sandbox.Config, log *zap.Logger) tracker {
	switch {
	case cfg.Containerd.Socket != "":
		of.Runtime, of.Socket = "containerd", cfg.Containerd.Socket
		return sandbox.New(of, log.Named("containerd"))
	case cfg.CRI.Socket != "":
		of.Runtime, of.Socket = "the container runtime", cfg.CRI.Socket
		return sandbox.New(of, log.Named("cri"))
	}
	return nil
}

type followed struct{ tracker }

func (f followed) findings() (_, out []string) {
	if !f.Ready() {
		out = append(out, fmt.Sprintf("sandboxes cannot be followed (%v): their end is detected late; with Kata, those of its Rust runtime are not found, and volumes may stay", f.LastError()))
	}
	return nil, out
}

func (f followed) measure(_ context.Context, into *telemetry.NodeState) {
	into.Sources["sandboxes"] = f.Ready()
}

// newCluster returns the lookup of the node's pods, or nil if no cluster is configured.
func newCluster(cfg *config.Config, metrics *telemetry.Metrics, log *zap.Logger) (*pods.Cluster, error) {
	if !cfg.Cluster.On() || !cfg.Front.Enabled {
		return nil, nil
	}
	name, err := cfg.Cluster.Node()
	if err != nil {
		return nil, err
	}
	klog.SetLogger(telemetry.Logr(log)) // client-go logs through it
	return pods.New(pods.Config{
		Identity: identityOf(cfg.Cluster), NodeName: name, Log: log,
		Asked: func(question string, took time.Duration, err error) {
			metrics.PodLookedUp(question, resultOf(err), took)
		},
	}), nil
}

func identityOf(c config.Cluster) apiserver.Identity {
	return apiserver.Identity{Kubeconfig: c.Kubeconfig, InCluster: c.InCluster, UserAgent: "crust-proxy/" + sys.Version()}
}

// podSource returns the front's source of pods: without a cluster a nil interface, not an
// interface around a nil pointer.
func podSource(cluster *pods.Cluster) csifront.Pods {
	if cluster == nil {
		return nil
	}
	return cluster
}
