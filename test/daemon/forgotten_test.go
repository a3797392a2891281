//go:build system

package daemon

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
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
	d.GoSandboxes = check.Value(os.MkdirTemp("/tmp", "k"))(t) // the id is long, and the path of a socket is not
	t.Cleanup(func() { _ = os.RemoveAll(d.GoSandboxes) })
	server := grpc.NewServer()
	runtimeapi.RegisterRuntimeServiceServer(server, r)
	rpctest.Serve(t, d.Dir+"/cri.sock", server)
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
	return &runtimeapi.VersionResponse{RuntimeName: "cri-o", RuntimeVersion: "1.34.1"}, nil
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
			t.Parallel()
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
			check.Code(t, check.Err(d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))), codes.Aborted)
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

// wantLeaving wants a refused release to be shown at once.
func wantLeaving(t *testing.T, d *rig.Daemon, req *runtimev1.RuntimeStageVolumeRequest, texts ...string) {
	t.Helper()
	v := shown(t, d, req.GetVolumeTargetPath())
	check.That(t, v.GetState() == adminv1.VolumeState_VOLUME_STATE_REMOVING && v.GetLastErrorAt() != nil,
		"a volume whose release was refused is %v since %v", v.GetState(), v.GetLastErrorAt())
	check.Says(t, "the last error", v.GetLastError(), texts...)
}

// holdIn has a process open a disk, in a control group and with a further argument.
func holdIn(t *testing.T, disk, group string, args ...string) *rig.Holder {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", `exec 3<>"$0"; echo open; read end`, disk}, args...)...)
	h := rig.HoldBy(t, cmd)
	if group == "" {
		return h
	}
	root := fmt.Sprintf("/crust-test-%d-%s-%s", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-"), filepath.Base(filepath.Dir(group)))
	check.Must(t, rig.MakeGroup(root))
	t.Cleanup(func() { h.End(); check.Must(t, rig.RemoveGroup(root)) })
	for path := root; path != root+group; {
		next, _, _ := strings.Cut(strings.TrimPrefix(root+group, path+"/"), "/")
		path += "/" + next
		check.Must(t, rig.MakeGroup(path))
	}
	for _, dir := range rig.GroupDirs(root + group) {
		check.Must(t, os.WriteFile(dir+"/cgroup.procs", []byte(fmt.Sprint(h.Process.Pid)), 0o600))
	}
	return h
}

// staged is a volume of pod-1 on a new disk.
func staged(t *testing.T, d *rig.Daemon) (disk string, req *runtimev1.RuntimeStageVolumeRequest) {
	t.Helper()
	disk = rig.Disk(t, 16*mib, "ext4")
	req = d.StageRequest("pod-1", disk)
	stage(t, d, req)
	return disk, req
}

// TestOrphansAreEnded has VMMs that outlived their shims: kubelet would end them with the pod's control
// group, and does that only after its volumes are unmounted.
func TestOrphansAreEnded(t *testing.T) {
	t.Parallel()
	d, cri := followed(t, "pod-1")
	disk, req := staged(t, d)
	shim := startShim(t, d, req.GetVolumeTargetPath())
	all := []*rig.Holder{
		holdIn(t, disk, "/kata_overhead/"+sandboxID),                     // of the Go runtime
		holdIn(t, disk, "/x.slice/cri-containerd-"+sandboxID+".scope"),   // systemd's
		holdIn(t, disk, "", "--api-socket=/run/vc/vm/"+sandboxID+"/clh"), // no group of its own
	}
	check.Must(t, shim.Kill())
	out, err := d.Crustctl("end", req.GetVolumeTargetPath(), "--yes").CombinedOutput()
	check.That(t, err != nil && strings.Contains(string(out), "lists Kata sandbox "+sandboxID), "the VM of a sandbox that is listed: %v\n%s", err, out)
	all = append(all, holdIn(t, disk, "/podpod-1/"+strings.Repeat("6b", 32))) // of an earlier sandbox of the pod
	cri.forget(t, d, req.GetVolumeTargetPath())

	// Too early: one that ends by itself is left alone.
	check.Code(t, check.Err(d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))), codes.Aborted)
	wantLeaving(t, d, req, "process ", "crustctl end")
	refused := check.Err(d.Runtime().RuntimeStageVolume(t.Context(), d.StageRequest("pod-2", disk)))
	check.Says(t, "the error of the next pod", fmt.Sprint(refused), "FailedPrecondition", "is still open in process ")
	check.Eventually(t, "released", func() bool {
		_, err = d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
		return err == nil
	})
	for _, vmm := range all {
		err := vmm.Wait()
		check.That(t, strings.Contains(fmt.Sprint(err), "killed"), "an orphan ended with %v", err)
	}
	n := metric(t, d, `crust_proxy_orphans_total{result="ok"}`)
	check.That(t, n == float64(len(all)) && strings.Contains(d.Log(), "an orphan that kept a volume was ended"), "%v orphans were counted and logged", n)
	wantGone(t, d, disk)
	check.Must(t, exec.Command("e2fsck", "-f", "-n", disk).Run())
	next := d.StageRequest("pod-2", disk)
	stage(t, d, next)
	unstage(t, d, next)
}

