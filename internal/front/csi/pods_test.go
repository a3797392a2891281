package csi

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/decision"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// askingPolicy lets pods of kata ask, and defers those of crust without a word.
var askingPolicy = &policy.Policy{Rules: []policy.Rule{
	{Name: "who asks", RuntimeHandlers: []string{"kata"}, Annotated: true, Defer: true, Handler: "kata"},
	{Name: "crust", RuntimeHandlers: []string{"crust"}, Defer: true, Handler: "crust", ThenOnHost: policy.HostAllowed},
}}

// podRig is a rig whose pods are known, each with the volume of the tests as
// "data" unless it has volumes of its own.
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

func TestPodsThatAsk(t *testing.T) {
	for name, c := range map[string]struct {
		pod      decision.Pod
		deferred bool
		code     codes.Code
		party    volume.Party
		says     []string
	}{
		"by name":              {pod: decision.Pod{RuntimeHandler: "kata", Asks: "data"}, deferred: true},
		"all":                  {pod: decision.Pod{RuntimeHandler: "kata", Asks: "*"}, deferred: true},
		"nothing":              {pod: decision.Pod{RuntimeHandler: "kata"}},
		"another volume":       {pod: decision.Pod{RuntimeHandler: "kata", Asks: "logs", Volumes: append(one(decision.PodVolume{}), decision.PodVolume{Name: "logs", Driver: "other"})}},
		"the second name":      {pod: decision.Pod{RuntimeHandler: "kata", Asks: "again", Volumes: append(one(decision.PodVolume{}), decision.PodVolume{Name: "again", Driver: driverName, VolumeID: "vol-1"})}, deferred: true},
		"deferred without":     {pod: decision.Pod{RuntimeHandler: "crust", Asks: "data"}, deferred: true},
		"wrong runtime":        {pod: decision.Pod{RuntimeHandler: "runc", Asks: "*"}, code: codes.PermissionDenied, party: volume.PartyPolicy, says: []string{"no rule", `"runc"`}},
		"default runtime":      {pod: decision.Pod{Asks: "data"}, code: codes.PermissionDenied, party: volume.PartyPolicy, says: []string{"default runtime"}},
		"no such volume":       {pod: decision.Pod{RuntimeHandler: "kata", Asks: "data,date"}, code: codes.InvalidArgument, party: volume.PartyPod, says: []string{`"date"`, "correct the annotation"}},
		"a raw block volume":   {pod: decision.Pod{RuntimeHandler: "kata", Asks: "raw", Volumes: append(one(decision.PodVolume{}), decision.PodVolume{Name: "raw", Driver: driverName, VolumeID: "r", Block: true})}, code: codes.InvalidArgument, party: volume.PartyPod, says: []string{`"raw"`, "raw block"}},
		"unreadable":           {pod: decision.Pod{RuntimeHandler: "kata", Asks: "data;\n\x1b[2J"}, code: codes.InvalidArgument, party: volume.PartyPod, says: []string{"cannot be read"}},
		"a volume not known":   {pod: decision.Pod{RuntimeHandler: "kata", Asks: "x", Volumes: []decision.PodVolume{{Name: "x", Unknown: volume.Errorf(volume.Timeout, "the cluster does not answer")}}}, code: codes.DeadlineExceeded, party: volume.PartyPods, says: []string{"the cluster does not answer"}},
		"not among its own":    {pod: decision.Pod{RuntimeHandler: "kata", Asks: "*", Volumes: []decision.PodVolume{}}, code: codes.Aborted, party: volume.PartyPods, says: []string{"vol-1"}},
		"unknown and deferred": {pod: decision.Pod{RuntimeHandler: "crust", Volumes: []decision.PodVolume{}}, code: codes.Aborted, party: volume.PartyPods, says: []string{"vol-1"}},
		"unknown and plain":    {pod: decision.Pod{RuntimeHandler: "runc", Volumes: []decision.PodVolume{}}},
	} {
		t.Run(name, func(t *testing.T) {
			c.pod.UID = "p1"
			r := podRig(t, askingPolicy, c.pod)
			r.driver.setCaps() // a driver that stages nothing: the publish alone decides
			err := r.publish("p1")
			if c.code == codes.OK {
				r.ok(nil, err)
				if _, deferred := r.broker.volumes[r.target("p1")]; deferred != c.deferred {
					t.Errorf("deferred: %v", deferred)
				}
				return
			}
			r.refused(err, c.code, append(c.says, "volume "+r.target("p1")+" of pod ns/name-of-p1: ")...)
			if text := err.Error(); strings.ContainsAny(text, "\n\x1b") || len(text) > 1200 {
				t.Errorf("not one line: %q", text)
			}
			if got := r.front.Refused(); len(got) != 1 || got[0].Party != c.party || got[0].PodName != "name-of-p1" {
				t.Errorf("listed: %+v", got)
			}
			r.said()
		})
	}
}

