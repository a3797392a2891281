package csi

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/kubelet"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// askingPolicy lets pods of kata ask, and defers those of crust without a word.
var askingPolicy = &policy.Policy{Rules: []policy.Rule{
	{Name: "who asks", RuntimeHandlers: []string{"kata"}, Annotated: true, Defer: true, Handler: "kata"},
	{Name: "crust", RuntimeHandlers: []string{"crust"}, Defer: true, Handler: "crust", ThenOnHost: policy.HostAllowed},
}}

// podRig is a rig whose pods are known, each with the volume of the tests as "data" unless it has volumes of its own.
func podRig(t *testing.T, policy *policy.Policy, pods ...decision.Pod) *rig {
	t.Helper()
	r := newRig(t, policy)
	known := make(fakePods)
	for _, pod := range pods {
		pod.Namespace, pod.Name = "ns", "name-of-"+pod.UID
		known[pod.UID] = pod
	}
	r.cfg.Pods, r.cfg.DefaultHandler = known, "kata"
	r.restart()
	return r
}

func one(v decision.PodVolume) []decision.PodVolume {
	v.Name, v.Driver, v.VolumeID = "data", driverName, "vol-1"
	return []decision.PodVolume{v}
}

// awayPods is a cluster that does not answer.
type awayPods struct{}

func (awayPods) ByUID(context.Context, string) (decision.Pod, error) {
	return decision.Pod{}, volume.Errorf(volume.NoSandbox, "the cluster does not answer")
}

func (awayPods) Using(context.Context, string, string) ([]decision.Pod, error) {
	return nil, volume.Errorf(volume.NoSandbox, "the cluster does not answer")
}

// TestClusterAway: what is published already waits for nobody, and what is not is never guessed.
func TestClusterAway(t *testing.T) {
	r := podRig(t, deferAll, decision.Pod{UID: "p1", FSGroup: "2000"})
	r.begin("p1")
	r.cfg.Pods = awayPods{}
	r.restart()
	r.begin("p1")
	in := r.broker.asked
	check.That(t, in.Group == "2000", "the group on record was forgotten: %+v", in)
	r.driver.said()
	r.refused(r.publish("p2"), codes.Unavailable, "the cluster does not answer")
	r.said()
	r.ok(nil, r.unpublish("p1"))
	r.unstage()
	r.driver.said()
	r.refused(r.tryStage(r.stageReq()), codes.Unavailable, "the cluster does not answer", "volume "+r.staging()+": ")
	r.said()
	r.front.SetPolicy(&policy.Policy{}) // a pod that requests deferral by its annotation is refused, never on the host
	r.refused(r.tryStage(r.stageReq()), codes.Unavailable, "the cluster does not answer")
	r.said()
	got := r.cfg.Refusals.Refused()
	check.That(t, len(got) == 1 && got[0].Party == refusal.PartyPods && got[0].Target == r.staging(), "listed: %+v", got)
	r.clean()
}

func TestStageOfPodsThatDisagree(t *testing.T) {
	bad := decision.Pod{UID: "p0", RuntimeHandler: "kata", Asks: "nothing-like-it"}
	r := podRig(t, askingPolicy, bad, decision.Pod{UID: "p1", RuntimeHandler: "crust"}, decision.Pod{UID: "p2", RuntimeHandler: "runc"})
	r.stage()
	r.said("stage-block private")
	r.refused(r.publish("p0"), codes.InvalidArgument, "nothing-like-it")
	r.ok(nil, r.publish("p1"))
	r.refused(r.publish("p2"), codes.FailedPrecondition, "for the pod ns/name-of-p1:", "wait until the other pod is gone")
	r.ok(nil, r.unpublish("p1"))
	r.ok(nil, r.publish("p2"))
	r.refused(r.publish("p1"), codes.FailedPrecondition, "mounted on the host for the pod ns/name-of-p2:")
	r.ok(nil, r.unpublish("p2"))
	r.unstage()
	check.Empty(t, r.cfg.Refusals.Refused(), "listed after the unstage")
	r.cfg.Pods = fakePods{"p0": bad}
	r.restart()
	r.refused(r.tryStage(r.stageReq()), codes.InvalidArgument, "nothing-like-it")
	got := r.cfg.Refusals.Refused()
	check.That(t, len(got) == 1 && got[0].Party == refusal.PartyPod && got[0].PodUID == "p0", "listed: %+v", got)
	r.clean()
}

