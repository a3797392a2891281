package csidefer_test

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// wire sends a message over the wire, as a program with other protos sees it.
func wire(t testing.TB, from, to proto.Message) {
	t.Helper()
	check.Must(t, proto.Unmarshal(check.Value(proto.Marshal(from))(t), to))
}

// TestRequested also shows that the numbers are those of the overlay proto.
func TestRequested(t *testing.T) {
	publish := &csi.NodePublishVolumeRequest{VolumeId: "v", Readonly: true}
	unpublish := &csi.NodeUnpublishVolumeRequest{VolumeId: "v"}
	stats := &csi.NodeGetVolumeStatsRequest{VolumeId: "v"}
	expand := &csi.NodeExpandVolumeRequest{VolumeId: "v"}
	check.That(t, !csidefer.Requested(publish) && !csidefer.Requested(unpublish) && !csidefer.Requested(stats) && !csidefer.Requested(expand),
		"requested before it was")
	var none *csi.NodePublishVolumeRequest
	check.That(t, !csidefer.Requested(none), "nil asks for deferral")
	for range 2 { // the second time changes nothing
		csidefer.SetRequested(publish)
		csidefer.SetRequested(unpublish)
		csidefer.SetRequested(stats)
		csidefer.SetRequested(expand)
	}
	check.That(t, csidefer.Requested(publish) && csidefer.Requested(unpublish) && csidefer.Requested(stats) && csidefer.Requested(expand),
		"not requested after it was")
	check.Equal(t, len(publish.ProtoReflect().GetUnknown()), 2, "bytes of the field")
	type overlay interface {
		proto.Message
		GetDeferFsOps() bool
	}
	for from, to := range map[proto.Message]overlay{
		publish: &csiv1.NodePublishVolumeRequestFields{}, unpublish: &csiv1.NodeUnpublishVolumeRequestFields{},
		stats: &csiv1.NodeGetVolumeStatsRequestFields{}, expand: &csiv1.NodeExpandVolumeRequestFields{},
	} {
		wire(t, from, to)
		check.That(t, to.GetDeferFsOps(), "%T: not read by the overlay", from)
	}
	check.That(t, publish.GetVolumeId() == "v" && publish.GetReadonly(), "other fields changed")
}

func TestRespond(t *testing.T) {
	reply := &csi.NodePublishVolumeResponse{}
	_, given, err := csidefer.DeferredMount(reply)
	check.That(t, !given && err == nil, "empty answer: given %v, %v", given, err)
	csidefer.Respond(reply, csidefer.Mount{Device: "/dev/old", FSType: "xfs", Flags: []string{"sync"}})
	csidefer.Respond(reply, csidefer.Mount{Device: "/dev/loop3", FSType: "ext4", Flags: []string{"noatime", "discard"}})
	received := &csi.NodePublishVolumeResponse{}
	wire(t, reply, received)
	got, given, err := csidefer.DeferredMount(received)
	want := &csiv1.DeferredMount{
		VolumeType:        &runtimev1.VolumeType{Type: runtimev1.VolumeType_BLOCK},
		VolumeBackingPath: "/dev/loop3", FsType: "ext4", MountFlags: []string{"noatime", "discard"},
	}
	diff := cmp.Diff(want, got, protocmp.Transform())
	check.That(t, diff == "" && given && err == nil, "given %v, %v, -want +got:\n%s", given, err, diff)
	csidefer.StripDeferredMount(received)
	_, given, _ = csidefer.DeferredMount(received)
	check.That(t, !given, "it is still there")
	check.Equal(t, len(received.ProtoReflect().GetUnknown()), 0, "bytes are left")
}

func TestFieldsOfOthersStay(t *testing.T) {
	foreign := protowire.AppendString(protowire.AppendTag(nil, 2000, protowire.BytesType), "of a vendor")
	reply := &csi.NodePublishVolumeResponse{}
	reply.ProtoReflect().SetUnknown(foreign)
	csidefer.Respond(reply, csidefer.Mount{Device: "/dev/a", FSType: "ext4"})
	csidefer.StripDeferredMount(reply)
	check.Same(t, cmp.Diff(foreign, []byte(reply.ProtoReflect().GetUnknown())), "-want +got")
}

