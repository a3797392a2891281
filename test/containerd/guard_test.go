//go:build system

package containerd

import (
	"crypto/sha256"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

// TestOrdinaryPodOnADeferredVolume runs a pod on a deferred volume with a runtime
// that knows nothing of it: it must not write to the node's disk as if that were
// the volume.
func TestOrdinaryPodOnADeferredVolume(t *testing.T) {
	node := newNode(t, nil)
	d := rig.NewDaemon(t)
	d.Start()
	disk := rig.Disk(t, 32*mib, "ext4")
	before := checksum(t, disk)
	request := d.StageRequest("pod-1", disk)
	target := request.GetVolumeTargetPath()
	_, err := d.Runtime().RuntimeStageVolume(t.Context(), request)
	check.Must(t, err)

	pod, err := node.RunPod(t.Context(), "pod-1", "runc", 0)
	check.Must(t, err)
	id, err := pod.Run(t.Context(), cri.Container{Name: "main", Mounts: []cri.Mount{{Host: target, Container: "/data"}}})
	check.Must(t, err)
	_, err = node.Exec(t.Context(), id, "echo lost > /data/file")
	if err == nil || !strings.Contains(err.Error(), "No space left on device") {
		t.Errorf("its write ended with: %v", err)
	}
	if found := holding(t, d.Kubelet, "lost"); len(found) > 0 {
		t.Errorf("it wrote to the node: %q", found)
	}
	check.Must(t, pod.Remove(t.Context()))
	unstage(t, d, target)
	if found := holding(t, d.Kubelet, "lost"); len(found) > 0 {
		t.Errorf("it wrote to the node, below the guard: %q", found)
	}
	if checksum(t, disk) != before {
		t.Error("the volume has changed")
	}
	d.WantClean()
}

func checksum(t *testing.T, path string) [sha256.Size]byte {
	t.Helper()
	file, err := os.Open(path)
	check.Must(t, err)
	defer func() { _ = file.Close() }()
	sum := sha256.New()
	_, err = io.Copy(sum, file)
	check.Must(t, err)
	return [sha256.Size]byte(sum.Sum(nil))
}

// holding lists the files below a directory that hold a text.
func holding(t *testing.T, dir, text string) (found []string) {
	t.Helper()
	check.Must(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		raw, err := os.ReadFile(path)
		if strings.Contains(string(raw), text) {
			found = append(found, path)
		}
		return err
	}))
	return found
}
