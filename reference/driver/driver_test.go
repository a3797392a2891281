package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// start runs a driver; what it does without devices needs no root.
func start(t *testing.T, change func(*Config)) (Config, *grpc.ClientConn, *bytes.Buffer) {
	t.Helper()
	dir, err := os.MkdirTemp("", "cd") // unix socket paths are short
	if err != nil {
		t.Fatal(err)
	}
	log := &bytes.Buffer{}
	config := Config{
		Endpoint: "unix://" + dir + "/csi.sock", DataDir: dir + "/data", FreezeLimit: 2 * time.Second, NodeID: "n", Name: DefaultName,
		Log: telemetry.NewLogger(log, zap.NewAtomicLevelAt(zapcore.DebugLevel)),
	}
	if change != nil {
		change(&config)
	}
	d, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	conn := dial(t, dir+"/csi.sock")
	t.Cleanup(func() {
		_ = conn.Close()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		_ = os.RemoveAll(dir)
	})
	return config, conn, log
}

func dial(t *testing.T, socket string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	check.Succeeds(t, "somebody listens on "+socket, func() error {
		probe, err := net.Dial("unix", socket)
		if err == nil {
			_ = probe.Close()
		}
		return err
	})
	conn, err := grpc.NewClient("unix:"+socket, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func mountCapability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	}
}

func TestRegistersAsARegistrarDoes(t *testing.T) {
	var socket string
	config, _, _ := start(t, func(c *Config) {
		socket = filepath.Dir(c.DataDir) + "/reg.sock"
		c.RegistrationSocket, c.KubeletEndpoint = socket, "/var/lib/kubelet/plugins/x/csi.sock"
	})
	var seen []os.FileInfo
	for _, registered := range []bool{false, true} {
		conn := dial(t, socket)
		client := registration.NewRegistrationClient(conn)
		info, err := client.GetInfo(t.Context(), &registration.InfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if info.GetName() != config.Name || info.GetType() != registration.CSIPlugin || info.GetEndpoint() != config.KubeletEndpoint ||
			len(info.GetSupportedVersions()) != 1 {
			t.Errorf("%v", info)
		}
		there, err := os.Lstat(socket)
		if err != nil {
			t.Fatal(err)
		}
		seen = append(seen, there)
		// The answer may be lost: refused, the driver ends the connection.
		_, err = client.NotifyRegistrationStatus(t.Context(), &registration.RegistrationStatus{PluginRegistered: registered, Error: "why"})
		if registered && err != nil {
			t.Error(err)
		}
		_ = conn.Close()
		if !registered {
			waitGone(t, socket)
		}
	}
	if seen[0].ModTime().Equal(seen[1].ModTime()) {
		t.Error("refused, the socket did not appear anew: kubelet would never try again")
	}
}

func waitGone(t *testing.T, path string) {
	t.Helper()
	check.Eventually(t, path+" is gone", func() bool {
		_, err := os.Lstat(path)
		return err != nil
	})
}

// TestSecretsStayOut sends secrets wherever CSI has them, in calls that fail.
func TestSecretsStayOut(t *testing.T) {
	const secret = "hunter2-token"
	config, conn, log := start(t, nil)
	secrets := map[string]string{"password": secret}
	node, controller := csi.NewNodeClient(conn), csi.NewControllerClient(conn)
	attributes := map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": secret}
	flagged := mountCapability()
	flagged.GetMount().MountFlags = []string{"password=" + secret}
	var errs []error
	_, err := controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "v", Secrets: secrets, VolumeCapabilities: []*csi.VolumeCapability{flagged}})
	errs = append(errs, err)
	_, err = node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: "none", StagingTargetPath: "/s", Secrets: secrets, VolumeContext: attributes, VolumeCapability: flagged,
	})
	errs = append(errs, err)
	_, err = node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: "none", StagingTargetPath: "/s", TargetPath: "/t", Secrets: secrets, VolumeContext: attributes, VolumeCapability: flagged,
	})
	errs = append(errs, err)
	for _, err := range errs {
		if err != nil && strings.Contains(err.Error(), secret) {
			t.Error(err)
		}
	}
	records, _ := filepath.Glob(config.DataDir + "/volumes/*")
	for _, path := range records {
		if raw, _ := os.ReadFile(path); bytes.Contains(raw, []byte(secret)) {
			t.Errorf("in the record: %s", raw)
		}
	}
	if err := conn.Close(); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(log.String(), secret) {
		t.Error("in the log")
	}
}

// TestCodeOfAFullDisk: the code says to try again when there is room, unless the call has said
// what happened.
func TestCodeOfAFullDisk(t *testing.T) {
	full := fmt.Errorf("write: %w", unix.ENOSPC)
	check.Code(t, coded(full), codes.ResourceExhausted)
	check.Code(t, coded(errors.Join(status.Error(codes.Aborted, "busy"), full)), codes.Aborted)
	check.Code(t, coded(errors.New("broken")), codes.Internal)
	check.Must(t, coded(nil))
}

