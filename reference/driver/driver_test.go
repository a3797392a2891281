package driver

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/check/rpctest"
)

// start runs a driver; what it does without devices needs no root.
func start(t *testing.T, change func(*Config)) (Config, *grpc.ClientConn, *bytes.Buffer) {
	t.Helper()
	log, config := &bytes.Buffer{}, alone(t)
	config.Log = telemetry.NewLogger(log, zap.NewAtomicLevelAt(zapcore.DebugLevel))
	if change != nil {
		change(&config)
	}
	d := check.Value(New(config))(t)
	check.Running(t, d.Run)
	return config, dial(t, config.Endpoint), log
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
	return rpctest.Dial(t, socket, options...)
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
	for _, registered := range []bool{false, true} {
		conn := dial(t, socket)
		client := registration.NewRegistrationClient(conn)
		info := check.Value(client.GetInfo(t.Context(), &registration.InfoRequest{}))(t)
		check.That(t, info.GetName() == config.Name && info.GetType() == registration.CSIPlugin && info.GetEndpoint() == config.KubeletEndpoint &&
			len(info.GetSupportedVersions()) == 1, "%v", info)
		there := check.Value(os.Lstat(socket))(t)
		// The answer may be lost: refused, the driver ends the connection.
		_, err := client.NotifyRegistrationStatus(t.Context(), &registration.RegistrationStatus{PluginRegistered: registered, Error: "why"})
		check.That(t, !registered || err == nil, "%v", err)
		if !registered { // kubelet tries again where the socket appears anew
			check.Eventually(t, "another socket is there", func() bool {
				now, err := os.Lstat(socket)
				return err == nil && !now.ModTime().Equal(there.ModTime())
			})
		}
	}
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
	for _, err := range []error{
		check.Err(controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "v", Secrets: secrets, VolumeCapabilities: []*csi.VolumeCapability{flagged}})),
		check.Err(node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
			VolumeId: "none", StagingTargetPath: "/s", Secrets: secrets, VolumeContext: attributes, VolumeCapability: flagged,
		})),
		check.Err(node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
			VolumeId: "none", StagingTargetPath: "/s", TargetPath: "/t", Secrets: secrets, VolumeContext: attributes, VolumeCapability: flagged,
		})),
	} {
		check.That(t, err == nil || !strings.Contains(err.Error(), secret), "%v", err)
	}
	records, _ := filepath.Glob(config.DataDir + "/volumes/*")
	for _, path := range records {
		raw, _ := os.ReadFile(path)
		check.That(t, !bytes.Contains(raw, []byte(secret)), "in the record: %s", raw)
	}
	check.Must(t, conn.Close())
	check.That(t, !strings.Contains(log.String(), secret), "in the log")
}

// TestCodeOfAFullDisk: the code says to try again when there is room, unless the call has said what happened.
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
	check.Must(t, create("n"))
	check.Code(t, create("other"), codes.ResourceExhausted)
	for node, some := range map[string]bool{"n": true, "other": false} {
		reply, err := controller.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{
			Segments: map[string]string{"topology." + DefaultName + "/node": node},
		}})
		check.That(t, err == nil && (reply.GetAvailableCapacity() > 0) == some, "on node %s: %v, %v", node, reply, err)
	}
	listed, err := controller.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	at := listed.GetEntries()[0].GetVolume().GetAccessibleTopology()
	check.That(t, err == nil && at[0].GetSegments()["topology."+DefaultName+"/node"] == "n", "%v, %v", at, err)
}

// alone gives the configuration of a driver that is not started.
func alone(t *testing.T) Config {
	dir := check.ShortDir(t)
	return Config{Endpoint: dir + "/csi.sock", DataDir: dir + "/data", FreezeLimit: time.Second, NodeID: "n", Name: DefaultName, Log: zap.NewNop()}
}

// TestOneDriverPerDataDirectory: a second one would remove what the first is making.
func TestOneDriverPerDataDirectory(t *testing.T) {
	config := alone(t)
	d := check.Value(New(config))(t)
	half := &record{Version: recordVersion, ID: "half", Capacity: leastSize}
	check.Must(t, d.node.pool.provision(half, 0, func() error {
		check.Fails(t, check.Err(New(config)), "another crust-driver") // the second driver
		return nil
	}))
	r, err := d.node.pool.store.load("half")
	check.That(t, err == nil && r.Ready, "%v, %v", r, err)
	d.release()
	check.Value(New(config))(t).release()
}

