package csi

import (
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/passthrough"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestDriversWordsOnOtherVolumes is a driver that repeats a secret in its error on a volume
// that is not deferred. kubelet gets these words as they are; nobody else does.
func TestDriversWordsOnOtherVolumes(t *testing.T) {
	const secret = "s3cr3t-value"
	core, logged := observer.New(zap.DebugLevel)
	r := newRig(t, &policy.Policy{})
	r.calls = &telemetry.Interceptors{
		Log: zap.New(core), Metrics: telemetry.NewMetrics("test"),
		Front: &telemetry.Front{Driver: driverName, Known: passthrough.UnaryMethods(), Ours: Answered()},
	}
	r.restart()
	r.askCapabilities()
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	failed := status.Error(codes.Internal, "mount -o password="+secret+" failed")
	for _, method := range []string{"stage-mount", "publish-mount", "expand-mount"} {
		r.driver.fail(method, failed)
	}
	stage, publish := r.stageReq(), r.publishReq("p1")
	stage.Secrets = map[string]string{"password": secret}
	publish.Secrets = stage.Secrets
	r.refused(r.tryStage(stage), codes.Internal, secret)
	_, err := r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.Internal, secret)
	_, err = r.kubelet.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
		VolumeId: "vol-1", VolumePath: r.target("p1"), VolumeCapability: publish.VolumeCapability, Secrets: stage.Secrets,
	})
	r.refused(err, codes.Internal, secret)

	// A driver that calls the Runtime API has the volume on record, and mounts another.
	r.broker.volumes[r.target("p1")] = &volume.Volume{Key: volume.KeyOf(r.target("p1")), Target: r.target("p1")}
	_, err = r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.Aborted, "[redacted]")
	detailed, err := status.New(codes.Unavailable, "mount -o password="+secret+" failed").WithDetails(&csi.VolumeUsage{})
	r.ok(nil, err)
	r.driver.fail("publish-mount", detailed.Err())
	_, err = r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.Unavailable, "[redacted]")
	for name, text := range map[string]string{"log": fmt.Sprint(logged.All()), "refusals": fmt.Sprint(r.front.Refused())} {
		if text == "[]" || strings.Contains(text, secret) {
			t.Errorf("%s: %s", name, text)
		}
	}
}
