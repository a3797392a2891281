//go:build system

package top

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

func TestMain(m *testing.M) { os.Exit(rig.Main(m)) }

// node is a daemon with volumes on image files, which need no loop device.
type node struct {
	*rig.Daemon
	t *testing.T
}

func newNode(t *testing.T) *node {
	t.Helper()
	d := rig.NewDaemon(t)
	d.Start()
	return &node{Daemon: d, t: t}
}

const (
	imageSize  = 40 << 30
	onePercent = imageSize / 4096 / 128
)

// publish stages a volume and gives its target.
func (n *node) publish(name string, flags ...string) string {
	n.t.Helper()
	image := filepath.Join(n.Images, name)
	check.Must(n.t, os.WriteFile(image, nil, 0o600))
	check.Must(n.t, os.Truncate(image, imageSize))
	target := n.target(name)
	req := n.StageRequest("unused", image, flags...)
	req.VolumeTargetPath = target
	_, err := n.Runtime().RuntimeStageVolume(n.t.Context(), req)
	check.Must(n.t, err)
	return target
}

func (n *node) target(name string) string {
	n.t.Helper()
	dir := filepath.Join(n.Kubelet, "pods", "0f0e0d0c-"+name, "volumes", "kubernetes.io~csi", name)
	check.Must(n.t, os.MkdirAll(dir, 0o750))
	check.Must(n.t, os.WriteFile(filepath.Join(dir, "vol_data.json"), []byte(`{"driverName":"disk.example.com","volumeHandle":"v"}`), 0o600))
	return filepath.Join(dir, "mount")
}

// boot gives a volume a sandbox whose filesystem has so many percent in use.
func (n *node) boot(name string, percent uint64) *kata.Shim {
	n.t.Helper()
	return kata.Bind(n.t, n.Daemon, "sandbox-"+name, n.target(name), map[string]kata.Statfs{filepath.Join(n.Images, name): func() (unix.Statfs_t, error) {
		return unix.Statfs_t{Bsize: 4096, Blocks: 100 * onePercent, Bfree: (100 - percent) * onePercent, Bavail: (100 - percent) * onePercent, Files: 1000, Ffree: 990}, nil
	}})
}

// publishAfterRestart starts the daemon anew and publishes one more volume.
func (n *node) publishAfterRestart(name string) {
	n.t.Helper()
	n.Start()
	n.publish(name)
}
