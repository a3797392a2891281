package csi

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/stats"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

func offers(reply *csi.NodeGetCapabilitiesResponse, kind csi.NodeServiceCapability_RPC_Type) bool {
	return slices.ContainsFunc(reply.GetCapabilities(), func(c *csi.NodeServiceCapability) bool { return c.GetRpc().GetType() == kind })
}

// health asks as kubelet does, and gives "STATUS Reason" of each entry, and the last message.
func (r *rig) health(pod string) (told, message string) {
	r.t.Helper()
	return r.askHealth(&csi.NodeGetVolumeHealthRequest{
		VolumeId: "vol-1", VolumePublishPath: r.target(pod), StagingTargetPath: r.staging(),
	})
}

func (r *rig) askHealth(req *csi.NodeGetVolumeHealthRequest) (told, message string) {
	r.t.Helper()
	reply, err := r.kubelet.NodeGetVolumeHealth(r.t.Context(), req)
	r.ok(nil, err)
	health := reply.GetVolumeHealth()
	check.That(r.t, health.GetVolumeId() == req.GetVolumeId(), "got %v", reply)
	var all []string
	for _, one := range health.GetHealthStatuses() {
		all, message = append(all, one.GetStatus().String()+" "+one.GetReason()), one.GetMessage()
	}
	return strings.Join(all, ", "), message
}

func (r *rig) wantHealth(pod, want string) {
	r.t.Helper()
	told, message := r.health(pod)
	check.That(r.t, told == want && (told == "") == (message == ""), "health is %q (%s), want %q", told, message, want)
}

// TestHealthOfADeferredVolume: the sandbox's word, or what its silence means. It never
// is an error, after which kubelet would keep what it was told before.
func TestHealthOfADeferredVolume(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	r.wantHealth("p1", "")
	r.ok(nil, r.publish("p1"))
	r.driver.said()
	r.wantHealth("p1", "") // no sandbox has mounted it yet
	r.sandboxes.known = &stats.Known{At: time.Unix(1e9, 0)}
	r.wantHealth("p1", "DEGRADED NoSandbox")

	r.broker.bound[r.target("p1")] = "s1"
	r.wantHealth("p1", "")
	for reason, want := range map[string]string{
		abi.ReasonReadOnly: "DEGRADED ReadOnly", abi.ReasonErrors: "DEGRADED ErrorsOnRecord", abi.ReasonFrozen: "DEGRADED WritesHeld",
		abi.ReasonShutDown: "INACCESSIBLE ShutDown", "": "DEGRADED Abnormal", "Moody": "DEGRADED Moody",
	} {
		r.sandboxes.health = &volume.Condition{Abnormal: true, Message: "why", Reason: reason}
		r.wantHealth("p1", want)
	}
	r.sandboxes.health = &volume.Condition{Message: "fine"}
	r.wantHealth("p1", "")
	told, _ := r.askHealth(&csi.NodeGetVolumeHealthRequest{VolumeId: "vol-1"})
	check.That(t, told == "", "asked without a path: %s", told)
	for kind, want := range map[volume.Kind]string{
		volume.Timeout: "DEGRADED SandboxDoesNotAnswer", volume.Absurd: "DEGRADED UsageImpossible", volume.Malformed: "DEGRADED UsageImpossible",
		volume.Refused: "DEGRADED SandboxFails", volume.Internal: "DEGRADED SandboxFails",
		volume.Unsupported: "", volume.Exhausted: "", volume.Busy: "",
	} {
		r.sandboxes.err = volume.Errorf(kind, "volume v: %s", kind)
		r.wantHealth("p1", want)
	}
	r.said() // a driver without GET_VOLUME_HEALTH is asked of none of this
}

// faults are entries from "status|reason|message".
func faults(all ...string) (out []*healthEntry) {
	for _, one := range all {
		parts := strings.SplitN(one, "|", 3)
		kind, _ := strconv.Atoi(parts[0])
		out = append(out, &healthEntry{Status: csi.VolumeHealthErrorType(kind), Reason: parts[1], Message: parts[2]}) //nolint:gosec // small
	}
	return out
}