// TestVolumeThatSaysNoToAPodThatAsks: the volume's word is the stronger one.
func TestVolumeThatSaysNoToAPodThatAsks(t *testing.T) {
	r := podRig(t, askingPolicy, decision.Pod{UID: "p1", RuntimeHandler: "kata", Asks: "*"})
	publish := r.publishReq("p1")
	publish.VolumeContext[policy.ContextKey] = "false"
	_, err := r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.PermissionDenied, policy.AnnotationKey, policy.ContextKey, `"false"`)
	r.said()
}

func TestSubPaths(t *testing.T) {
	pod := decision.Pod{UID: "p1", RuntimeHandler: "kata", Asks: "*", Volumes: one(decision.PodVolume{SubPaths: []string{"logs", "x\n"}})}
	r := podRig(t, askingPolicy, pod)
	r.stage()
	r.driver.said()
	r.refused(r.publish("p1"), codes.Unimplemented, `"logs"`, "subPath", "handler kata", `rule "who asks"`, "mount all of it")
	r.said()
	if got := r.front.Refused(); len(got) != 1 || got[0].Party != volume.PartyHandler || got[0].Handler != "kata" || got[0].Rule != `rule "who asks"` {
		t.Errorf("listed: %+v", got)
	}
	r.broker.abilities.SubPaths = true
	r.ok(nil, r.publish("p1"))
	r.broker.abilities.SubPaths = false
	r.ok(nil, r.publish("p1")) // what is published stays
}

func TestReaderThatDoesNotSayIt(t *testing.T) {
	r := podRig(t, deferAll, decision.Pod{UID: "p1"}, decision.Pod{UID: "p2", Volumes: one(decision.PodVolume{ReadOnlyMounts: true})}, decision.Pod{UID: "p3"})
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.refused(r.publish("p2"), codes.FailedPrecondition, "readOnly: true", "wait until the other pod is gone")
	err := r.publish("p3")
	r.refused(err, codes.FailedPrecondition, "wait until the other pod is gone")
	if strings.Contains(err.Error(), "readOnly") {
		t.Errorf("a writer is told to read only: %v", err)
	}
}

func TestGroupIsNotForReadOnlyVolumes(t *testing.T) {
	r := podRig(t, deferAll, decision.Pod{UID: "p1", FSGroup: "2000", FSGroupPolicy: volume.GroupAlways})
	r.stage()
	publish := r.publishReq("p1")
	publish.Readonly = true
	r.ok(r.kubelet.NodePublishVolume(t.Context(), publish))
	if in := r.broker.asked; in.Group != "" || in.GroupPolicy != "" {
		t.Errorf("instruction: %+v", in)
	}
}

// awayPods is a cluster that does not answer.
type awayPods struct{}

func (awayPods) ByUID(context.Context, string) (decision.Pod, error) {
	return decision.Pod{}, volume.Errorf(volume.NoSandbox, "the cluster does not answer")
}

func (awayPods) Using(context.Context, string, string) ([]decision.Pod, error) {
	return nil, volume.Errorf(volume.NoSandbox, "the cluster does not answer")
}

// TestClusterAway: what is published already waits for nobody, and what is not is
// never guessed.
func TestClusterAway(t *testing.T) {
	r := podRig(t, deferAll, decision.Pod{UID: "p1", FSGroup: "2000"})
	r.stage()
	r.ok(nil, r.publish("p1"))
	r.cfg.Pods = awayPods{}
	r.restart()
	r.stage()
	r.ok(nil, r.publish("p1"))
	if in := r.broker.asked; in.Group != "2000" {
		t.Errorf("the group on record was forgotten: %+v", in)
	}
	r.driver.said()
	r.refused(r.publish("p2"), codes.Unavailable, "the cluster does not answer")
	r.said()
	r.ok(nil, r.unpublish("p1"))
	r.unstage()
	r.driver.said()
	_, err := r.kubelet.NodeStageVolume(t.Context(), r.stageReq())
	r.refused(err, codes.Unavailable, "the cluster does not answer", "volume "+r.staging()+": ")
	r.said()
	if got := r.front.Refused(); len(got) != 1 || got[0].Party != volume.PartyPods || got[0].Target != r.staging() {
		t.Errorf("listed: %+v", got)
	}
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
	if got := r.front.Refused(); len(got) != 0 {
		t.Errorf("listed after the unstage: %+v", got)
	}
	r.cfg.Pods = fakePods{"p0": bad}
	r.restart()
	_, err := r.kubelet.NodeStageVolume(t.Context(), r.stageReq())
	r.refused(err, codes.InvalidArgument, "nothing-like-it")
	if got := r.front.Refused(); len(got) != 1 || got[0].Party != volume.PartyPod || got[0].PodUID != "p0" {
		t.Errorf("listed: %+v", got)
	}
	r.clean()
}