func TestMalformedMountIsAnError(t *testing.T) {
	bad := map[string][]byte{
		"cut short":     {0x12, 0xff},
		"not a message": []byte("hello there"),
		"not UTF-8":     protowire.AppendString(protowire.AppendTag(nil, 2, protowire.BytesType), "\xff\xfe"),
	}
	for name, inner := range bad {
		reply := &csi.NodePublishVolumeResponse{}
		reply.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 1000, protowire.BytesType), inner))
		_, given, err := csidefer.DeferredMount(reply)
		check.That(t, err != nil && !given, "%s: given %v, %v", name, given, err)
	}
	reply := &csi.NodePublishVolumeResponse{}
	csidefer.Respond(reply, csidefer.Mount{Device: "/dev/\xff", FSType: "ext4"})
	_, _, err := csidefer.DeferredMount(reply)
	check.That(t, err != nil, "a path that is not UTF-8 was lost in silence")
}

func mountCapability() *csi.VolumeCapability {
	return &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}}}
}

func TestGroup(t *testing.T) {
	capability := mountCapability()
	csidefer.SetGroup(capability, "1", "Always")
	csidefer.SetGroup(capability, "2000", "OnRootMismatch")
	received := &csi.VolumeCapability{}
	wire(t, capability, received)
	group, policy, err := csidefer.Group(received)
	check.That(t, group == "2000" && policy == "OnRootMismatch" && err == nil, "%q, %q, %v", group, policy, err)
	csidefer.SetGroup(received, "", "")
	check.Equal(t, len(received.GetMount().ProtoReflect().GetUnknown()), 0, "bytes are left")
	block := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
	csidefer.SetGroup(block, "1", "")
	group, policy, err = csidefer.Group(block)
	check.That(t, group == "" && policy == "" && err == nil, "block: %q, %q, %v", group, policy, err)
	capability.GetMount().ProtoReflect().SetUnknown(protowire.AppendString(protowire.AppendTag(nil, 4, protowire.BytesType), "\xff"))
	_, _, err = csidefer.Group(capability)
	check.That(t, err != nil, "a group that is not UTF-8 is no error")
}

// FuzzReaders feeds bytes that only need to be a protobuf message.
func FuzzReaders(f *testing.F) {
	good := &csi.NodePublishVolumeResponse{}
	csidefer.Respond(good, csidefer.Mount{Device: "/dev/a", FSType: "ext4", Flags: []string{"a", ""}})
	f.Add([]byte(good.ProtoReflect().GetUnknown()))
	f.Add([]byte{0x48, 0x01})
	f.Add([]byte{0x4b, 0x4c, 0x22, 0x01, 'x'})
	f.Add([]byte{0x48, 0x00, 0x48, 0x02}) // of two the last one counts
	f.Add([]byte{0x48, 0x01, 0x48, 0x00})
	other := &csi.NodePublishVolumeResponse{}
	csidefer.Respond(other, csidefer.Mount{Device: "/dev/b", Flags: []string{"y"}})
	f.Add(append([]byte(good.ProtoReflect().GetUnknown()), other.ProtoReflect().GetUnknown()...)) // two are merged
	f.Fuzz(func(t *testing.T, raw []byte) {
		reply := &csi.NodePublishVolumeResponse{}
		if proto.Unmarshal(raw, reply) != nil {
			reply.ProtoReflect().SetUnknown(raw) // even what no library would keep
		} else {
			sameAsOverlay(t, raw, reply)
		}
		csidefer.StripDeferredMount(reply)
		_, given, err := csidefer.DeferredMount(reply)
		check.That(t, !given, "stripped and still given (%v)", err)
		capability := mountCapability()
		capability.GetMount().ProtoReflect().SetUnknown(raw)
		_, _, _ = csidefer.Group(capability)
	})
}

// sameAsOverlay compares our readers with what protobuf itself reads.
func sameAsOverlay(t *testing.T, raw []byte, reply *csi.NodePublishVolumeResponse) {
	want := &csiv1.NodePublishVolumeResponseFields{}
	wantErr := proto.Unmarshal(raw, want)
	got, given, err := csidefer.DeferredMount(reply)
	check.Require(t, (err != nil) == (wantErr != nil), "read with %v, protobuf with %v", err, wantErr)
	check.That(t, err != nil || given == (want.GetDeferredMount() != nil) && proto.Equal(got, want.GetDeferredMount()),
		"read %v, protobuf %v", got, want.GetDeferredMount())
	req, asked := &csi.NodePublishVolumeRequest{}, &csiv1.NodePublishVolumeRequestFields{}
	check.That(t, proto.Unmarshal(raw, req) != nil || proto.Unmarshal(raw, asked) != nil || csidefer.Requested(req) == asked.GetDeferFsOps(),
		"requested %v, protobuf %v", csidefer.Requested(req), asked.GetDeferFsOps())
}

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
