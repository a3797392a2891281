//go:build system

package daemon

import (
	"context"
	"net"
	"os"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// sandboxID is the id of a sandbox as containerd and CRI-O make it.
var sandboxID = strings.Repeat("5a", 32)

// containerRuntime lists the sandboxes that a test wants it to.
type containerRuntime struct {
	runtimeapi.UnimplementedRuntimeServiceServer
	mu   sync.Mutex
	pods map[string]string // by sandbox
	away bool
}

// followed starts a daemon that follows a container runtime with one sandbox.
func followed(t *testing.T, pod string, env ...string) (*rig.Daemon, *containerRuntime) {
	t.Helper()
	d, r := rig.NewDaemon(t), &containerRuntime{pods: map[string]string{sandboxID: pod}}
	short, err := os.MkdirTemp("/tmp", "k") // the id is long, and the path of a socket is not
	check.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(short) })
	d.GoSandboxes = short
	listener, err := net.Listen("unix", d.Dir+"/cri.sock")
	check.Must(t, err)
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, r)
	var served sync.WaitGroup
	served.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() { server.Stop(); served.Wait() })
	d.Extra = "cri: {socket: " + d.Dir + "/cri.sock}"
	d.Start(env...)
	return d, r
}

func (r *containerRuntime) list(pods map[string]string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pods = pods
}

func (r *containerRuntime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{RuntimeName: "containerd", RuntimeVersion: "1.7.0"}, nil
}

func (r *containerRuntime) ListPodSandbox(context.Context, *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.away {
		return nil, context.DeadlineExceeded
	}
	reply := &runtimeapi.ListPodSandboxResponse{}
	for id, pod := range r.pods {
		reply.Items = append(reply.Items, &runtimeapi.PodSandbox{
			Id: id, Metadata: &runtimeapi.PodSandboxMetadata{Uid: pod}, State: runtimeapi.PodSandboxState_SANDBOX_READY,
		})
	}
	return reply, nil
}

func (r *containerRuntime) ListContainers(context.Context, *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	return &runtimeapi.ListContainersResponse{}, nil
}

// forget has the container runtime forget all sandboxes, and waits until the daemon has heard of it.
func (r *containerRuntime) forget(t *testing.T, d *rig.Daemon, target string) {
	t.Helper()
	r.list(nil)
	check.Eventually(t, "the sandbox is not bound", func() bool { return shown(t, d, target).GetSandbox().GetId() == "" })
}

// startShim has a shim that has a volume, and waits until the daemon knows.
func startShim(t *testing.T, d *rig.Daemon, target string) *kata.Shim {
	t.Helper()
	shim := boot(t, d, sandboxID, target, "", "/")
	check.Eventually(t, "bound", func() bool { return shown(t, d, target).GetSandbox().GetId() == sandboxID })
	return shim
}

// TestForgottenShim is a shim that the container runtime forgot, as when it is killed while it makes a
// sandbox: the shim answers for ever, and nobody has the device.
func TestForgottenShim(t *testing.T) {
	for _, step := range []string{"", "unstage-withdrawn", "unstage-disowned"} {
		t.Run("killed at "+step, func(t *testing.T) {
			var env []string
			if step != "" {
				env = []string{"CRUST_FAILPOINTS=" + step + "=kill"}
			}
			d, cri := followed(t, "pod-1", env...)
			disk := rig.Disk(t, 16*mib, "ext4")
			req := d.StageRequest("pod-1", disk, "ro")
			stage(t, d, req)
			startShim(t, d, req.GetVolumeTargetPath())

			// A half-made sandbox that the container runtime goes on listing may be about to use it.
			_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
			check.Code(t, err, codes.Aborted)
			wantLeaving(t, d, req, "the sandbox "+sandboxID+" has not ended", "crictl stopp")
			wantStaged(t, d, req, disk)

			cri.forget(t, d, req.GetVolumeTargetPath())
			if step != "" {
				_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
				diedAt(t, d, err)
				d.Start()
				wantStaged(t, d, req, disk)
				check.Eventually(t, "the container runtime is followed", func() bool {
					_, err = d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
					return err == nil
				})
			}
			unstage(t, d, req)
			wantGone(t, d, disk)
			next := d.StageRequest("pod-2", disk)
			stage(t, d, next)
			unstage(t, d, next)
		})
	}
}

// TestForgottenShimOfARuntimeThatIsAway may be one of a living sandbox.
func TestForgottenShimOfARuntimeThatIsAway(t *testing.T) {
	d, cri := followed(t, "pod-1")
	disk := rig.Disk(t, 16*mib, "ext4")
	req := d.StageRequest("pod-1", disk, "ro")
	stage(t, d, req)
	startShim(t, d, req.GetVolumeTargetPath())
	cri.forget(t, d, req.GetVolumeTargetPath())
	cri.mu.Lock()
	cri.away = true
	cri.mu.Unlock()
	_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
	check.Code(t, err, codes.Aborted)
	wantLeaving(t, d, req, sandboxID)
	wantStaged(t, d, req, disk)
	stage(t, d, req) // it has a user again
	if state := shown(t, d, req.GetVolumeTargetPath()).GetState(); state == adminv1.VolumeState_VOLUME_STATE_REMOVING {
		t.Errorf("a volume that was staged again is %v", state)
	}
}

// wantLeaving wants a refused release to be shown at once.
func wantLeaving(t *testing.T, d *rig.Daemon, req *runtimev1.RuntimeStageVolumeRequest, texts ...string) {
	t.Helper()
	v := shown(t, d, req.GetVolumeTargetPath())
	if v.GetState() != adminv1.VolumeState_VOLUME_STATE_REMOVING || v.GetLastErrorAt() == nil {
		t.Errorf("a volume whose release was refused is %v since %v", v.GetState(), v.GetLastErrorAt())
	}
	for _, text := range texts {
		if !strings.Contains(v.GetLastError(), text) {
			t.Errorf("the last error does not say %q: %s", text, v.GetLastError())
		}
	}
}
