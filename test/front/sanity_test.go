//go:build system

package front

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
	"github.com/crust-proxy/crust-proxy/test/sanity"
)

// TestSanityIsTheSameWithTheFront runs csi-sanity over the driver's own socket
// and over the front's, for volumes that are not deferred.
func TestSanityIsTheSameWithTheFront(t *testing.T) {
	program := sanity.Program(t)
	for _, kind := range rig.Sample([]string{"mount", "block"}, 2) {
		t.Run(kind, func(t *testing.T) {
			n := newNode(t, deferNone)
			directRan, directSkipped := sanity.Run(t, program, n.sanityDir("direct"), n.driver.Socket, kind)
			ran, skipped := sanity.Run(t, program, n.sanityDir("front"), n.driver.Front, kind)
			check.That(t, ran == directRan && ran >= 45, "%d specs ran directly, and %d through the front", directRan, ran)
			check.Same(t, cmp.Diff(directSkipped, skipped), "skipped -directly +through the front")
		})
	}
}

// TestSanityOfDeferredVolumes runs it where every filesystem volume is deferred,
// with a sandbox for each that is asked for stats or to grow: the way in which csi-sanity
// covers most. CI has it with the driver's raw block, which crust-proxy formats.
func TestSanityOfDeferredVolumes(t *testing.T) {
	program := sanity.Program(t)
	for name, args := range map[string][]string{"block": nil, "native": {"--defer"}} {
		if name == "native" && !rig.Soak() {
			continue
		}
		t.Run(name, func(t *testing.T) {
			n := newNode(t, deferAll, args...)
			socket, _ := sanity.HideDeferral(t, n.driver.Conn, n.Dir, n.withSandbox())
			ran, _ := sanity.Run(t, program, n.sanityDir("deferred"), socket, "mount")
			check.That(t, ran >= 45, "only %d specs ran", ran)
		})
	}
}

func (n *node) sanityDir(name string) string {
	n.t.Helper()
	dir := filepath.Join(n.Kubelet, "sanity", name)
	check.Must(n.t, os.MkdirAll(dir, 0o755))
	return dir
}

// withSandbox gives a volume a sandbox for the time of a stats or expand call:
// csi-sanity knows of none, and unpublishes right after it.
func (n *node) withSandbox() map[string]passthrough.Local {
	count := 0
	with := func(asked volumeRequest) passthrough.Local {
		return func(ctx context.Context, request []byte, forward passthrough.Forward) ([]byte, error) {
			if err := proto.Unmarshal(request, asked); err != nil {
				return nil, err
			}
			dir := kata.VolumeDir(n.Kata, asked.GetVolumePath())
			if _, err := os.Stat(dir); asked.GetVolumePath() == "" || err != nil {
				return forward(ctx, request)
			}
			count++
			end, err := n.shortLived(fmt.Sprintf("sandbox-%d", count), dir, asked.GetVolumePath())
			if err != nil {
				return nil, err
			}
			defer end()
			return forward(ctx, request)
		}
	}
	return map[string]passthrough.Local{
		csi.Node_NodeGetVolumeStats_FullMethodName: with(&csi.NodeGetVolumeStatsRequest{}),
		csi.Node_NodeExpandVolume_FullMethodName:   with(&csi.NodeExpandVolumeRequest{}),
	}
}

// volumeRequest names where a volume is published.
type volumeRequest interface {
	proto.Message
	GetVolumePath() string
}

// shortLived is a sandbox that tells numbers and says that it can grow.
func (n *node) shortLived(id, dir, target string) (end func(), err error) {
	device, _, err := kata.HandedOver(n.Kata, target)
	if err != nil {
		return nil, err
	}
	shim, err := kata.Start(kata.Options{
		Flavor: kata.Go, SandboxID: id, Sandboxes: n.GoSandboxes,
		Mounts: map[string]kata.Statfs{device: kata.MountedAt("/")},
		Body:   []byte(`{"usage":[{"available":6,"total":10,"used":4,"unit":1}]}`),
		Resize: func(string, uint64) error { return nil },
	})
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, id), nil, 0o600); err != nil {
		return nil, errors.Join(err, shim.Stop())
	}
	_ = check.Until(20*time.Second, time.Millisecond, func() error {
		_, err := n.driver.Node.NodeGetVolumeStats(context.Background(), &csi.NodeGetVolumeStatsRequest{VolumeId: "any", VolumePath: target})
		return err
	})
	return func() { _ = shim.Stop() }, nil
}