// offerHealth has the driver report a thin pool without space.
func (r *rig) offerHealth(more ...csi.NodeServiceCapability_RPC_Type) {
	r.driver.health, r.driver.faults = codes.InvalidArgument, faults("2|ThinPoolOutOfDataSpace|the pool is full")
	r.driver.setCaps(append(more, csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH)...)
}

// TestHealthOfTheDriverOfADeferredVolume: what the driver knows of the device is as true as what the
// sandbox knows of the filesystem. A driver is asked by the paths that it was given.
func TestHealthOfTheDriverOfADeferredVolume(t *testing.T) {
	const pool, sandbox = "INACCESSIBLE ThinPoolOutOfDataSpace", "DEGRADED Abnormal"
	for way, more := range map[string][]csi.NodeServiceCapability_RPC_Type{volume.WayBlock: nil, volume.WayNative: nativeCaps()} {
		t.Run(way, func(t *testing.T) {
			r := newRig(t, deferAll)
			r.offerHealth(more...)
			r.driver.answer = &csidefer.Mount{Device: "/dev/fake", FSType: "ext4"}
			r.stage()
			r.wantHealth("p1", pool) // no pod has it yet
			staged, _ := r.driver.last("health").(*csi.NodeGetVolumeHealthRequest)
			r.ok(nil, r.publish("p1"))
			publish, staging := r.target("p1"), r.staging()
			if way == volume.WayBlock {
				of := r.broker.volumes[publish].Origin
				publish, staging = of.Private, of.PrivateStaging
			}
			check.That(t, staged.GetStagingTargetPath() == staging && (way != volume.WayBlock || staged.GetVolumePublishPath() == ""),
				"asked for a staged volume: %v", staged)
			r.broker.bound[r.target("p1")] = "s1"
			r.sandboxes.health = &volume.Condition{Abnormal: true, Message: "why"}
			for _, req := range []*csi.NodeGetVolumeHealthRequest{{VolumePublishPath: r.target("p1")}, {StagingTargetPath: r.staging()}, {}} {
				req.VolumeId = "vol-1"
				told, _ := r.askHealth(req)
				ask, _ := r.driver.last("health").(*csi.NodeGetVolumeHealthRequest)
				check.That(t, told == sandbox+", "+pool && ask.GetVolumePublishPath() == publish && ask.GetStagingTargetPath() == staging,
					"%v: %s, asked for %v", req, told, ask)
			}
			r.driver.fail("health", status.Error(codes.Internal, "lvs fails"))
			r.wantHealth("p1", sandbox)
			r.driver.fail("health", nil)
			r.driver.faults = faults("1|R|" + strings.Repeat("x", maxHealthReply))
			r.wantHealth("p1", sandbox)
		})
	}
}

// healthNode is a driver that has no faults, or fails.
type healthNode struct {
	csi.NodeClient
	fails func(ctx context.Context, volumeID string) error
}

func (n healthNode) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest, _ ...grpc.CallOption) (*csi.NodeGetVolumeHealthResponse, error) {
	return nil, n.fails(ctx, req.GetVolumeId())
}

func hang(ctx context.Context) ([]byte, error) {
	<-ctx.Done()
	return nil, status.FromContextError(ctx.Err()).Err()
}

