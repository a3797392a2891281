package rig

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
)

// Vendors is a relay before a driver that treats devices as drivers of vendors do.
//
//   - Proxmox' knows by the path whether it unstages a raw device. If not, it takes the disk
//     on which the path lies offline, which here fails the test.
//   - Exoscale's makes the device of a read-only publish read-only, and leaves it so. What
//     kubelet itself publishes as raw block is spared.
type Vendors struct {
	mu     sync.Mutex
	raw    map[string]bool // staging paths of devices
	harm   []string
	Tokens atomic.Int64 // publishes that had tokens of the pod's account in their secrets
}

// ServeVendors serves at a socket for the driver at another one, until the test ends.
func ServeVendors(t T, driver, socket string) *Vendors {
	t.Helper()
	v := &Vendors{raw: make(map[string]bool)}
	t.Cleanup(func() {
		v.mu.Lock()
		defer v.mu.Unlock()
		if len(v.harm) > 0 {
			t.Errorf("Proxmox' driver would take disks offline:\n%s", strings.Join(v.harm, "\n"))
		}
	})
	Before(t, Dial(t, driver), socket, map[string]passthrough.Local{
		csi.Node_NodeStageVolume_FullMethodName:   v.stage,
		csi.Node_NodeUnstageVolume_FullMethodName: v.unstage,
		csi.Node_NodePublishVolume_FullMethodName: v.publish,
	})
	return v
}

func (v *Vendors) stage(ctx context.Context, request []byte, forward passthrough.Forward) ([]byte, error) {
	req := &csi.NodeStageVolumeRequest{}
	if err := proto.Unmarshal(request, req); err != nil {
		return nil, err
	}
	v.mu.Lock()
	if where := req.GetStagingTargetPath(); strings.Contains(where, "/kubernetes.io/csi/") { // csi-sanity has paths of its own
		v.raw[where] = req.GetVolumeCapability().GetBlock() != nil
	}
	v.mu.Unlock()
	return forward(ctx, request)
}

func (v *Vendors) unstage(ctx context.Context, request []byte, forward passthrough.Forward) ([]byte, error) {
	req := &csi.NodeUnstageVolumeRequest{}
	if err := proto.Unmarshal(request, req); err != nil {
		return nil, err
	}
	where := req.GetStagingTargetPath()
	v.mu.Lock()
	if !strings.Contains(where, "/kubernetes.io/csi/volumeDevices/") && v.raw[where] {
		v.harm = append(v.harm, "the one around "+where)
	}
	v.mu.Unlock()
	return forward(ctx, request)
}

func (v *Vendors) publish(ctx context.Context, request []byte, forward passthrough.Forward) ([]byte, error) {
	req := &csi.NodePublishVolumeRequest{}
	if err := proto.Unmarshal(request, req); err != nil {
		return nil, err
	}
	if req.GetSecrets()["csi.storage.k8s.io/serviceAccount.tokens"] != "" {
		v.Tokens.Add(1)
	}
	access := req.GetVolumeCapability()
	if access.GetBlock() == nil || !req.GetReadonly() || !strings.HasSuffix(filepath.Dir(req.GetTargetPath()), "-") {
		return forward(ctx, request)
	}
	req.Readonly = false // the driver would make another device
	raw, err := proto.Marshal(req)
	if err != nil {
		return nil, err
	}
	reply, err := forward(ctx, raw)
	if err == nil {
		err = setReadOnly(req.GetTargetPath())
	}
	return reply, err
}

func setReadOnly(device string) (err error) {
	file, err := os.Open(device)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	return unix.IoctlSetPointerInt(int(file.Fd()), unix.BLKROSET, 1)
}