func TestUnfinishedVolumesAreSweptUp(t *testing.T) {
	config := alone(t)
	d := check.Value(New(config))(t)
	half := &record{Version: recordVersion, ID: "half", Capacity: leastSize}
	whole := &record{Version: recordVersion, ID: "whole", Capacity: leastSize}
	for _, r := range []*record{half, whole} {
		check.Must(t, d.node.pool.provisionBlank(r))
	}
	half.Ready = false
	check.Must(t, d.node.pool.store.save(half))
	incomplete := []string{d.node.pool.store.path("whole") + ".new", filepath.Join(d.node.pool.store.dir, ".new-1")}
	for _, file := range incomplete {
		check.Must(t, os.WriteFile(file, []byte("{"), 0o600))
	}
	d.release()
	d = check.Value(New(config))(t)
	defer d.release()
	r, err := d.node.pool.store.load("half")
	check.That(t, r == nil && err == nil, "%v, %v", r, err)
	check.Fails(t, check.Err(os.Stat(d.node.pool.image("half")))) // or its image is left
	for _, file := range incomplete {
		check.Fails(t, check.Err(os.Stat(file))) // or what was begun
	}
	r, err = d.node.pool.store.load("whole")
	check.That(t, r != nil && err == nil, "%v, %v", r, err)
	check.Must(t, os.Remove(d.node.pool.image("whole")))
	check.Code(t, d.node.pool.makeImage(whole), codes.DataLoss) // or a lost image is made anew
}

// TestAGrowthThatFails is taken back, unless the image has grown: a sync may fail after that.
func TestAGrowthThatFails(t *testing.T) {
	d := check.Value(New(alone(t)))(t)
	defer d.release()
	r := &record{Version: recordVersion, ID: "v", Capacity: leastSize}
	check.Must(t, d.node.pool.provisionBlank(r))
	for image, code := range map[int64]codes.Code{leastSize: codes.Unknown, 2 * leastSize: codes.Aborted} {
		check.Must(t, os.Truncate(d.node.pool.image("v"), image))
		r.Capacity = 2 * leastSize
		check.Code(t, d.controller.notGrown(r, leastSize, unix.EIO), code)
		check.Equal(t, r.Capacity, image, "the capacity on record")
	}
}

// TestAnUnfinishedVolumeThatStays: the driver serves the others.
func TestAnUnfinishedVolumeThatStays(t *testing.T) {
	config := alone(t)
	d := check.Value(New(config))(t)
	for _, id := range []string{"stays", "whole"} {
		check.Must(t, d.node.pool.provisionBlank(&record{Version: recordVersion, ID: id, Capacity: leastSize}))
	}
	image := d.node.pool.image("stays")
	check.Must(t, errors.Join(
		d.node.pool.store.save(&record{Version: recordVersion, ID: "stays", Capacity: leastSize}),
		os.Remove(image), os.MkdirAll(image+"/something", 0o700),
	))
	d.release()
	d = check.Value(New(config))(t)
	defer d.release()
	check.Value(d.node.pool.find("whole"))(t)
}

// TestLocks: of two, in both orders at once, and until the caller gives up. Volumes without a
// source do not wait for each other: one that takes long to make would keep all others.
func TestLocks(t *testing.T) {
	var l locks
	done := make(chan error)
	for _, ids := range [][]string{{"v", "w"}, {"w", "v"}, {"v", "v"}} {
		go func() {
			var err error
			for n := 0; n < 1000 && err == nil; n++ {
				var release func()
				if release, err = l.take(t.Context(), ids...); err == nil {
					release()
				}
			}
			done <- err
		}()
	}
	check.Must(t, errors.Join(<-done, <-done, <-done))
	ctx := check.Within(t, 20*time.Millisecond)
	release := check.Value(l.take(ctx, "v", ""))(t)
	defer release()
	check.Value(l.take(ctx, "w", ""))(t)()
	check.Code(t, check.Err(l.take(ctx, "v")), codes.Aborted)
}

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("k8s.io/klog/v2.(*flushDaemon).run.func1"))
}