// TestHealthOfADriverThatHangs, with a sandbox that hangs too: kubelet asks one after the other, for 2 minutes each.
func TestHealthOfADriverThatHangs(t *testing.T) {
	r := newRig(t, deferAll)
	r.begin("p1")
	r.front.healthTimeout = healthTimeout
	p := &driverProxy{
		front: r.front, cfg: &r.front.cfg, volumes: r.broker, records: r.front.store.Records, private: r.front.store.Private,
		driver: &staging.Driver{Name: driverName, Node: healthNode{fails: func(ctx context.Context, _ string) error { _, err := hang(ctx); return err }}}, log: zap.NewNop(),
	}
	has := reports(csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH, csi.NodeServiceCapability_RPC_GET_VOLUME_STATS)
	synctest.Test(t, func(t *testing.T) {
		r.sandboxes.hangs = make(chan struct{})
		ends := func(what string, within time.Duration, code codes.Code, call answerFunc, req, reply proto.Message) {
			t.Helper()
			start := time.Now()
			raw, _ := proto.Marshal(req)
			answer, err := call(check.Within(t, 2*time.Minute), p, raw, hang)
			took := time.Since(start)
			check.That(t, took == within && status.Code(err) == code && proto.Unmarshal(answer, reply) == nil, "%s: %v after %v", what, err, took)
		}
		other, known, told := &csi.NodeGetVolumeHealthRequest{VolumeId: "vol-2"}, &csi.NodeGetCapabilitiesResponse{}, &csi.NodeGetVolumeHealthResponse{}
		deferred := &csi.NodeGetVolumeHealthRequest{VolumeId: "vol-1", VolumePublishPath: r.target("p1")}
		quick := func() {
			t.Helper()
			for range 100 {
				ends("capabilities, not asked", 0, codes.OK, getCapabilities, other, known)
				ends("another volume, not asked", 0, codes.DeadlineExceeded, parsed(getVolumeHealth), other, told)
			}
			ends("storage, not asked", 0, codes.DeadlineExceeded, getStorageHealth, other, told)
		}
		ends("capabilities that were never known", healthTimeout, codes.DeadlineExceeded, getCapabilities, other, known)
		p.driver.ObserveCapabilities(has)
		ends("capabilities", healthTimeout, codes.OK, getCapabilities, other, known)
		quick()
		ends("stats", 2*time.Minute, codes.DeadlineExceeded, parsed(getVolumeStats), other, told) // a minute has passed
		ends("another volume", driverHealthTimeout, codes.DeadlineExceeded, parsed(getVolumeHealth), other, told)
		quick()
		p.driver.ObserveCapabilities(has)
		ends("storage", driverHealthTimeout, codes.DeadlineExceeded, getStorageHealth, other, told)
		p.driver.ObserveCapabilities(has)
		ends("a deferred volume", healthTimeout, codes.OK, parsed(getVolumeHealth), deferred, told)
		quick()
		ends("a deferred volume's sandbox", healthTimeout, codes.OK, parsed(getVolumeHealth), deferred, told)
		all := told.GetVolumeHealth().GetHealthStatuses()
		check.That(t, len(known.GetCapabilities()) == 3 && len(all) == 1 && all[0].GetReason() == reasonHangs, "got %v and %v", known, told)
		p.driver.ObserveCapabilities(has)
		_, err := getCapabilities(t.Context(), p, nil, func(ctx context.Context) ([]byte, error) {
			p.driver.ObserveCapabilities(reports()) // a publish has just asked
			return hang(ctx)
		})
		last := p.driver.LastCapabilities()
		check.That(t, err == nil && !last.Health && p.driver.Silent(), "newer capabilities were replaced by %v: %v", last.Kinds, err)
	})
}

// TestManyCapabilities: what is kept of a driver's answer is bounded, and kubelet gets a long one as it is.
func TestManyCapabilities(t *testing.T) {
	p := &driverProxy{front: &Front{healthTimeout: healthTimeout}, driver: &staging.Driver{Name: driverName}, cfg: &Config{}, log: zap.NewNop()}
	long := check.Value(proto.Marshal(reports(make([]csi.NodeServiceCapability_RPC_Type, 64<<10)...)))(t)
	got, err := getCapabilities(t.Context(), p, nil, func(context.Context) ([]byte, error) { return long, nil })
	check.That(t, err == nil && bytes.Equal(got, long) && p.driver.LastCapabilities() == nil, "%d bytes became %d: %v", len(long), len(got), err)
	var many []csi.NodeServiceCapability_RPC_Type
	for kind := range csi.NodeServiceCapability_RPC_Type(200) {
		many = append(many, 1000-kind, csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH)
	}
	has := p.driver.ObserveCapabilities(reports(many...))
	check.That(t, has.Health && len(has.Kinds) == 64, "kept are %d: %+v", len(has.Kinds), has)
}

