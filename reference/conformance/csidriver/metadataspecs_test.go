package csidriver

import (
	"bytes"
	"context"
	"errors"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/reference/conformance"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

// fake is a driver whose volumes are plain files, with one fault, or none.
type fake struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
	csi.UnimplementedSnapshotMetadataServer
	dir       string
	fault     fault
	snapshots map[string]*taken
}

type taken struct {
	volume  string
	number  int
	content []byte
}

// fault is what a driver does wrong.
type fault struct {
	notAdvertised bool
	ignoresOffset bool
	ignoresMost   bool
	// answer changes a message before it is sent, which is the nth.
	answer func(n int, m *csi.GetMetadataDeltaResponse)
	// code changes the code of an error.
	code func(codes.Code) codes.Code
	// anyBase: no base is refused.
	anyBase bool
	// noGrowth: what is beyond the end of the base is not looked at.
	noGrowth bool
	// neverGrows: EXPAND_VOLUME is reported, and no volume grows.
	neverGrows bool
}

func (f *fake) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	reply := &csi.GetPluginCapabilitiesResponse{}
	if !f.fault.notAdvertised {
		reply.Capabilities = []*csi.PluginCapability{{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{
			Type: csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE,
		}}}}
	}
	return reply, nil
}

func (f *fake) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: []*csi.ControllerServiceCapability{{
		Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: csi.ControllerServiceCapability_RPC_EXPAND_VOLUME}},
	}}}, nil
}

func (f *fake) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return &csi.NodeGetCapabilitiesResponse{}, nil
}

func (f *fake) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "n"}, nil
}

func (f *fake) CreateVolume(_ context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	id := req.GetName()
	size := req.GetCapacityRange().GetRequiredBytes()
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: id, CapacityBytes: size}},
		os.WriteFile(f.dir+"/"+id, make([]byte, size), 0o600)
}

func (f *fake) DeleteVolume(_ context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return &csi.DeleteVolumeResponse{}, os.Remove(f.dir + "/" + req.GetVolumeId())
}

func (f *fake) ControllerExpandVolume(_ context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	size := req.GetCapacityRange().GetRequiredBytes()
	if f.fault.neverGrows {
		return nil, f.fail(codes.Internal)
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: size}, os.Truncate(f.dir+"/"+req.GetVolumeId(), size)
}

func (f *fake) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	return &csi.NodePublishVolumeResponse{}, os.Symlink(f.dir+"/"+req.GetVolumeId(), req.GetTargetPath())
}

func (f *fake) NodeUnpublishVolume(_ context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, os.Remove(req.GetTargetPath())
}

func (f *fake) CreateSnapshot(_ context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	content, err := os.ReadFile(f.dir + "/" + req.GetSourceVolumeId())
	f.snapshots[req.GetName()] = &taken{req.GetSourceVolumeId(), len(f.snapshots), content}
	return &csi.CreateSnapshotResponse{Snapshot: &csi.Snapshot{SnapshotId: req.GetName(), ReadyToUse: true}}, err
}

func (f *fake) DeleteSnapshot(_ context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	delete(f.snapshots, req.GetSnapshotId())
	return &csi.DeleteSnapshotResponse{}, nil
}

func (f *fake) fail(code codes.Code) error {
	if f.fault.code != nil {
		code = f.fault.code(code)
	}
	return status.Error(code, "refused")
}

func (f *fake) find(id string) (*taken, error) {
	if id == "" {
		return nil, f.fail(codes.InvalidArgument)
	}
	if f.snapshots[id] == nil {
		return nil, f.fail(codes.NotFound)
	}
	return f.snapshots[id], nil
}

func (f *fake) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	target, err := f.find(req.GetSnapshotId())
	if err != nil {
		return err
	}
	return f.stream(make([]byte, len(target.content)), target.content, req, func(m *csi.GetMetadataDeltaResponse) error {
		return stream.Send(&csi.GetMetadataAllocatedResponse{
			BlockMetadataType: m.GetBlockMetadataType(), VolumeCapacityBytes: m.GetVolumeCapacityBytes(), BlockMetadata: m.GetBlockMetadata(),
		})
	})
}

