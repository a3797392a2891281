//go:build system

package driver_test

import (
	"context"
	"os"
	"os/exec"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	"github.com/crust-proxy/crust-proxy/reference/conformance"
	"github.com/crust-proxy/crust-proxy/reference/conformance/csidriver"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// runDeferral runs crust-conformance's suite against a socket, and returns what failed or was skipped.
func runDeferral(t *testing.T, socket, dir, fs string) (failed []string) {
	t.Helper()
	report, err := csidriver.RunDeferral(t.Context(), rig.Dial(t, socket), csidriver.Options{Size: size, FSType: fs, Dir: dir}, func(r conformance.Result) {
		if r.Status != conformance.Pass {
			t.Logf("%s %s: %s", r.Status, r.Name, r.Seen)
		}
	})
	if err != nil {
		t.Log(err) // what a wrong driver has left, the rig removes
	}
	for _, r := range report.Results {
		switch r.Status {
		case conformance.Fail:
			failed = append(failed, r.Name)
		case conformance.Skip:
			failed = append(failed, "skipped: "+r.Name)
		}
	}
	check.That(t, len(report.Results) == 15 && (err == nil || len(failed) != 0), "%+v, %v", report, err)
	return failed
}

// TestDeferralIsMetByTheReferenceDriver with each filesystem.
func TestDeferralIsMetByTheReferenceDriver(t *testing.T) {
	r := newDriver(t, true)
	for _, fs := range []string{"ext4", "xfs", "btrfs"} {
		check.Empty(t, runDeferral(t, r.socket(), r.dir, fs), "%s: failed", fs)
	}
}

// startExample starts the driver of examples/csi-driver.
func startExample(t *testing.T, dir, data, registry string) *rig.Process {
	t.Helper()
	program := t.TempDir() + "/csi-driver"
	check.Must(t, rig.BuildStatic(program, "examples/csi-driver"))
	p := &rig.Process{
		Name: "the example", Program: program, LogFile: dir + "/log",
		Args:  []string{"--endpoint", dir + "/csi.sock", "--data", data, "--registration", registry},
		Ready: func() error { _, err := os.Stat(dir + "/csi.sock"); return err },
	}
	t.Cleanup(p.Kill)
	check.Must(t, p.Start())
	return p
}

func TestDeferralIsMetByTheExample(t *testing.T) {
	r := layOut(t, "")
	startExample(t, r.dir, r.data+"/images", r.dir+"/registry.sock")
	for _, fs := range []string{"ext4", "xfs"} {
		check.Empty(t, runDeferral(t, r.dir+"/csi.sock", r.dir, fs), "%s: failed", fs)
	}
}

// wrong answers a call in place of the driver. call asks the driver.
func wrong[Req, Reply any, PReq interface {
	*Req
	proto.Message
}, PReply interface {
	*Reply
	proto.Message
}](answer func(req PReq, call func() (PReply, error)) (PReply, error)) passthrough.Local {
	return func(ctx context.Context, raw []byte, forward passthrough.Forward) ([]byte, error) {
		req := PReq(new(Req))
		if err := proto.Unmarshal(raw, req); err != nil {
			return nil, err
		}
		reply, err := answer(req, func() (PReply, error) {
			raw, err := proto.Marshal(req)
			if err == nil {
				raw, err = forward(ctx, raw)
			}
			reply := PReply(new(Reply))
			if err == nil {
				err = proto.Unmarshal(raw, reply)
			}
			return reply, err
		})
		if err != nil {
			return nil, err
		}
		return proto.Marshal(reply)
	}
}

const (
	info      = "/csi.v1.Node/NodeGetInfo"
	publish   = "/csi.v1.Node/NodePublishVolume"
	unpublish = "/csi.v1.Node/NodeUnpublishVolume"
)

// TestWrongDrivers: a driver that does one thing wrong fails the requirement that is about it.
func TestWrongDrivers(t *testing.T) {
	type publishCall = func() (*csi.NodePublishVolumeResponse, error)
	publishing := func(f func(*csi.NodePublishVolumeRequest, publishCall) (*csi.NodePublishVolumeResponse, error)) map[string]passthrough.Local {
		return map[string]passthrough.Local{publish: wrong(f)}
	}
	// deferred changes the answers to requests that ask to defer.
	deferred := func(change func(*csi.NodePublishVolumeRequest, *csiv1.DeferredMount)) map[string]passthrough.Local {
		return publishing(func(req *csi.NodePublishVolumeRequest, call publishCall) (*csi.NodePublishVolumeResponse, error) {
			reply, err := call()
			if mount, given, _ := csidefer.DeferredMount(reply); err == nil && given {
				change(req, mount)
				fields, _ := proto.Marshal(&csiv1.NodePublishVolumeResponseFields{DeferredMount: mount})
				reply.ProtoReflect().SetUnknown(fields)
			}
			return reply, err
		})
	}
	naming := func(fileSystems ...string) passthrough.Local {
		return wrong(func(_ *csi.NodeGetInfoRequest, call func() (*csi.NodeGetInfoResponse, error)) (*csi.NodeGetInfoResponse, error) {
			reply, err := call()
			fields, _ := proto.Marshal(&csiv1.NodeGetInfoResponseFields{SupportedFileSystems: fileSystems})
			reply.ProtoReflect().SetUnknown(fields)
			return reply, err
		})
	}
	ext4Only := publishing(func(req *csi.NodePublishVolumeRequest, call publishCall) (*csi.NodePublishVolumeResponse, error) {
		if req.GetVolumeCapability().GetMount().GetFsType() != "ext4" {
			return nil, status.Error(codes.InvalidArgument, "it makes ext4 only")
		}
		return call()
	})[publish]
	hide, _ := rig.Hide(csi.NodeServiceCapability_RPC_Type(csiv1.NodeCapability_NODE_CAPABILITY_DEFER_FS_OPS))
	elsewhere := t.TempDir()
	for name, wrongly := range map[string]struct {
		calls  map[string]passthrough.Local
		failed []string
	}{
		"reports nothing":           {map[string]passthrough.Local{"/csi.v1.Node/NodeGetCapabilities": hide}, []string{"reported"}},
		"names others":              {map[string]passthrough.Local{info: naming("zfs")}, []string{"filesystems", "other-fs"}},
		"cannot make what it names": {map[string]passthrough.Local{info: naming("ext4", "xfs"), publish: ext4Only}, []string{"other-fs"}},
		// These two do nothing wrong.
		"names the only one": {map[string]passthrough.Local{info: naming("ext4"), publish: ext4Only}, []string{"skipped: other-fs"}},
		"names none":         {map[string]passthrough.Local{info: naming(), publish: ext4Only}, nil},
		"drops the flags":    {deferred(func(_ *csi.NodePublishVolumeRequest, m *csiv1.DeferredMount) { m.MountFlags = nil }), []string{"answer"}},
		"names no type":      {deferred(func(_ *csi.NodePublishVolumeRequest, m *csiv1.DeferredMount) { m.VolumeType = nil }), []string{"answer"}},
		"minds the guard": {deferred(func(req *csi.NodePublishVolumeRequest, m *csiv1.DeferredMount) {
			if _, err := os.Lstat(req.GetTargetPath()); err == nil {
				m.FsType = ""
			}
		}), []string{"repeated"}},
		"makes the target": {deferred(func(req *csi.NodePublishVolumeRequest, _ *csiv1.DeferredMount) {
			_ = os.Mkdir(req.GetTargetPath(), 0o700)
		}), []string{"target"}},
		"mounts it": {map[string]passthrough.Local{
			publish: deferred(func(_ *csi.NodePublishVolumeRequest, m *csiv1.DeferredMount) {
				_ = unix.Mount(m.VolumeBackingPath, elsewhere, m.FsType, unix.MS_RDONLY, "noload")
			})[publish],
			unpublish: wrong(func(_ *csi.NodeUnpublishVolumeRequest, call func() (*csi.NodeUnpublishVolumeResponse, error)) (*csi.NodeUnpublishVolumeResponse, error) {
				_ = unix.Unmount(elsewhere, 0)
				return call()
			}),
		}, []string{"not-mounted", "repeated"}},
		"names a file": {deferred(func(_ *csi.NodePublishVolumeRequest, m *csiv1.DeferredMount) {
			raw, _ := exec.Command("head", "-c", "1M", m.VolumeBackingPath).Output()
			m.VolumeBackingPath = elsewhere + "/file"
			_ = os.WriteFile(m.VolumeBackingPath, raw, 0o600)
		}), []string{"device", "grown"}},
		"tells secrets": {deferred(func(req *csi.NodePublishVolumeRequest, m *csiv1.DeferredMount) {
			m.MountFlags = append(m.MountFlags, "password="+req.GetSecrets()["password"])
		}), []string{"secrets"}},
		"opens the device": {deferred(func(_ *csi.NodePublishVolumeRequest, m *csiv1.DeferredMount) {
			device, err := os.OpenFile(m.VolumeBackingPath, os.O_RDWR|unix.O_EXCL, 0)
			if err != nil {
				m.FsType = ""
			}
			_ = device.Close()
		}), []string{"repeated"}},
		"mounts what is there": {publishing(func(req *csi.NodePublishVolumeRequest, call publishCall) (*csi.NodePublishVolumeResponse, error) {
			if req.GetVolumeCapability().GetMount().GetFsType() == "xfs" {
				req.GetVolumeCapability().GetMount().FsType = "ext4"
			}
			return call()
		}), []string{"other-fs"}},
		"takes any name": {publishing(func(_ *csi.NodePublishVolumeRequest, call publishCall) (*csi.NodePublishVolumeResponse, error) {
			reply, err := call()
			if status.Code(err) == codes.InvalidArgument {
				err = status.Error(codes.Internal, "mkfs failed")
			}
			return reply, err
		}), []string{"unknown-fs"}},
		"grows the filesystem": {map[string]passthrough.Local{
			"/csi.v1.Node/NodeExpandVolume": wrong(func(_ *csi.NodeExpandVolumeRequest, call func() (*csi.NodeExpandVolumeResponse, error)) (*csi.NodeExpandVolumeResponse, error) {
				reply, err := call()
				for device := range rig.Loops(rig.Prefix("cd")) {
					_ = exec.Command("resize2fs", "-f", device).Run()
				}
				return reply, err
			}),
		}, []string{"grown"}},
		"clears the target": {map[string]passthrough.Local{
			unpublish: wrong(func(req *csi.NodeUnpublishVolumeRequest, call func() (*csi.NodeUnpublishVolumeResponse, error)) (*csi.NodeUnpublishVolumeResponse, error) {
				_ = unix.Unmount(req.GetTargetPath(), 0)
				return call()
			}),
		}, []string{"unpublish"}},
		"formats again": {deferred(func(_ *csi.NodePublishVolumeRequest, m *csiv1.DeferredMount) {
			_ = exec.Command("mkfs.ext4", "-qF", m.VolumeBackingPath).Run()
		}), []string{"kept"}},
		"always defers": {publishing(func(req *csi.NodePublishVolumeRequest, call publishCall) (*csi.NodePublishVolumeResponse, error) {
			csidefer.SetRequested(req)
			return call()
		}), []string{"not-asked"}},
		"unstages once": {map[string]passthrough.Local{"/csi.v1.Node/NodeUnstageVolume": func() passthrough.Local {
			times := 0
			return wrong(func(_ *csi.NodeUnstageVolumeRequest, call func() (*csi.NodeUnstageVolumeResponse, error)) (*csi.NodeUnstageVolumeResponse, error) {
				if times++; times == 2 {
					return nil, status.Error(codes.NotFound, "not staged")
				}
				return call()
			})
		}()}, []string{"unstage"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newDriver(t, true)
			r.leaves = true
			rig.Before(t, r.conn, r.dir+"/wrong.sock", wrongly.calls)
			check.Same(t, cmp.Diff(wrongly.failed, runDeferral(t, r.dir+"/wrong.sock", r.dir, "ext4")), "-want +got")
		})
	}
}