func TestPodOfTheTarget(t *testing.T) {
	r := podRig(t, deferAll, decision.Pod{UID: "p1", FSGroup: "1000"})
	r.stage()
	publish := r.publishReq("p1")
	publish.VolumeContext = nil // a driver without podInfoOnMount
	r.ok(r.kubelet.NodePublishVolume(t.Context(), publish))
	if in := r.broker.asked; in.Group != "1000" || in.Origin.PodName != "name-of-p1" || in.Origin.PodNamespace != "ns" {
		t.Errorf("instruction: %+v", in)
	}
	r.ok(nil, r.unpublish("p1"))
	r.driver.said()
	publish.VolumeContext = map[string]string{decision.PodUIDKey: "p2"}
	_, err := r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.InvalidArgument, "p1", "p2", decision.PodUIDKey)
	r.said()
	link := r.dir + "/link"
	r.ok(nil, os.Symlink(r.broker.root, link))
	r.cfg.KubeletRoot, r.cfg.PrivateDir = link, link+"/plugins/kubernetes.io/csi/volumeDevices"
	r.restart()
	if uid, err := r.front.podUID(&decision.VolumeRequest{Path: r.target("p1")}); uid != "p1" || err != nil {
		t.Errorf("below a link: %q, %v", uid, err)
	}
}

// TestPodThatKubeletNames is without a cluster.
func TestPodThatKubeletNames(t *testing.T) {
	r := newRig(t, deferAll)
	r.stage()
	publish := r.publishReq("p1")
	publish.VolumeContext[decision.PodNamespaceKey], publish.VolumeContext[decision.PodNameKey] = "team", "db-0"
	r.ok(r.kubelet.NodePublishVolume(t.Context(), publish))
	if in := r.broker.asked; in.Origin.PodNamespace != "team" || in.Origin.PodName != "db-0" {
		t.Errorf("instruction: %+v", in.Origin)
	}
	r.ok(nil, r.unpublish("p1"))
	publish.VolumeContext[decision.PodNameKey] = strings.Repeat("x", 1000)
	r.ok(r.kubelet.NodePublishVolume(t.Context(), publish))
	if in := r.broker.asked; in.Origin.PodName != "" {
		t.Errorf("a name of %d bytes was kept", len(in.Origin.PodName))
	}
}

func TestInlineVolumesAreKnownByTheirName(t *testing.T) {
	inline := []decision.PodVolume{{Name: "pv1", Driver: driverName, VolumeID: ""}}
	r := podRig(t, askingPolicy, decision.Pod{UID: "p1", RuntimeHandler: "kata", Asks: "pv1", Volumes: inline})
	publish := &csi.NodePublishVolumeRequest{
		VolumeId: "csi-0123", TargetPath: r.target("p1"), VolumeCapability: mountCap(rwo, "ext4"),
		VolumeContext: map[string]string{decision.PodUIDKey: "p1", decision.EphemeralKey: "true"},
	}
	_, err := r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.Unimplemented, `rule "who asks"`, "inline ephemeral", "volumeClaimTemplate")
	if got := r.front.Refused(); len(got) != 1 || got[0].Party != volume.PartyDriver {
		t.Errorf("listed: %+v", got)
	}
	csidefer.SetRequested(publish)
	_, err = r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.Unimplemented, "defer_fs_ops of the request")
	// A driver without podInfoOnMount is not told that the volume is inline, which
	// is known by its id then.
	r.cfg.Pods = fakePods{"p1": {UID: "p1", RuntimeHandler: "kata", Volumes: []decision.PodVolume{{Name: "pv1", Driver: driverName, VolumeID: "csi-0123"}}}}
	r.restart()
	publish.VolumeContext = nil
	_, err = r.kubelet.NodePublishVolume(t.Context(), publish)
	r.refused(err, codes.Unimplemented, "inline ephemeral", "volumeClaimTemplate")
}

// TestInlineVolumesAttributesAreTheAuthors: the driver is not told of pods, so kubelet
// does not say that the volume is inline, and the pod's author denies it.
func TestInlineVolumesAttributesAreTheAuthors(t *testing.T) {
	for name, test := range map[string]struct {
		policy *policy.Policy
		word   string
		code   codes.Code
		says   string
		asked  []string
	}{
		"true, and no rule defers": {&policy.Policy{}, "true", codes.PermissionDenied, "no rule", nil},
		"false, and a rule defers": {deferAll, "false", codes.Unimplemented, `rule "all"`, nil},
		"false, and no rule":       {&policy.Policy{}, "false", codes.OK, "", []string{"publish-mount kubelet"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, test.policy)
			r.driver.setCaps() // block access would be asked for at once
			_, err := r.kubelet.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
				VolumeId: "csi-" + strings.Repeat("0a", 32), TargetPath: r.target("p1"), VolumeCapability: mountCap(rwo, "ext4"),
				VolumeContext: map[string]string{decision.EphemeralKey: "false", policy.ContextKey: test.word},
			})
			r.refused(err, test.code, test.says)
			r.said(test.asked...)
		})
	}
}