func (f *fake) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	base, err := f.find(req.GetBaseSnapshotId())
	if err != nil {
		return err
	}
	target, err := f.find(req.GetTargetSnapshotId())
	if err != nil {
		return err
	}
	if !f.fault.anyBase && (base.volume != target.volume || base.number >= target.number) {
		return f.fail(codes.InvalidArgument)
	}
	before := slices.Clone(base.content)
	if more := len(target.content) - len(before); more > 0 && f.fault.noGrowth {
		before = append(before, target.content[len(before):]...)
	} else if more > 0 {
		before = append(before, make([]byte, more)...)
	}
	return f.stream(before, target.content, req, stream.Send)
}

func (f *fake) stream(before, after []byte, req interface {
	GetStartingOffset() int64
	GetMaxResults() int32
}, send func(*csi.GetMetadataDeltaResponse) error,
) error {
	from, most := req.GetStartingOffset(), int(req.GetMaxResults())
	if from < 0 || from > int64(len(after)) {
		return f.fail(codes.OutOfRange)
	}
	if f.fault.ignoresOffset {
		from = 0
	}
	if most == 0 || f.fault.ignoresMost {
		most = math.MaxInt
	}
	n := 0
	m := &csi.GetMetadataDeltaResponse{BlockMetadataType: csi.BlockMetadataType_FIXED_LENGTH, VolumeCapacityBytes: int64(len(after))}
	flush := func() error {
		if f.fault.answer != nil {
			f.fault.answer(n, m)
		}
		err := send(m)
		n++
		m = &csi.GetMetadataDeltaResponse{BlockMetadataType: csi.BlockMetadataType_FIXED_LENGTH, VolumeCapacityBytes: int64(len(after))}
		return err
	}
	for at := from / block * block; at < int64(len(after)); at += block {
		if bytes.Equal(before[at:at+block], after[at:at+block]) {
			continue
		}
		if m.BlockMetadata = append(m.BlockMetadata, &csi.BlockMetadata{ByteOffset: at, SizeBytes: block}); len(m.BlockMetadata) == most {
			if err := flush(); err != nil {
				return err
			}
		}
	}
	return flush()
}

// try runs the suite against a fake, and gives what failed.
func try(t *testing.T, with fault) (failed []string) {
	t.Helper()
	f := &fake{dir: t.TempDir(), fault: with, snapshots: make(map[string]*taken)}
	socket := f.dir + "/s"
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, f)
	csi.RegisterControllerServer(server, f)
	csi.RegisterNodeServer(server, f)
	csi.RegisterSnapshotMetadataServer(server, f)
	defer rpctest.Serve(t, socket, server)()
	var out, errs bytes.Buffer
	code := Main("snapshot-metadata", []string{"--csi-endpoint", socket, "--size", "1048576", "--dir", f.dir}, &out, &errs)
	for line := range strings.Lines(out.String()) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == string(conformance.Fail) {
			failed = append(failed, words[1])
		}
	}
	check.That(t, code == min(1, len(failed)), "code %d\n%s%s", code, &out, &errs)
	left, err := os.ReadDir(f.dir) // the socket
	check.That(t, err == nil && len(left) == 1 && len(f.snapshots) == 0, "left: %v, %v, %v", left, f.snapshots, err)
	return failed
}

func TestARightDriverPasses(t *testing.T) {
	check.Empty(t, try(t, fault{}), "failed")
}