// TestPodsOfDifferentNeeds: each pod has the volume in its own way, one after the other. A pod that has it keeps it so.
func TestPodsOfDifferentNeeds(t *testing.T) {
	needsHost := &policy.Policy{Rules: []policy.Rule{
		{Name: "sub-paths", Needs: []string{policy.NeedSubPath}}, {Name: "all", Defer: true, ThenOnHost: policy.HostAllowed},
	}}
	needy, plain := one(decision.PodVolume{SubPaths: []string{"logs"}}), one(decision.PodVolume{})
	r := podRig(t, needsHost, decision.Pod{UID: "p1", Volumes: plain}, decision.Pod{UID: "p2", Volumes: needy})
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.refused(r.publish("p2"), codes.FailedPrecondition, `mounted on the host (rule "sub-paths")`, "deferred for the pod ns/name-of-p1")
	r.front.SetPolicy(&policy.Policy{Rules: []policy.Rule{{Name: "none", Needs: []string{policy.NeedSubPath}}}})
	r.ok(nil, r.publish("p1"))
	r.front.SetPolicy(needsHost)
	r.ok(nil, r.unpublish("p1"))
	r.driver.said()
	r.ok(nil, r.publish("p2"))
	r.said("unstage private", "stage-mount kubelet", "publish-mount kubelet")
	r.refused(r.publish("p1"), codes.FailedPrecondition, `deferred (rule "all")`, "mounted on the host for the pod ns/name-of-p2")
	r.ok(nil, r.unpublish("p2"))
	r.end("p1")
}

// TestSubPaths: a pod would start without its sub-directory where the handler shows whole volumes only.
func TestSubPaths(t *testing.T) {
	r := podRig(t, deferAll, decision.Pod{UID: "p1", RuntimeHandler: "kata", Volumes: one(decision.PodVolume{Claim: "all", SubPaths: []string{"logs"}})})
	r.stage()
	r.refused(r.publish("p1"), codes.Unimplemented, `"logs"`, "subPath", "handler kata", "mount all of it", "needs: [subPath]")
	got := r.cfg.Refusals.Refused()
	check.That(t, len(got) == 1 && got[0].PVC == "all", "listed: %+v", got)
	r.broker.abilities.SubPaths = true
	r.ok(nil, r.publish("p1"))
}

// TestReadersOfAVolumeOfSeveralNodes: a stage does not say whether its pod only reads.
func TestReadersOfAVolumeOfSeveralNodes(t *testing.T) {
	for _, reads := range []bool{true, false} {
		r := podRig(t, deferAll, decision.Pod{UID: "p1", Volumes: one(decision.PodVolume{ReadOnly: reads})})
		stage, publish := r.stageReq(), r.publishReq("p1")
		stage.VolumeCapability = mountCap(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, "ext4")
		if !reads {
			r.refused(r.tryStage(stage), codes.Unimplemented, "lets several nodes write")
			continue
		}
		r.ok(nil, r.tryStage(stage))
		publish.VolumeCapability, publish.Readonly = stage.VolumeCapability, true
		r.ok(nil, r.tryPublish(publish))
		r.said("stage-block private", "publish-block private")
		publish.Readonly = false
		publish.TargetPath, publish.VolumeContext = r.target("p2"), nil
		r.front.cfg.Pods = nil
		r.refused(r.tryPublish(publish), codes.Unimplemented, "lets several nodes write")
	}
}

func TestPodOfTheTarget(t *testing.T) {
	r := podRig(t, deferAll, decision.Pod{UID: "p1", FSGroup: "1000", Volumes: one(decision.PodVolume{Claim: "data"})})
	r.stage()
	publish := r.publishReq("p1")
	publish.VolumeContext = nil // a driver without podInfoOnMount
	r.ok(nil, r.tryPublish(publish))
	in := r.broker.asked
	check.That(t, in.Group == "1000" && in.Origin.PodName == "name-of-p1" && in.Origin.PodNamespace == "ns" && in.Origin.PVC == "data",
		"instruction: %+v", in)
	r.ok(nil, r.unpublish("p1"))
	r.driver.said()
	publish.VolumeContext = map[string]string{decision.PodUIDKey: "p2"}
	r.refused(r.tryPublish(publish), codes.InvalidArgument, "p1", "p2", decision.PodUIDKey)
	r.said()
	link := r.dir + "/link"
	r.ok(nil, os.Symlink(r.broker.root, link))
	r.cfg.KubeletRoot, r.cfg.PrivateDir = link, link+"/plugins/kubernetes.io/csi/volumeDevices"
	r.restart()
	rel := r.front.belowKubeletRoot(r.target("p1"))
	check.That(t, kubelet.PodUID(rel) == "p1", "below a link: %q", rel)
}