func TestSizesOnTheCommandLine(t *testing.T) {
	for text, want := range map[string]int64{"1Gi": 1 << 30, "0": 0, "4096": 4096, "2G": 2e9} {
		config, _, err := parse([]string{"--copy-limit", text, "--capacity", text}, io.Discard, io.Discard)
		check.That(t, err == nil && config.CopyLimit == want && config.Capacity == want,
			"%s: %d and %d, %v", text, config.CopyLimit, config.Capacity, err)
	}
	config, _, err := parse(nil, io.Discard, io.Discard)
	check.That(t, err == nil && config.CopyLimit == 1<<30 && config.Capacity == 0, "by default: %+v, %v", config, err)
}

// TestWrongFlagsAreToldAsText: nobody reads a log to learn of a typing error.
func TestWrongFlagsAreToldAsText(t *testing.T) {
	for line, want := range map[string]string{
		"--copy-limit 1gi":   `"1gi" is no size; write it as 20Gi`,
		"--copy-limit -1":    "is no size",
		"--endpoint x":       `--endpoint "x": give unix:///path`,
		"--data-dir x":       `--data-dir "x": give an absolute path`,
		"--freeze-limit 1ms": "--freeze-limit: give whole seconds",
		"--log-level loud":   `--log-level "loud": give debug, info, warn or error`,
		"--nope":             "--nope",
		"serve":              `"serve" is not expected`,
	} {
		var out, complaints strings.Builder
		code := Main(strings.Fields(line), &out, &complaints)
		check.That(t, code == 2 && strings.HasPrefix(complaints.String(), "crust-driver: ") &&
			strings.HasSuffix(complaints.String(), "\nSee 'crust-driver --help'.\n") && strings.Contains(complaints.String(), want),
			"%s: exit code %d, %s", line, code, complaints.String())
	}
}

// TestHelpCanBePaged: what is asked for goes to stdout.
func TestHelpCanBePaged(t *testing.T) {
	var out, complaints strings.Builder
	code := Main([]string{"--help"}, &out, &complaints)
	check.That(t, code == 0 && complaints.Len() == 0 && strings.Contains(out.String(), "--copy-limit size"),
		"exit code %d, %q on stdout, %q on stderr", code, out.String(), complaints.String())
}

func TestReadRange(t *testing.T) {
	for _, c := range []struct {
		required, limit, want int64
		code                  codes.Code
	}{
		{0, 0, defaultSize, codes.OK},
		{0, 64 << 20, 64 << 20, codes.OK},
		{5 << 20, 0, 5 << 20, codes.OK},
		{5<<20 + 1, 0, 5<<20 + 4096, codes.OK},
		{1, 0, leastSize, codes.OK},
		{5<<20 + 1, 5<<20 + 2, 0, codes.OutOfRange},
		{0, 100, 0, codes.OutOfRange},
		{2, 1, 0, codes.InvalidArgument},
		{-1, 0, 0, codes.InvalidArgument},
		{0, -1, 0, codes.InvalidArgument},
		{math.MaxInt64, 0, 0, codes.OutOfRange},
	} {
		got, err := readRange(&csi.CapacityRange{RequiredBytes: c.required, LimitBytes: c.limit})
		check.That(t, got == c.want && status.Code(err) == c.code, "%d..%d: %d, %v", c.required, c.limit, got, err)
	}
}

// TestEphemeralSize: a pod's author chooses the text.
func TestEphemeralSize(t *testing.T) {
	for text, want := range map[string]int64{"": defaultSize, "1": leastSize, "5000001": 5001216, "1024Ti": mostSize, "1025Ti": 0, "9223372036854775806": 0} {
		p := &publishing{id: "v", attributes: map[string]string{sizeKey: text}}
		got, err := p.ephemeralSize()
		check.That(t, got == want && (want != 0 || status.Code(err) == codes.OutOfRange), "%q: %d, %v", text, got, err)
	}
}