// TestEachFaultIsFound, by the demand that names it.
func TestEachFaultIsFound(t *testing.T) {
	instead := func(of, other codes.Code) func(codes.Code) codes.Code {
		return func(code codes.Code) codes.Code {
			if code == of {
				return other
			}
			return code
		}
	}
	for name, c := range map[string]struct {
		fault fault
		finds []string
	}{
		"not advertised": {fault{notAdvertised: true}, []string{"advertised"}},
		"a block is left out": {fault{answer: func(_ int, m *csi.GetMetadataDeltaResponse) {
			m.BlockMetadata = slices.DeleteFunc(m.BlockMetadata, func(b *csi.BlockMetadata) bool { return b.ByteOffset == 1<<20/8 })
		}}, []string{"allocated", "delta", "max-results", "offset", "resume", "grown"}},
		"in the wrong order": {fault{answer: func(_ int, m *csi.GetMetadataDeltaResponse) { slices.Reverse(m.BlockMetadata) }}, []string{"order"}},
		"the same again": {fault{answer: func(_ int, m *csi.GetMetadataDeltaResponse) {
			m.BlockMetadata = slices.Repeat(m.BlockMetadata, 2)
		}}, []string{"order", "max-results"}},
		"an empty tuple": {fault{answer: func(_ int, m *csi.GetMetadataDeltaResponse) {
			if n := len(m.BlockMetadata); n > 1 {
				m.BlockMetadataType = csi.BlockMetadataType_VARIABLE_LENGTH
				m.BlockMetadata = append(m.BlockMetadata, &csi.BlockMetadata{ByteOffset: m.BlockMetadata[n-1].ByteOffset + block})
			}
		}}, []string{"order", "max-results"}},
		"types change": {fault{answer: func(n int, m *csi.GetMetadataDeltaResponse) {
			m.BlockMetadataType = csi.BlockMetadataType(1 + n%2)
		}}, []string{"type"}},
		"no type": {fault{answer: func(_ int, m *csi.GetMetadataDeltaResponse) { m.BlockMetadataType = 0 }}, []string{"type"}},
		"fixed length changes": {fault{answer: func(_ int, m *csi.GetMetadataDeltaResponse) {
			if len(m.BlockMetadata) > 0 {
				if first := m.BlockMetadata[0]; first.ByteOffset == 0 {
					first.SizeBytes = 2 * block
				}
			}
		}}, []string{"type"}},
		"capacities change": {fault{answer: func(n int, m *csi.GetMetadataDeltaResponse) { m.VolumeCapacityBytes += int64(n) }}, []string{"capacity"}},
		"beyond the end": {fault{answer: func(_ int, m *csi.GetMetadataDeltaResponse) {
			m.BlockMetadataType = csi.BlockMetadataType_VARIABLE_LENGTH
			for _, one := range m.BlockMetadata {
				if one.ByteOffset == 1<<20-block {
					one.SizeBytes += block
				}
			}
		}}, []string{"capacity"}},
		"max_results is ignored":  {fault{ignoresMost: true}, []string{"max-results"}},
		"the offset is ignored":   {fault{ignoresOffset: true}, []string{"offset"}},
		"any offset":              {fault{code: instead(codes.OutOfRange, codes.InvalidArgument)}, []string{"offset-beyond"}},
		"unknown is invalid":      {fault{code: instead(codes.NotFound, codes.InvalidArgument)}, []string{"unknown"}},
		"missing is not found":    {fault{code: instead(codes.InvalidArgument, codes.NotFound)}, []string{"missing", "other-volume", "newer-base"}},
		"any base is good":        {fault{anyBase: true}, []string{"other-volume", "newer-base"}},
		"growth is not looked at": {fault{noGrowth: true}, []string{"grown"}},
		"volumes do not grow":     {fault{neverGrows: true}, []string{"grown"}},
	} {
		t.Run(name, func(t *testing.T) { check.Same(t, cmp.Diff(c.finds, try(t, c.fault)), "-want +got") })
	}
}

// mute is a driver that answers nothing, and never answers one call.
type mute struct{ never string }

func (m mute) Invoke(ctx context.Context, method string, _, _ any, _ ...grpc.CallOption) error {
	if !strings.HasSuffix(method, m.never) {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

func (mute) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, errors.New("unexpected")
}

// TestADriverThatHangs hangs nothing, also before there is a volume to look at.
func TestADriverThatHangs(t *testing.T) {
	dir := t.TempDir()
	for _, call := range []string{"NodeGetInfo", "CreateVolume", "NodeUnpublishVolume"} {
		synctest.Test(t, func(t *testing.T) {
			_, err := RunMetadata(t.Context(), mute{call}, Options{Dir: dir, Size: leastSize}, nil)
			check.That(t, errors.Is(err, context.DeadlineExceeded), "%s: %v", call, err)
		})
	}
}

func TestUsage(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"--help", 0, "Usage:"}, {"", 2, "--csi-endpoint"}, {"--csi-endpoint /s --size 1", 2, "--size"}, {"--csi-endpoint /s x", 2, `"x"`},
		{"--csi-endpoint /does/not/exist", 1, "GetPluginCapabilities"},
	} {
		for word := range suites() {
			var out bytes.Buffer
			code := Main(word, strings.Fields(c.args), &out, &out)
			check.That(t, code == c.code && strings.Contains(out.String(), c.says), "%s %q: code %d\n%s", word, c.args, code, &out)
		}
	}
}