// TestPodThatKubeletNames is without a cluster.
func TestPodThatKubeletNames(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	publish := r.publishReq("p1")
	publish.VolumeContext[decision.PodNamespaceKey], publish.VolumeContext[decision.PodNameKey] = "team", "db-0"
	r.ok(nil, r.tryPublish(publish))
	check.That(t, r.broker.asked.Origin.PodNamespace+r.broker.asked.Origin.PodName == "teamdb-0", "instruction: %+v", r.broker.asked.Origin)
	for name, uid := range map[string]string{strings.Repeat("x", 1000): "p1", "of-an-attribute": "", "of-another-pod": "p2"} {
		r.ok(nil, r.unpublish("p1"))
		publish.VolumeContext[decision.PodUIDKey], publish.VolumeContext[decision.PodNameKey] = uid, name
		r.ok(nil, r.tryPublish(publish))
		check.That(t, r.broker.asked.Origin.PodNamespace+r.broker.asked.Origin.PodName == "", "kept for the UID %q: %+v", uid, r.broker.asked.Origin)
	}
}

func TestInlineVolumesAreKnownByTheirName(t *testing.T) {
	r := podRig(t, askingPolicy, decision.Pod{UID: "p1", RuntimeHandler: "kata", Asks: "pv1", Volumes: []decision.PodVolume{{Name: "pv1", Driver: driverName}}})
	publish := &csi.NodePublishVolumeRequest{
		VolumeId: inlineID, TargetPath: r.target("p1"), VolumeCapability: mountCap(rwo, "ext4"),
		VolumeContext: map[string]string{decision.PodUIDKey: "p1"},
	}
	r.refused(r.tryPublish(publish), codes.Unimplemented, `rule "who asks"`, "inline ephemeral", "volumeClaimTemplate")
	got := r.cfg.Refusals.Refused()
	check.That(t, len(got) == 1 && got[0].Party == refusal.PartyDriver, "listed: %+v", got)
	csidefer.SetRequested(publish)
	r.refused(r.tryPublish(publish), codes.Unimplemented, "defer_fs_ops of the request")
	// Nor is it deferred if kubelet comes to make up another form of id, as it stages all other volumes.
	r.cfg.Pods = fakePods{"p1": {UID: "p1", RuntimeHandler: "kata", Volumes: []decision.PodVolume{{Name: "pv1", Driver: driverName, VolumeID: "csi-0123"}}}}
	r.restart()
	publish.VolumeId, publish.VolumeContext = "csi-0123", nil
	r.refused(r.tryPublish(publish), codes.Unimplemented, "inline ephemeral", "volumeClaimTemplate")
}

// warnings has a pod publish the volume twice, as kubelet does after its restart, and gives
// the warnings that name the pod.
func warnings(t *testing.T, pod decision.Pod, lacksGroup bool) *observer.ObservedLogs {
	t.Helper()
	pod.UID = "p1"
	r := podRig(t, deferAll, pod)
	core, logs := observer.New(zap.WarnLevel)
	r.cfg.Log, r.lacks = zap.New(core), lacksGroup
	r.restart()
	r.begin("p1")
	r.ok(nil, r.publish("p1"))
	named := logs.FilterField(zap.String("pod", "ns/name-of-p1")).FilterField(zap.String("target", r.target("p1")))
	check.That(t, named.Len() == logs.Len(), "said: %+v", logs.All())
	return named
}

// TestHazardsAreNamedBeforehand: what runtime-rs does wrong is in the log with pod and containers, once.
func TestHazardsAreNamedBeforehand(t *testing.T) {
	logs := warnings(t, decision.Pod{Volumes: one(decision.PodVolume{Together: []string{"app", "sidecar"}})}, false)
	check.That(t, logs.FilterField(zap.Strings("containers", []string{"app", "sidecar"})).Len() == 1 && logs.Len() == 1, "said: %+v", logs.All())
}

// TestIgnoredGroupIsNamed: the log names pod, volume and group before the pod starts,
// where the runtime handler's name says that it is runtime-rs.
func TestIgnoredGroupIsNamed(t *testing.T) {
	for name, c := range map[string]struct {
		pod   decision.Pod
		lacks bool
		says  int
	}{
		"runtime-rs":               {decision.Pod{RuntimeHandler: "kata-qemu-runtime-rs", FSGroup: "2000"}, true, 1},
		"runtime-rs, group's root": {decision.Pod{RuntimeHandler: "kata-qemu-runtime-rs", FSGroup: "2000"}, false, 0},
		"runtime-rs, no group":     {decision.Pod{RuntimeHandler: "kata-qemu-runtime-rs"}, true, 0},
		"Go":                       {decision.Pod{RuntimeHandler: "kata-qemu", FSGroup: "2000"}, true, 0},
		"not known":                {decision.Pod{FSGroup: "2000"}, true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			logs := warnings(t, c.pod, c.lacks)
			check.That(t, logs.FilterMessage(runtime.GroupIgnored).FilterField(zap.String("group", "2000")).Len() == c.says && logs.Len() == c.says,
				"said: %+v", logs.All())
		})
	}
}
