package csi

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// trail is a log that several goroutines write.
type trail struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (l *trail) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

// lines returns the log's lines about calls since it was read last, by the method's name.
func (l *trail) lines(t *testing.T) map[string]map[string]any {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	calls := make(map[string]map[string]any)
	for line := range strings.Lines(l.text.String()) {
		fields := make(map[string]any)
		err := json.Unmarshal([]byte(line), &fields)
		check.Require(t, err == nil, "%s: %v", line, err)
		if method, ok := fields[telemetry.FieldMethod].(string); ok {
			calls[path.Base(method)] = fields
		}
	}
	l.text.Reset()
	return calls
}

// TestEveryCallNamesItsVolume: each line of a volume's life is found by its id, whether the call
// succeeds or the driver fails it, and says what was decided for which pod.
func TestEveryCallNamesItsVolume(t *testing.T) {
	r := newRig(t, deferAll)
	log := &trail{}
	r.calls = &telemetry.Interceptors{
		Log: telemetry.NewLogger(log, zap.NewAtomicLevelAt(zap.DebugLevel)), Metrics: telemetry.NewMetrics("test"),
		Front: &telemetry.Front{Driver: driverName, Known: Answered(), Ours: Answered()},
	}
	r.cfg.DefaultHandler = "kata"
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	r.restart()
	stage := r.stageReq()
	publish := r.publishReq("p1")
	publish.VolumeContext = map[string]string{decision.PodUIDKey: "p1", decision.PodNamespaceKey: "shop", decision.PodNameKey: "db-0"}
	key := string(volume.KeyOf(publish.GetTargetPath()))
	r.broker.bound[r.target("p1")] = "sandbox-7"
	const handler, rule, pod = "kata", `rule "all"`, "shop/db-0"
	life := []struct {
		method, driver, target string
		// want is what the line has besides the driver and its id of the volume.
		want map[string]string
		call func() error
	}{
		{"NodeStageVolume", "stage-block", stage.GetStagingTargetPath(), named("", handler, rule, ""), func() error { return r.tryStage(stage) }},
		{"NodePublishVolume", "publish-block", r.target("p1"), named(key, handler, rule, pod), func() error { return r.tryPublish(publish) }},
		{"NodeExpandVolume", "expand", r.target("p1"), named(key, handler, rule, pod), func() error { return r.expand("p1") }},
		{"NodeGetVolumeStats", "", r.target("p1"), named(key, handler, rule, pod), func() error {
			return check.Err(r.kubelet.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: r.target("p1")}))
		}},
		{"NodeUnpublishVolume", "unpublish", r.target("p1"), named(key, handler, rule, pod), func() error {
			defer delete(r.broker.bound, r.target("p1")) // the first call fails: the sandbox lives
			return r.unpublish("p1")
		}},
		{"NodeUnstageVolume", "unstage", stage.GetStagingTargetPath(), named("", "", rule, ""), r.tryUnstage},
	}
	for _, c := range life {
		for _, fails := range []bool{true, false} {
			if fails {
				r.driver.fail(c.driver, errors.New("the disk is on fire"))
			}
			err := c.call()
			r.driver.fail(c.driver, nil)
			check.That(t, c.driver == "" || c.driver == "expand" || (err != nil) == fails, "%s, failing %v: %v", c.method, fails, err)
			line := log.lines(t)[c.method]
			c.want[telemetry.FieldCSIVolume], c.want[telemetry.FieldTarget], c.want[telemetry.FieldDriver] = "vol-1", c.target, driverName
			for field, want := range c.want {
				got, _ := line[field].(string)
				check.That(t, got == want, "%s, failing %v: %s is %q, want %q (%v)", c.method, fails, field, got, want, line[telemetry.FieldCode])
			}
		}
	}
}

func named(volume, handler, rule, pod string) map[string]string {
	return map[string]string{
		telemetry.FieldVolume: volume, telemetry.FieldHandler: handler, telemetry.FieldRule: rule, telemetry.FieldPod: pod,
	}
}

// TestHostByRuleIsNewsOnce: the rule is known of each call, and kubelet's repeats, of which the history records none, are known as such.
func TestHostByRuleIsNewsOnce(t *testing.T) {
	r := newRig(t, &policy.Policy{Rules: []policy.Rule{{Name: "host"}}})
	var got []string
	r.calls = &telemetry.Interceptors{
		Log: zap.NewNop(), Metrics: telemetry.NewMetrics("test"), Front: &telemetry.Front{Driver: driverName, Known: Answered(), Ours: Answered()},
		Ended: func(_ context.Context, method string, call *telemetry.Call, _ string) {
			if call.Rule != "" {
				got = append(got, fmt.Sprint(path.Base(method), " ", call.Repeated, " ", call.Rule))
			}
		},
	}
	r.restart()
	r.begin("p1")
	r.ok(nil, r.publish("p1"))
	want := []string{`NodeStageVolume false rule "host"`, `NodePublishVolume false rule "host"`, `NodePublishVolume true held as it is while a pod has it`}
	check.That(t, slices.Equal(got, want), "got %q", got)
}