// scrape reads the metrics as Prometheus does.
func scrape(t *testing.T, socket string) string {
	t.Helper()
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}
	defer transport.CloseIdleConnections()
	reply, err := (&http.Client{Transport: transport}).Get("http://driver/metrics")
	check.Must(t, err)
	defer func() { _ = reply.Body.Close() }()
	return string(check.Value(io.ReadAll(reply.Body))(t))
}

// TestStreamsAreCounted: those that end well, and those that fail.
func TestStreamsAreCounted(t *testing.T) {
	var socket string
	config, conn, _ := start(t, func(c *Config) {
		c.CopyLimit = 1 << 30
		socket = filepath.Dir(c.DataDir) + "/http.sock"
		c.MetricsListen = "unix:" + socket
	})
	first, later, _ := snapshots(t, conn, config.DataDir+"/images")
	client := csi.NewSnapshotMetadataClient(conn)
	for _, base := range []string{first, "snap-x"} {
		_, _ = deltaOf(client.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: base, TargetSnapshotId: later}))
	}
	check.Succeeds(t, "metrics are served", func() error { _, err := os.Stat(socket); return err })
	text := ""
	check.Eventually(t, "the streams have ended", func() bool {
		text = scrape(t, socket)
		return strings.Contains(text, `crust_driver_metadata_streams{method="GetMetadataDelta"} 0`)
	})
	for _, want := range []string{
		`crust_driver_metadata_streams_total{code="OK",method="GetMetadataDelta"} 1`,
		`crust_driver_metadata_streams_total{code="NotFound",method="GetMetadataDelta"} 1`,
		`crust_driver_metadata_stream_duration_seconds_count{method="GetMetadataDelta"} 2`,
		fmt.Sprintf(`crust_driver_metadata_bytes_total{method="GetMetadataDelta"} %v`, float64(leastSize+block)),
	} {
		check.That(t, strings.Contains(text, want+"\n"), "no %s in\n%s", want, text)
	}
}

// TestStreamsAreBounded: the one too many is refused, and does not wait.
func TestStreamsAreBounded(t *testing.T) {
	m := &snapshotMetadata{slots: make(chan struct{}, 1)}
	m.slots <- struct{}{}
	check.Code(t, m.stream(t.Context(), opened{}, nil, nil, nil), codes.ResourceExhausted)
}

// TestMetricsAreDocumented: docs/crust-runc.md lists each one.
func TestMetricsAreDocumented(t *testing.T) {
	page := check.Value(os.ReadFile("../../docs/crust-runc.md"))(t)
	m := newMetrics()
	m.begin("/x")(codes.OK)
	m.bytes.WithLabelValues("x").Inc()
	families := check.Value(m.registry.Gather())(t)
	var named, known []string
	for _, family := range families {
		if strings.HasPrefix(family.GetName(), "crust_driver_") {
			known = append(known, family.GetName())
		}
	}
	for _, found := range regexp.MustCompile("`(crust_driver_\\w+)`").FindAllStringSubmatch(string(page), -1) {
		named = append(named, found[1])
	}
	slices.Sort(named)
	check.That(t, slices.Equal(known, named), "docs/crust-runc.md lists %v, and there are %v", named, known)
}

// TestGrowsBeforeTheMountOnlyWhereItMust: resize2fs that is killed can cost the filesystem.
func TestGrowsBeforeTheMountOnlyWhereItMust(t *testing.T) {
	super := make([]byte, 1024) // of an ext4 of 1 MiB, on a device of 16 MiB
	le := binary.LittleEndian
	le.PutUint32(super[0x04:], 256)
	le.PutUint32(super[0x18:], 2)
	le.PutUint32(super[0x20:], 32768)
	le.PutUint16(super[0x38:], unix.EXT4_SUPER_MAGIC)
	device := t.TempDir() + "/device"
	check.Must(t, os.WriteFile(device, append(make([]byte, 1024), super...), 0o600))
	check.Must(t, os.Truncate(device, 16<<20))
	t.Setenv("PATH", t.TempDir()) // without e2fsck and resize2fs
	for _, may := range []bool{true, false} {
		f := &filesystems{mayGrowMounted: func() bool { return may }}
		err := f.growUnmounted(t.Context(), "v", device, "ext4")
		check.That(t, (err == nil) == may, "a mounted one may grow: %v; before the mount: %v", may, err)
	}
}
