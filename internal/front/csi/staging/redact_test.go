package staging

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/redact"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestDetailsOfADriversError may hold a secret in any form: they are kept where there is none.
func TestDetailsOfADriversError(t *testing.T) {
	err := check.Value(status.New(codes.Internal, "no").WithDetails(&csi.Topology{}))(t)
	for secret, want := range map[string]int{"": 1, "hunter2": 0} {
		secrets := map[string]string{"password": secret}
		maps.DeleteFunc(secrets, func(_, value string) bool { return value == "" })
		got := status.Convert((&Driver{Name: "d"}).Error("asked", err.Err(), secrets))
		check.That(t, len(got.Details()) == want && got.Code() == codes.Internal, "with the secret %q: %v", secret, got.Details())
	}
}

// TestMountOptionsWithSecrets: what a record keeps no option for, no error repeats.
func TestMountOptionsWithSecrets(t *testing.T) {
	req := withFlags("noatime", "vers=3,password=hunter2,x", "auth_token=a,b", "secret=c=,d")
	err := (&Driver{Name: "d"}).Error("asked", status.Error(codes.Internal, "mount -o noatime,vers=3,password=hunter2,x,auth_token=a,b,secret=c=,d /dev/x: exit 32"), SecretsOf(req))
	text := status.Convert(err).Message()
	check.That(t, !strings.Contains(text, "hunter2") && !strings.Contains(text, "a,b") && !strings.Contains(text, "c=,d") && strings.Contains(text, "noatime,vers=3"),
		"got %q", text)
}

// TestSecretsAreBounded: who may create a PersistentVolume cannot have the daemon make gigabytes of forms of its
// mount options. An error with more secrets than are searched for has nothing of the driver's text.
func TestSecretsAreBounded(t *testing.T) {
	for name, req := range map[string]*csi.NodeStageVolumeRequest{
		"one flag":     withFlags(strings.Repeat("key=", 2<<10)),
		"a long flag":  withFlags("key=" + strings.Repeat("x", redact.MostBytes+1)),
		"many flags":   withFlags(slices.Repeat([]string{"key=,"}, redact.MostValues)...),
		"many secrets": {Secrets: map[string]string{"bundle": strings.Repeat("a-line-of-it\n", redact.MostBytes/10)}},
	} {
		t.Run(name, func(t *testing.T) {
			secrets := SecretsOf(req)
			check.That(t, len(secrets) <= redact.MostValues+2, "%d values are to be searched for", len(secrets))
			err := status.Error(codes.Internal, "no such key=x")
			got := status.Convert((&Driver{Name: "d"}).Error("asked", err, secrets))
			check.That(t, got.Code() == codes.Internal && got.Message() == "driver d, asked: "+redact.Whole, "got %v", got)
		})
	}
}

// TestManyMountFlags: what looks for secrets in each of half a million flags must allocate nothing for one.
func TestManyMountFlags(t *testing.T) {
	req := withFlags(make([]string, 10_000)...)
	n := testing.AllocsPerRun(1, func() { newStage(req, "") })
	check.That(t, n <= 100, "%v allocations", n)
}

func withFlags(flags ...string) *csi.NodeStageVolumeRequest {
	mount := &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}}
	return &csi.NodeStageVolumeRequest{VolumeCapability: &csi.VolumeCapability{AccessType: mount}}
}
