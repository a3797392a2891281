//go:build system

package daemon

import (
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// strangerEnv makes the test binary play a program of another user: it holds the sockets to call.
const strangerEnv = "CRUST_TEST_STRANGER"

func TestUIDOutsideTheSetIsRefused(t *testing.T) {
	d := rig.NewDaemon(t)
	// The group may connect, so that it is crust-proxy which has to refuse.
	d.SocketOptions = `, mode: "0660", group: "65534"`
	d.Start()
	check.Must(t, os.Chmod(d.Dir+"/run", 0o755)) //nolint:gosec // the stranger must reach the sockets
	self := check.Value(os.ReadFile("/proc/self/exe"))(t)
	stranger := d.Dir + "/stranger"
	check.Must(t, os.WriteFile(stranger, self, 0o755)) //nolint:gosec // another user runs it
	cmd := exec.Command(stranger, "-test.run=TestStranger", "-test.v")
	cmd.Env = append(os.Environ(), strangerEnv+"="+d.RuntimeSocket+","+d.AdminSocket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	check.Require(t, err == nil && strings.Contains(string(out), "--- PASS: TestStranger"), "%v\n%s", err, out)
	body, err := d.HTTP("/metrics")
	check.That(t, err == nil && strings.Contains(body, "crust_proxy"), "metrics: %v", err)
	check.Must(t, check.Err(d.Runtime().RuntimeUnstageVolume(t.Context(), &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: d.Target("pod-1")}))) // or root is refused too
}

// TestStranger is run by the test above with another uid.
func TestStranger(t *testing.T) {
	sockets := os.Getenv(strangerEnv)
	if sockets == "" {
		t.Log("run by TestUIDOutsideTheSetIsRefused only")
		return
	}
	runtimeSocket, adminSocket, _ := strings.Cut(sockets, ",")
	ctx := check.Within(t, 10*time.Second)
	stage := check.Err(runtimev1.NewRuntimeClient(rpctest.Dial(t, runtimeSocket)).RuntimeStageVolume(ctx, &runtimev1.RuntimeStageVolumeRequest{}))
	check.Code(t, stage, codes.PermissionDenied, "12345", "authorization")
	check.Code(t, check.Err(adminv1.NewAdminClient(rpctest.Dial(t, adminSocket)).ListVolumes(ctx, &adminv1.ListVolumesRequest{})), codes.PermissionDenied)
	stream := check.Value(adminv1.NewAdminClient(rpctest.Dial(t, adminSocket)).WatchVolumes(ctx, &adminv1.WatchVolumesRequest{}))(t)
	check.Code(t, check.Err(stream.Recv()), codes.PermissionDenied)
	check.Code(t, check.Err(healthv1.NewHealthClient(rpctest.Dial(t, runtimeSocket)).Check(ctx, &healthv1.HealthCheckRequest{})), codes.PermissionDenied)
}