// TestOrphanOfARemovalIsEnded has a VMM that found its volume before the removal began, and takes the
// device after that.
func TestOrphanOfARemovalIsEnded(t *testing.T) {
	t.Parallel()
	d, cri := followed(t, "pod-1", "CRUST_FAILPOINTS=unstage-retracted=kill")
	disk, req := staged(t, d)
	shim := startShim(t, d, req.GetVolumeTargetPath())
	check.Must(t, shim.Kill())
	cri.forget(t, d, req.GetVolumeTargetPath())
	diedAt(t, d, check.Err(d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))))
	vmm := holdIn(t, disk, "/kata_overhead/"+sandboxID)
	d.Start()
	check.Eventually(t, "crustctl end knows the orphan", func() bool {
		out, _ := d.Crustctl("end", req.GetVolumeTargetPath()).CombinedOutput() // it has no terminal to ask at
		return strings.Contains(string(out), fmt.Sprintf("process %d", vmm.Process.Pid)) && strings.Contains(string(out), "its control group is")
	})
	check.Succeeds(t, "the release", func() error {
		_, err := d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))
		return err
	})
	err := vmm.Wait()
	check.That(t, strings.Contains(fmt.Sprint(err), "killed"), "the orphan ended with %v", err)
	wantGone(t, d, disk)
}

// TestVMBesideTheNextOne of a pod that stays, as after its shim was killed: no call of CSI comes with the next sandbox.
func TestVMBesideTheNextOne(t *testing.T) {
	t.Parallel()
	d, cri := followed(t, "pod-1")
	disk, req := staged(t, d)
	shim := startShim(t, d, req.GetVolumeTargetPath())
	vmm := holdIn(t, disk, "/kata_overhead/"+sandboxID)
	check.Must(t, shim.Kill())
	cri.forget(t, d, req.GetVolumeTargetPath())
	next := strings.Repeat("6b", 32)
	cri.list(map[string]string{next: "pod-1"})
	nextVMM := holdIn(t, disk, "/next/"+next)
	degraded := func() bool {
		_ = d.Crustctl("reconcile").Run() // it fails for the volume
		v := shown(t, d, req.GetVolumeTargetPath())
		return v.GetState() == adminv1.VolumeState_VOLUME_STATE_DEGRADED && strings.Contains(v.GetLastError(), fmt.Sprintf("process %d ", vmm.Process.Pid))
	}
	check.Eventually(t, "the volume is shown with its two VMs", degraded)
	check.That(t, vmm.Process.Signal(syscall.Signal(0)) == nil, "a VM that may just be ending was ended")
	check.Eventually(t, "the first VM is ended", func() bool { return !degraded() })
	check.Fails(t, vmm.Wait(), "killed")
	v := shown(t, d, req.GetVolumeTargetPath())
	check.That(t, nextVMM.Process.Signal(syscall.Signal(0)) == nil && v.GetLastError() == "" && v.GetHeldBy() == "",
		"the next VM was ended, or is shown as in the way: %v", v)
	check.Equal(t, metric(t, d, `crust_proxy_orphans_total{result="ok"}`), 1, "orphans that were ended")
	nextVMM.End()
	cri.list(nil)
	unstage(t, d, req)
	wantGone(t, d, disk)
}