// TestAnswerAtTheDeadline: a driver that notices the deadline a moment before the front has not answered. One that gives
// up early, or fails at the deadline, has. Its error reaches kubelet if it is final, or if the last answer was without
// Stage. The log gets its text in one short line.
func TestAnswerAtTheDeadline(t *testing.T) {
	const stage, other = csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH
	for _, c := range []struct {
		after         time.Duration
		code          codes.Code
		last          csi.NodeServiceCapability_RPC_Type
		silent, fails bool
	}{
		{healthTimeout - time.Millisecond, codes.DeadlineExceeded, other, true, false},
		{healthTimeout - time.Millisecond, codes.Internal, stage, false, true},
		{healthTimeout / 2, codes.DeadlineExceeded, stage, false, false},
		{0, codes.Unavailable, stage, false, false},
		{0, codes.Unavailable, other, false, true},
		{healthTimeout - time.Millisecond, codes.OK, other, false, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			core, logged := observer.New(zap.DebugLevel)
			p := &driverProxy{front: &Front{healthTimeout: healthTimeout}, driver: &staging.Driver{Name: driverName}, cfg: &Config{}, log: zap.New(core)}
			p.driver.ObserveCapabilities(reports(c.last))
			_, err := getCapabilities(t.Context(), p, nil, func(context.Context) ([]byte, error) {
				time.Sleep(c.after)
				return nil, status.Error(c.code, strings.Repeat("it hangs\n", 1000))
			})
			for _, entry := range logged.All() {
				text := fmt.Sprint(entry.ContextMap()["error"])
				check.That(t, len(text) < 1200 && !strings.Contains(text, "\n") && strings.Contains(text, "asked for its capabilities"), "logged: %q", text)
			}
			check.That(t, p.driver.Silent() == c.silent && (err != nil) == c.fails,
				"%+v: silent %v, %v", c, p.driver.Silent(), err)
		})
	}
}

// TestHealthThatFailsIsLoggedOnce, although kubelet asks once a minute, and the driver answers for another volume.
func TestHealthThatFailsIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logged := observer.New(zap.DebugLevel)
		fails := map[string]error{"bad": status.Error(codes.InvalidArgument, "no such path")}
		node := healthNode{fails: func(_ context.Context, id string) error { return fails[id] }}
		p := &driverProxy{front: &Front{healthTimeout: healthTimeout}, log: zap.New(core), driver: &staging.Driver{Node: node}}
		logs := func(warnings, all int) {
			t.Helper()
			for i := range 120 {
				deviceHealth(t.Context(), p, &csi.NodeGetVolumeHealthRequest{VolumeId: []string{"bad", "good"}[i%2]})
				time.Sleep(30 * time.Second)
			}
			warned := logged.FilterLevelExact(zap.WarnLevel).Len()
			check.That(t, warned == warnings && logged.Len() == all, "%d warnings of %d", warned, logged.Len())
		}
		logs(1, 60)
		delete(fails, "bad")
		logs(2, 61)
		fails["bad"] = status.Error(codes.Internal, "again")
		logs(3, 121)
	})
}