func TestTopology(t *testing.T) {
	_, conn, _ := start(t, nil)
	controller := csi.NewControllerClient(conn)
	create := func(node string) error {
		_, err := controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: "v-" + node, VolumeCapabilities: []*csi.VolumeCapability{mountCapability()},
			CapacityRange: &csi.CapacityRange{RequiredBytes: leastSize},
			AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{
				{Segments: map[string]string{"topology." + DefaultName + "/node": node}},
			}},
		})
		return err
	}
	if err := create("n"); err != nil {
		t.Error(err)
	}
	if err := create("other"); status.Code(err) != codes.ResourceExhausted {
		t.Error(err)
	}
	for node, some := range map[string]bool{"n": true, "other": false} {
		reply, err := controller.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{
			Segments: map[string]string{"topology." + DefaultName + "/node": node},
		}})
		if err != nil || (reply.GetAvailableCapacity() > 0) != some {
			t.Errorf("on node %s: %v, %v", node, reply, err)
		}
	}
	listed, err := controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if at := listed.GetEntries()[0].GetVolume().GetAccessibleTopology(); err != nil || at[0].GetSegments()["topology."+DefaultName+"/node"] != "n" {
		t.Errorf("%v, %v", at, err)
	}
}

// alone gives the configuration of a driver that is not started.
func alone(t *testing.T) Config {
	dir := t.TempDir()
	return Config{Endpoint: dir + "/csi.sock", DataDir: dir + "/data", FreezeLimit: time.Second, NodeID: "n", Name: DefaultName, Log: zap.NewNop()}
}

// TestOneDriverPerDataDirectory: a second one would remove what the first is making.
func TestOneDriverPerDataDirectory(t *testing.T) {
	config := alone(t)
	d, err := New(config)
	check.Must(t, err)
	half := &record{Version: recordVersion, ID: "half", Capacity: leastSize}
	check.Must(t, d.node.pool.provision(half, 0, func() error {
		if _, err := New(config); err == nil || !strings.Contains(err.Error(), "another crust-driver") {
			t.Errorf("the second driver: %v", err)
		}
		return nil
	}))
	if r, err := d.node.pool.store.load("half"); err != nil || !r.Ready {
		t.Errorf("%v, %v", r, err)
	}
	d.release()
	d, err = New(config)
	check.Must(t, err)
	d.release()
}

func TestUnfinishedVolumesAreSweptUp(t *testing.T) {
	config := alone(t)
	d, err := New(config)
	if err != nil {
		t.Fatal(err)
	}
	half := &record{Version: recordVersion, ID: "half", Capacity: leastSize}
	whole := &record{Version: recordVersion, ID: "whole", Capacity: leastSize}
	for _, r := range []*record{half, whole} {
		if err := d.node.pool.provisionBlank(r); err != nil {
			t.Fatal(err)
		}
	}
	half.Ready = false
	if err := d.node.pool.store.save(half); err != nil {
		t.Fatal(err)
	}
	d.release()
	if d, err = New(config); err != nil {
		t.Fatal(err)
	}
	defer d.release()
	if r, err := d.node.pool.store.load("half"); r != nil || err != nil {
		t.Errorf("%v, %v", r, err)
	}
	if _, err := os.Stat(d.node.pool.image("half")); err == nil {
		t.Error("its image is left")
	}
	if r, err := d.node.pool.store.load("whole"); r == nil || err != nil {
		t.Errorf("%v, %v", r, err)
	}
	if err := os.Remove(d.node.pool.image("whole")); err != nil {
		t.Fatal(err)
	}
	if err := d.node.pool.makeImage(whole); status.Code(err) != codes.DataLoss {
		t.Errorf("a lost image is made anew: %v", err)
	}
}

// TestAnUnfinishedVolumeThatStays: the driver serves the others.
func TestAnUnfinishedVolumeThatStays(t *testing.T) {
	config := alone(t)
	d, err := New(config)
	check.Must(t, err)
	for _, id := range []string{"stays", "whole"} {
		check.Must(t, d.node.pool.provisionBlank(&record{Version: recordVersion, ID: id, Capacity: leastSize}))
	}
	image := d.node.pool.image("stays")
	check.Must(t, errors.Join(
		d.node.pool.store.save(&record{Version: recordVersion, ID: "stays", Capacity: leastSize}),
		os.Remove(image), os.MkdirAll(image+"/something", 0o700),
	))
	d.release()
	d, err = New(config)
	check.Must(t, err)
	defer d.release()
	if _, err := d.node.pool.find("whole"); err != nil {
		t.Error(err)
	}
}

// TestLocksOfTwo takes two locks in both orders at once.
func TestLocksOfTwo(t *testing.T) {
	var l locks
	done := make(chan error)
	for _, ids := range [][]string{{"v", "w"}, {"w", "v"}, {"v", "v"}} {
		go func() {
			var err error
			for range 1000 {
				release, failed := l.take(t.Context(), ids...)
				if err = failed; err != nil {
					break
				}
				release()
			}
			done <- err
		}()
	}
	for range 3 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestLocksEndWithTheCaller(t *testing.T) {
	var l locks
	release, err := l.take(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := l.take(ctx, "v"); status.Code(err) != codes.Aborted {
		t.Error(err)
	}
	if other, err := l.take(ctx, "w"); err == nil {
		other()
	}
	release()
	again, err := l.take(t.Context(), "v")
	if err != nil {
		t.Fatal(err)
	}
	again()
}