// TestOnlyOrphansAreEnded has processes that have the device, and are not known to be the volume's.
func TestOnlyOrphansAreEnded(t *testing.T) {
	t.Parallel()
	other := strings.Repeat("c7", 32)
	d, cri := followed(t, "pod-1")
	disk, req := staged(t, d)
	shim := startShim(t, d, req.GetVolumeTargetPath())
	all := map[string]*rig.Holder{
		"names no sandbox":            holdIn(t, disk, "", "x"),
		"names another sandbox":       holdIn(t, disk, "/another/"+strings.Repeat("d8", 32)),
		"names the sandbox in a word": holdIn(t, disk, "/word/"+sandboxID+"0", "/run/vc/a"+sandboxID+"/x"),
		"names a living one as well":  holdIn(t, disk, "/living/"+other, "/run/vc/"+sandboxID),
		"is in another pod's group":   holdIn(t, disk, "/podpod-11/"+strings.Repeat("e9", 32)),
	}
	check.Must(t, shim.Kill())
	cri.list(map[string]string{other: "pod-2"})
	check.Eventually(t, "forgotten", func() bool { return shown(t, d, req.GetVolumeTargetPath()).GetSandbox().GetId() == "" })
	for start := time.Now(); time.Since(start) < 13*time.Second; { // longer than one that ends by itself is waited for
		check.Code(t, check.Err(d.Runtime().RuntimeUnstageVolume(t.Context(), unstageRequest(req))), codes.Aborted)
	}
	out, err := d.Crustctl("end", req.GetVolumeTargetPath(), "--yes").CombinedOutput()
	check.That(t, err != nil, "crustctl end: %s", out)
	for name, process := range all {
		check.NoError(t, process.Process.Signal(syscall.Signal(0)), "a process that %s was ended", name)
		process.End()
	}
	unstage(t, d, req)
	wantGone(t, d, disk)
}

// TestEndByHand is crustctl end where the daemon ends nothing by itself.
func TestEndByHand(t *testing.T) {
	t.Parallel()
	d, cri := followed(t, "pod-1")
	d.Handlers = "default: kata"
	disk, req := staged(t, d)
	shim := startShim(t, d, req.GetVolumeTargetPath())
	vmm := holdIn(t, disk, "/kata_overhead/"+sandboxID)
	check.Must(t, shim.Kill())
	cri.forget(t, d, req.GetVolumeTargetPath())
	out, err := d.Crustctl("end", req.GetVolumeTargetPath()).CombinedOutput()
	check.That(t, err != nil && strings.Contains(string(out), "--yes") && vmm.Process.Signal(syscall.Signal(0)) == nil,
		"without a terminal: %v\n%s", err, out)
	check.Says(t, "crustctl end", string(out), fmt.Sprintf("process %d", vmm.Process.Pid), "/kata_overhead/"+sandboxID, "its control group is that of the sandbox")
	out, err = d.Crustctl("end", req.GetVolumeTargetPath(), "--yes").CombinedOutput()
	check.That(t, err == nil && strings.Contains(string(out), "1 processes were ended"), "crustctl end: %v\n%s", err, out)
	unstage(t, d, req)
	wantGone(t, d, disk)
}