var reasonForm = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$`)

// apiAccepts is what kube-apiserver 1.37 wants of the health of a volume in a pod's status.
func apiAccepts(entries []*healthEntry) bool {
	seen := make(map[string]bool)
	for _, e := range entries {
		is := e.GetStatus().String() + " " + e.GetReason()
		if seen[is] || !reasonForm.MatchString(e.GetReason()) || len(e.GetReason()) > 256 || len(e.GetMessage()) > 1024 || !utf8.ValidString(e.GetMessage()) {
			return false
		}
		seen[is] = true
	}
	return len(entries) <= 16
}

// TestHealthThatTheAPIAccepts: it would refuse the whole status of the pod, which then could never end.
func TestHealthThatTheAPIAccepts(t *testing.T) {
	long := strings.Repeat("x", 2000)
	var many []string
	for i := range 40 {
		many = append(many, fmt.Sprintf("%d|R%d|", i%5, i))
	}
	for name, c := range map[string]struct{ in, want []string }{
		"good":              {[]string{"3|A:b,C_1|m"}, []string{"3|A:b,C_1|m"}},
		"no reason":         {[]string{"3||m"}, []string{"3|Abnormal|m"}},
		"blanks":            {[]string{"3|Pool is full.|"}, []string{"3|Pool_is_full_|Pool is full."}},
		"ends":              {[]string{"3|-1Pool:,|m"}, []string{"3|Pool|-1Pool:,: m"}},
		"no letter":         {[]string{"3|池满了7|"}, []string{"3|Abnormal|池满了7"}},
		"too long":          {[]string{"3|R|" + long}, []string{"3|R|" + long[:1021] + "..."}},
		"cut at a rune":     {[]string{"3|R|xx" + strings.Repeat("ä", 600)}, []string{"3|R|xx" + strings.Repeat("ä", 509) + "..."}},
		"a long reason":     {[]string{"3|" + long + "|"}, []string{"3|" + long[:256] + "|" + long[:256] + "..."}},
		"twice":             {[]string{"3|R|a", "1|R|", "3|R|b", "3|R|a"}, []string{"3|R|a; b", "1|R|"}},
		"twice when mended": {[]string{"1|满|", "1|空|"}, []string{"1|Abnormal|满; 空"}},
		"a later status":    {[]string{"9|MultipathLoss|", "1|R|"}, []string{"9|MultipathLoss|", "1|R|"}},
		"too many": {many, strings.Fields("3|R3| 3|R8| 3|R13| 3|R18| 3|R23| 3|R28| 3|R33| 3|R38| " +
			"2|R2| 2|R7| 2|R12| 2|R17| 2|R22| 2|R27| 2|R32| 2|R37|")},
	} {
		got := acceptable(faults(c.in...))
		check.That(t, slices.EqualFunc(got, faults(c.want...), func(a, b *healthEntry) bool { return proto.Equal(a, b) }) && apiAccepts(got),
			"%s: %v", name, got)
	}
}

// FuzzHealthEntries: whatever a driver says, the API accepts it.
func FuzzHealthEntries(f *testing.F) {
	for seed := range uint64(100) {
		f.Add(seed, strings.Repeat("x y:池,", 50), strings.Repeat("满\xffb", 300))
	}
	f.Fuzz(func(t *testing.T, seed uint64, reason, message string) {
		random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // repeatable
		cut := func(s string) string { return s[:random.IntN(len(s)+1)] }
		in := make([]*healthEntry, random.IntN(50))
		for i := range in {
			in[i] = &healthEntry{Status: csi.VolumeHealthErrorType(random.IntN(7) - 2), Reason: cut(reason) + cut(reason), Message: cut(message) + cut(message)}
		}
		out := acceptable(in)
		check.Require(t, apiAccepts(out) && (len(out) != 0 || len(in) == 0), "%q %q, %d", reason, message, seed)
	})
}

// TestHealthOfOtherVolumes is the driver's, where it has one.
func TestHealthOfOtherVolumes(t *testing.T) {
	r := newRig(t, deferAsked)
	r.offerHealth()
	r.askCapabilities()
	r.wantHealth("p1", "INACCESSIBLE ThinPoolOutOfDataSpace")
	r.said("health kubelet")
	r.driver.faults = append(r.driver.faults, faults("2|ThinPoolOutOfDataSpace|again", "9|pool full|m")...)
	r.wantHealth("p1", "INACCESSIBLE ThinPoolOutOfDataSpace, 9 pool_full")
	r.driver.faults = faults("1|R|" + strings.Repeat("x", maxHealthReply))
	r.refused(check.Err(r.kubelet.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "vol-1"})), codes.ResourceExhausted, driverName)
	r.driver.said()
	r.driver.health = codes.OK // it was downgraded
	r.wantHealth("p1", "")
	r.driver.health = codes.InvalidArgument
	r.driver.setCaps(csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME)
	r.askCapabilities()
	r.wantHealth("p1", "")
	r.said()
	r.registered = reports()
	r.restart() // it is not asked again: it may hang
	r.wantHealth("p1", "")
	r.said()
	r.refused(check.Err(r.kubelet.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{})), codes.InvalidArgument, "volume_id")
	storage, err := r.kubelet.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	check.That(t, err == nil && storage.GetBackendHealth()[0].GetReason() == "PathLost", "storage: %v, %v", storage, err)
}

// TestVolumeConditionOfOldKubelets: the capability by configuration, the field always.
func TestVolumeConditionOfOldKubelets(t *testing.T) {
	for _, configured := range []bool{true, false} {
		r := newRig(t, deferAll)
		r.cfg.VolumeCondition = configured
		r.restart()
		for _, want := range []bool{configured, true} { // the second time the driver reports it
			reply, err := r.kubelet.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
			r.ok(nil, err)
			check.That(t, offers(reply, kubelet.VolumeCondition) == want, "configured %v, wanted %v: %v", configured, want, reply)
			r.driver.setCaps(kubelet.VolumeCondition)
		}
	}
}
