//go:build system

package driver_test

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// testDriver is a driver over directories of its own.
type testDriver struct {
	csi.ControllerClient
	csi.NodeClient
	csi.IdentityClient
	csi.GroupControllerClient
	t      *testing.T
	dir    string
	data   string // where its images are
	native bool
	args   []string

	cmd  *exec.Cmd
	done chan struct{}
	conn *grpc.ClientConn
	log  buffer
}

type buffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// newDriver starts a driver whose images lie on a real disk, where direct I/O works.
func newDriver(t *testing.T, native bool, args ...string) *testDriver {
	t.Helper()
	return newDriverOn(t, "", native, args...)
}

// newDriverOn starts one whose images lie on a filesystem of their own; pool is its type,
// and may be empty.
func newDriverOn(t *testing.T, pool string, native bool, args ...string) *testDriver {
	t.Helper()
	r := layOut(t, pool)
	r.native, r.args = native, args
	r.start()
	return r
}

// layOut makes the directories.
func layOut(t *testing.T, pool string) *testDriver {
	t.Helper()
	rig.Need(t, "mkfs.ext4", "mkfs.xfs", "mkfs.btrfs", "blkid", "resize2fs", "xfs_growfs", "btrfs")
	dir, err := os.MkdirTemp("/var/tmp", rig.Prefix("cd"))
	if err != nil {
		t.Fatal(err)
	}
	r := &testDriver{t: t, dir: dir, data: dir + "/data"}
	if pool != "" {
		r.data = t.TempDir() // not below dir, where a mount is one that was left
		mountPool(t, pool, r.data)
	}
	t.Cleanup(func() {
		r.kill()
		rig.UnmountAll(t, dir)
		for _, loop := range r.loops() { // left by a test that failed
			_ = loopdev.Detach(loop)
		}
		_ = os.RemoveAll(dir)
		if t.Failed() {
			t.Logf("log of the driver:\n%s", r.log.String())
		}
	})
	return r
}

// poolSize is that of a filesystem for images, which is made on a sparse file.
const poolSize = 4 << 30

func mountPool(t *testing.T, fs, dir string) {
	t.Helper()
	check.Must(t, unix.Mount(rig.Disk(t, poolSize, fs), dir, fs, 0, ""))
	t.Cleanup(func() { check.Must(t, unix.Unmount(dir, 0)) })
}

func (r *testDriver) socket() string { return r.dir + "/csi.sock" }

// start starts the driver and waits until it serves.
func (r *testDriver) start(env ...string) {
	r.t.Helper()
	args := append([]string{"--endpoint", "unix://" + r.socket(), "--data-dir", r.data, "--node-id", "node-a", "--log-level", "debug"}, r.args...)
	if r.native {
		args = append(args, "--defer")
	}
	r.run(exec.Command(rig.Program(r.t, "crust-driver"), args...), env...)
}

// run starts it by a command.
func (r *testDriver) run(cmd *exec.Cmd, env ...string) {
	r.t.Helper()
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = &r.log, &r.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.cmd, r.done = cmd, make(chan struct{})
	go func(done chan struct{}) { _ = cmd.Wait(); close(done) }(r.done)
	r.dial()
}

func (r *testDriver) dial() {
	r.t.Helper()
	conn, err := grpc.NewClient("unix:"+r.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		r.t.Fatal(err)
	}
	r.conn = conn
	r.ControllerClient, r.NodeClient, r.IdentityClient = csi.NewControllerClient(conn), csi.NewNodeClient(conn), csi.NewIdentityClient(conn)
	r.GroupControllerClient = csi.NewGroupControllerClient(conn)
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		// A stale socket is there before the new one: only an answer counts.
		if _, err = r.Probe(r.t.Context(), &csi.ProbeRequest{}); err == nil {
			return
		}
		conn.ResetConnectBackoff()
		if time.Now().After(end) {
			r.t.Fatalf("the driver does not serve: %v\n%s", err, r.log.String())
		}
	}
}

// kill kills the driver and waits for its end.
func (r *testDriver) kill() {
	if r.cmd != nil {
		_ = r.cmd.Process.Kill()
		r.wait()
	}
}

// wait waits for the end of a driver that is on its way there.
func (r *testDriver) wait() {
	r.t.Helper()
	select {
	case <-r.done:
	case <-time.After(20 * time.Second):
		r.t.Fatal("the driver did not end")
	}
	_ = r.conn.Close()
	r.cmd = nil
}

func (r *testDriver) restart(env ...string) {
	r.t.Helper()
	r.kill()
	r.start(env...)
}

const (
	mib  = int64(1) << 20
	size = 320 * mib
)

func mountAccess(fs string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fs}},
	}
}

func blockAccess() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

// volume is the calls of one volume's life; each may be made again and again.
type volume struct {
	*testDriver
	name, id, staging, target string
	access                    *csi.VolumeCapability
}

func (r *testDriver) volume(name string, access *csi.VolumeCapability) *volume {
	r.t.Helper()
	for _, dir := range []string{"/staging/" + name, "/pods"} {
		if err := os.MkdirAll(r.dir+dir, 0o750); err != nil {
			r.t.Fatal(err)
		}
	}
	return &volume{testDriver: r, name: name, staging: r.dir + "/staging/" + name, target: r.dir + "/pods/" + name, access: access}
}

func (v *volume) create() error {
	reply, err := v.CreateVolume(v.t.Context(), &csi.CreateVolumeRequest{
		Name: v.name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, VolumeCapabilities: []*csi.VolumeCapability{v.access},
	})
	v.id = reply.GetVolume().GetVolumeId()
	return err
}

func (v *volume) stage() error {
	_, err := v.NodeStageVolume(v.t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.access,
	})
	return err
}

func (v *volume) request() *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: v.target, VolumeCapability: v.access}
}

func (v *volume) publish() error {
	_, err := v.NodePublishVolume(v.t.Context(), v.request())
	return err
}

func (v *volume) unpublish() error {
	_, err := v.NodeUnpublishVolume(v.t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	return err
}

func (v *volume) unstage() error {
	_, err := v.NodeUnstageVolume(v.t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

func (v *volume) remove() error {
	_, err := v.DeleteVolume(v.t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

// must makes calls that have to succeed.
func (v *volume) must(calls ...func() error) {
	v.t.Helper()
	for _, call := range calls {
		if err := call(); err != nil {
			v.t.Fatal(err)
		}
	}
}

func (v *volume) up()   { v.t.Helper(); v.must(v.create, v.stage, v.publish) }
func (v *volume) down() { v.t.Helper(); v.must(v.unpublish, v.unstage, v.remove) }

func wantCode(t *testing.T, err error, want codes.Code) {
	t.Helper()
	if status.Code(err) != want {
		t.Errorf("%v, instead of %v", err, want)
	}
}

// wantNothing fails where anything of a volume is left.
func (r *testDriver) wantNothing() {
	r.t.Helper()
	for _, pattern := range []string{r.data + "/volumes/*", r.data + "/volumes/.n*", r.data + "/groups/*", r.data + "/groups/.n*", r.data + "/images/*", r.dir + "/pods/*"} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			r.t.Errorf("left: %v", left)
		}
	}
	if left := rig.MountPoints(r.dir); len(left) > 0 {
		r.t.Errorf("still mounted: %v", left)
	}
	if left := rig.LoopsLeft(r.data + "/images/"); len(left) > 0 {
		r.t.Errorf("still attached: %v", left)
	}
}

// loops lists the loop devices over images of this driver.
func (r *testDriver) loops() []string {
	return slices.Collect(maps.Keys(rig.Loops(r.data + "/images/")))
}
