package decision

import (
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/refusal"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/csidefer"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

const (
	driver   = "d.example.com"
	volumeID = "vol-1"
	target   = "/pods/p1/data"
)

// request is a publish of a volume that one node mounts read-write.
func request(change func(*csi.NodePublishVolumeRequest)) *VolumeRequest {
	req := &csi.NodePublishVolumeRequest{
		VolumeId: volumeID, TargetPath: target, StagingTargetPath: "/staging",
		VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		},
	}
	if change != nil {
		change(req)
	}
	r, err := PublishRequest(driver, "ext4", "", req)
	if err != nil {
		panic(err)
	}
	return r
}

func mode(m csi.VolumeCapability_AccessMode_Mode) func(*csi.NodePublishVolumeRequest) {
	return func(req *csi.NodePublishVolumeRequest) { req.VolumeCapability.AccessMode.Mode = m }
}

// rulesFor defers pods of kata, and those of crust that ask.
func rulesFor(subPaths bool) *Rules {
	return &Rules{
		DefaultHandler: "kata",
		Abilities:      func(string) deferral.Abilities { return deferral.Abilities{SubPaths: subPaths} },
		Policy: &policy.Policy{Rules: []policy.Rule{
			{Name: "kata", RuntimeHandlers: []string{"kata"}, Defer: true},
			{Name: "needs", RuntimeHandlers: []string{"needy"}, Needs: []string{policy.NeedSubPath, policy.NeedFSGroup}},
			{Name: "needy", RuntimeHandlers: []string{"needy"}, Defer: true},
			{Name: "asked", RuntimeHandlers: []string{"crust"}, Annotated: true, Defer: true, Handler: "crust"},
		}},
	}
}

func podWith(runtimeHandler, asks string, v PodVolume) Pod {
	v.Name, v.Driver, v.VolumeID = "data", driver, volumeID
	return Pod{UID: runtimeHandler, RuntimeHandler: runtimeHandler, Asks: asks, Volumes: []PodVolume{v}}
}

func withGroup(pod Pod) Pod { pod.FSGroup = "7"; return pod }

func contextOf(t *testing.T, pod Pod) *PodContext {
	t.Helper()
	return check.Value(pod.ForVolume(driver, volumeID, ""))(t)
}

// deferredFor is the volume, deferred for another pod.
func deferredFor(pod string, readOnly bool) deferral.Status {
	return deferral.Status{Volume: &volume.Volume{
		Target: "/pods/p2/volumes/data", Driver: driver, Handler: "kata", ReadOnly: readOnly,
		Origin: &volume.Origin{VolumeID: volumeID, Rule: `rule "kata"`, Way: volume.WayBlock, PodNamespace: "ns", PodName: pod},
	}}
}

// refused checks the class and party of an error, and the words in it.
func refused(t *testing.T, err error, kind volume.Kind, party refusal.Party, words ...string) {
	t.Helper()
	check.Require(t, err != nil && volume.KindOf(err) == kind && refusal.PartyOf(err) == party,
		"got %v (%v by %v), want %v by %v", err, volume.KindOf(err), refusal.PartyOf(err), kind, party)
	check.Says(t, "the error", err.Error(), words...)
}

func TestPublishVerdicts(t *testing.T) {
	elsewhere := []deferral.Status{deferredFor("db-0", false)}
	for name, c := range map[string]struct {
		pod       Pod
		state     State
		subPaths  bool
		defers    bool
		handler   string
		kind      volume.Kind
		party     refusal.Party
		inMessage []string
	}{
		"a rule":                    {pod: podWith("kata", "", PodVolume{}), defers: true, handler: "kata"},
		"no rule":                   {pod: podWith("runc", "", PodVolume{})},
		"a pod that asks":           {pod: podWith("crust", "data", PodVolume{}), defers: true, handler: "crust"},
		"a pod that does not ask":   {pod: podWith("crust", "", PodVolume{})},
		"a pod that may not ask":    {pod: podWith("runc", "*", PodVolume{}), kind: volume.Denied, party: refusal.PartyPolicy, inMessage: []string{"no rule"}},
		"deferred for another pod":  {pod: podWith("kata", "", PodVolume{}), state: State{Elsewhere: elsewhere}, defers: true, handler: "kata"},
		"on host for another pod":   {pod: podWith("runc", "", PodVolume{}), state: State{OnHost: []string{"/other"}}},
		"other pod has it deferred": {pod: podWith("runc", "", PodVolume{}), state: State{Elsewhere: elsewhere}, kind: volume.InUse, party: refusal.PartyVolume, inMessage: []string{"mounted on the host (no rule)", "is deferred for the pod ns/db-0"}},
		"other pod has it on host":  {pod: podWith("kata", "", PodVolume{}), state: State{OnHost: []string{"/other"}}, kind: volume.InUse, party: refusal.PartyVolume, inMessage: []string{`deferred (rule "kata")`, "mounted on the host for the pod at /other"}},
		"a sub-path":                {pod: podWith("kata", "", PodVolume{SubPaths: []string{"a/b"}}), kind: volume.Unsupported, party: refusal.PartyHandler, inMessage: []string{"a/b", "handler kata"}},
		"a sub-path that works":     {pod: podWith("kata", "", PodVolume{SubPaths: []string{"a/b"}}), subPaths: true, defers: true, handler: "kata"},
		"a sub-path on the host":    {pod: podWith("runc", "", PodVolume{SubPaths: []string{"a/b"}})},
		"by rule on the host":       {pod: podWith("needy", "", PodVolume{SubPaths: []string{"a/b"}})},
		"needs nothing":             {pod: podWith("needy", "", PodVolume{}), defers: true, handler: "kata"},
		"needs a group":             {pod: withGroup(podWith("needy", "", PodVolume{}))},
		"a group of other volumes":  {pod: withGroup(podWith("needy", "", PodVolume{NoGroup: true})), defers: true, handler: "kata"},
		"other pod has no needs":    {pod: podWith("needy", "", PodVolume{SubPaths: []string{"a"}}), state: State{Elsewhere: elsewhere}, kind: volume.InUse, party: refusal.PartyVolume, inMessage: []string{`mounted on the host (rule "needs")`, "is deferred for the pod ns/db-0"}},
		"other pod has needs":       {pod: podWith("needy", "", PodVolume{}), state: State{OnHost: []string{"/other"}}, kind: volume.InUse, party: refusal.PartyVolume, inMessage: []string{`deferred (rule "needy")`, "mounted on the host for the pod at /other"}},
		"needs that are not known":  {pod: Pod{RuntimeHandler: "needy", Volumes: []PodVolume{{Unknown: volume.Errorf(volume.Timeout, "no answer")}}}, kind: volume.Timeout, party: refusal.PartyPods, inMessage: []string{`rule "needs"`, "it goes by needs, and it is not known which", "no answer"}},
		"needs do not matter":       {pod: Pod{RuntimeHandler: "runc", Volumes: []PodVolume{{Unknown: volume.Errorf(volume.Timeout, "no answer")}}}},
		"a volume that is missing":  {pod: Pod{RuntimeHandler: "kata"}, kind: volume.Busy, party: refusal.PartyPods, inMessage: []string{"asked again"}},
	} {
		t.Run(name, func(t *testing.T) {
			rules := rulesFor(c.subPaths)
			c.state.Holder = func(target string) string { return "the pod at " + target }
			verdict, err := rules.Publish(request(nil), &c.state, contextOf(t, c.pod))
			if c.inMessage != nil {
				refused(t, err, c.kind, c.party, c.inMessage...)
				return
			}
			check.That(t, err == nil && verdict.Defer == c.defers && verdict.Handler == c.handler, "got %+v, %v", verdict, err)
		})
	}
}

// TestPodsThatAsk by an annotation that does not fit the pod's volumes.
func TestPodsThatAsk(t *testing.T) {
	more := func(v PodVolume) []PodVolume {
		return []PodVolume{{Name: "data", Driver: driver, VolumeID: volumeID}, v}
	}
	unknown := volume.Errorf(volume.Timeout, "the cluster does not answer")
	for name, c := range map[string]struct {
		asks    string
		volumes []PodVolume
		asked   bool
		kind    volume.Kind
		party   refusal.Party
		says    []string
	}{
		"another volume":     {asks: "logs", volumes: more(PodVolume{Name: "logs", Driver: "other"})},
		"the second name":    {asks: "again", volumes: more(PodVolume{Name: "again", Driver: driver, VolumeID: volumeID}), asked: true},
		"all":                {asks: "*", volumes: more(PodVolume{Name: "logs"}), asked: true},
		"no such volume":     {asks: "data,date", volumes: more(PodVolume{Name: "logs"}), kind: volume.Invalid, party: refusal.PartyPod, says: []string{`"date"`, "correct the annotation"}},
		"a raw block volume": {asks: "raw", volumes: more(PodVolume{Name: "raw", Driver: driver, VolumeID: "r", Block: true}), kind: volume.Invalid, party: refusal.PartyPod, says: []string{`"raw"`, "raw block"}},
		"unreadable":         {asks: "data;\n\x1b[2J", volumes: more(PodVolume{Name: "logs"}), kind: volume.Invalid, party: refusal.PartyPod, says: []string{"cannot be read"}},
		"a volume not known": {asks: "x", volumes: []PodVolume{{Name: "x", Unknown: unknown}}, kind: volume.Timeout, party: refusal.PartyPods, says: []string{"the cluster does not answer"}},
		"not among its own":  {asks: "*", kind: volume.Busy, party: refusal.PartyPods, says: []string{volumeID}},
		"an inline volume":   {asks: "pv1", volumes: []PodVolume{{Name: "pv1", Driver: driver}}, asked: true},
	} {
		t.Run(name, func(t *testing.T) {
			pod := Pod{Asks: c.asks, Volumes: c.volumes}
			found, err := pod.ForVolume(driver, volumeID, "pv1")
			if c.says != nil {
				refused(t, err, c.kind, c.party, c.says...)
			} else if err != nil || found.Annotated != c.asked {
				t.Errorf("asked: %+v, %v", found, err)
			}
		})
	}
}

func TestDeferralFields(t *testing.T) {
	for want, change := range map[string]func(*csi.NodePublishVolumeRequest){
		"raw block": func(req *csi.NodePublishVolumeRequest) {
			csidefer.SetRequested(req)
			req.VolumeCapability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		},
		"without defer_fs_ops": func(req *csi.NodePublishVolumeRequest) { csidefer.SetGroup(req.GetVolumeCapability(), "1000", "") },
	} {
		req := &csi.NodePublishVolumeRequest{VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		}}
		change(req)
		refused(t, check.Err(PublishRequest(driver, "ext4", "", req)), volume.Invalid, refusal.PartyNode, want)
	}
}

// TestPublishWithoutPodFollowsOtherPods: where no cluster is asked nothing contradicts the
// way in which other pods have the volume, except the orchestrator's own request.
func TestPublishWithoutPodFollowsOtherPods(t *testing.T) {
	all := &Rules{Policy: &policy.Policy{Rules: []policy.Rule{{Name: "all", Defer: true}}}}
	none := &Rules{Policy: &policy.Policy{}}
	onHost := &State{OnHost: []string{"/other"}, Holder: func(target string) string { return target }}
	got, err := all.Publish(request(nil), onHost, nil)
	check.That(t, err == nil && !got.Defer && got.Rule == heldOnHost, "held on the host: %+v, %v", got, err)
	elsewhere := &State{Elsewhere: []deferral.Status{deferredFor("", false)}}
	got, err = none.Publish(request(nil), elsewhere, nil)
	check.That(t, err == nil && got.Defer && got.Rule == `rule "kata"` && got.Format == volume.FormatNever, "deferred: %+v, %v", got, err)
	asked := request(nil)
	asked.Requested = true
	refused(t, check.Err(none.Publish(asked, onHost, nil)), volume.InUse, refusal.PartyVolume, policy.RuleRequested, "/other")
	elsewhere.Elsewhere[0].Origin.Rule = policy.RuleRequested
	refused(t, check.Err(none.Publish(request(nil), elsewhere, nil)), volume.InUse, refusal.PartyVolume, "/pods/p2/volumes/data")
}

func TestVolumesThatPodsHaveKeepTheirVerdict(t *testing.T) {
	published, rules := deferredFor("db-0", false), &Rules{DefaultHandler: "crust"}
	got, kept := rules.KeptAtPublish(&State{Published: &published, PathOnHost: true})
	check.That(t, kept && got.Defer && got.Rule == `rule "kata"`, "published: %+v, %v", got, kept)
	lost := deferral.Status{Volume: &volume.Volume{Target: "/t"}}
	got, _ = rules.KeptAtPublish(&State{Published: &lost})
	check.That(t, got.Handler == "crust", "a lost volume has the handler %q", got.Handler)
	got, kept = rules.KeptAtPublish(&State{PathOnHost: true})
	check.That(t, kept && !got.Defer, "on the host: %+v, %v", got, kept)
	_, kept = rules.KeptAtPublish(&State{Elsewhere: []deferral.Status{published}, OnHost: []string{"/other"}})
	check.That(t, !kept, "the volume of another pod is taken for this one's")
	for name, c := range map[string]struct {
		state          State
		asDevice, kept bool
	}{
		"new":                     {},
		"deferred":                {state: State{Elsewhere: []deferral.Status{published}}, asDevice: true, kept: true},
		"on the host":             {state: State{OnHost: []string{"/t"}, Staged: &Staged{Rule: "r"}}, kept: true},
		"a device, on the host":   {state: State{OnHost: []string{"/t"}, Staged: &Staged{AsDevice: true}}, asDevice: true, kept: true},
		"staged, no pod":          {state: State{Staged: &Staged{AsDevice: true}}},
		"staged before the front": {state: State{PathOnHost: true}, kept: true},
	} {
		_, asDevice, kept := rules.KeptAtStage(&c.state)
		check.That(t, asDevice == c.asDevice && kept == c.kept, "%s: as a device %v, kept %v", name, asDevice, kept)
	}
}

func TestStageVerdicts(t *testing.T) {
	kata, runc, wrong := podWith("kata", "", PodVolume{}), podWith("runc", "", PodVolume{}), podWith("runc", "*", PodVolume{})
	for name, c := range map[string]struct {
		pods   []Pod
		by     string
		defers bool
		kind   volume.Kind
		party  refusal.Party
	}{
		"one pod":             {pods: []Pod{kata}, by: "kata", defers: true},
		"the first decides":   {pods: []Pod{runc, kata}, by: "runc"},
		"refused pods do not": {pods: []Pod{wrong, kata}, by: "kata", defers: true},
		"all are refused":     {pods: []Pod{wrong, wrong}, by: "runc", kind: volume.Denied, party: refusal.PartyPolicy},
		"no pod":              {kind: volume.Busy, party: refusal.PartyPods},
	} {
		t.Run(name, func(t *testing.T) {
			req := request(nil)
			verdict, err := rulesFor(false).StageForPods(req, c.pods)
			check.That(t, req.PodUID == c.by, "decided by %q", req.PodUID)
			if c.party != "" {
				refused(t, err, c.kind, c.party)
				return
			}
			check.That(t, err == nil && verdict.Defer == c.defers, "got %+v, %v", verdict, err)
		})
	}
}

func TestAccessModesThatCannotBeDeferred(t *testing.T) {
	verdict := &policy.Verdict{Defer: true, Rule: `rule "all"`}
	for m := range csi.VolumeCapability_AccessMode_Mode_name {
		access := csi.VolumeCapability_AccessMode_Mode(m)
		err := CheckDeferrable(request(mode(access)), verdict)
		check.That(t, (err != nil) == slices.Contains(severalNodes, access), "%s: %v", access, err)
		if err != nil {
			refused(t, err, volume.Unsupported, refusal.PartyVolume, access.String(), `rule "all"`)
		}
	}
	reader := request(mode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER))
	reader.ReadOnly = true
	check.Must(t, CheckDeferrable(reader, verdict)) // a reader
}

func TestInlineVolumesAreNoDevices(t *testing.T) {
	inlineID := "csi-" + strings.Repeat("0a", 32)
	for name, c := range map[string]struct {
		id, staging, attribute string
		inline                 bool
	}{
		"a persistent one":      {volumeID, "/staging", "", false},
		"its attribute says so": {volumeID, "", "true", false},
		"an id of kubelet":      {inlineID, "", "false", true}, // the attribute is of the pod's author
		"such an id, staged":    {inlineID, "/staging", "true", false},
	} {
		req := request(func(r *csi.NodePublishVolumeRequest) {
			r.VolumeId, r.StagingTargetPath, r.VolumeContext = c.id, c.staging, map[string]string{"csi.storage.k8s.io/ephemeral": c.attribute}
		})
		check.That(t, req.Inline == c.inline, "%s: %v", name, req.Inline)
		refused(t, InlineAsDevice(req, &policy.Verdict{Defer: true, Rule: "r"}), volume.Unsupported, refusal.PartyDriver, driver, "generic ephemeral")
	}
}

func TestSecondOwners(t *testing.T) {
	reader := mode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)
	readsOnly := podWith("kata", "", PodVolume{ReadOnlyMounts: true})
	for name, c := range map[string]struct {
		change func(*csi.NodePublishVolumeRequest)
		other  bool // the other pod reads only
		pod    *PodContext
		want   string
	}{
		"two readers":                   {change: reader, other: true},
		"a reader and a writer":         {change: reader, want: "the pod ns/db-0"},
		"a writer and a reader":         {other: true, want: "the pod ns/db-0"},
		"a reader that does not say so": {other: true, pod: contextOf(t, readsOnly), want: "say readOnly: true"},
	} {
		elsewhere := []deferral.Status{deferredFor("db-0", c.other)}
		err := CheckSecondWriter(request(c.change), &State{Elsewhere: elsewhere}, c.pod)
		check.That(t, c.want != "" || err == nil, "%s: %v", name, err)
		raw := CheckRawDevice(request(c.change), elsewhere)
		check.That(t, (raw == nil) == (err == nil), "%s: as a raw device %v", name, raw)
		check.That(t, name != "a writer and a reader" || !strings.Contains(err.Error(), "readOnly"), "a writer is told to read only: %v", err)
		if c.want != "" {
			refused(t, err, volume.InUse, refusal.PartyVolume, c.want, "wait until the other pod is gone", "strategy: Recreate")
			refused(t, raw, volume.InUse, refusal.PartyVolume, "raw device", "the pod ns/db-0")
		}
	}
	again := request(nil)
	again.PodNamespace, again.PodName = "ns", "db-0"
	err := CheckSecondWriter(again, &State{Elsewhere: []deferral.Status{deferredFor("db-0", false)}}, nil)
	refused(t, err, volume.InUse, refusal.PartyVolume, "the pod ns/db-0, another one of this name with the UID p2:")
	again = check.Value(PublishRequest(driver, "ext4", "plugins/kubernetes.io/csi/volumeDevices/publish/pv/p1", &csi.NodePublishVolumeRequest{
		VolumeContext: map[string]string{PodUIDKey: "p1", PodNamespaceKey: "ns", PodNameKey: "db-0"},
	}))(t)
	refused(t, CheckRawDevice(again, []deferral.Status{deferredFor("db-0", false)}), volume.InUse, refusal.PartyVolume, "another one of this name with the UID p2")
}

func TestGroups(t *testing.T) {
	named := func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().VolumeMountGroup = "7" }
	readOnly := func(r *csi.NodePublishVolumeRequest) { r.Readonly = true }
	with := func(v PodVolume) *PodContext {
		pod := podWith("kata", "", v)
		pod.FSGroup, pod.FSGroupPolicy = "2000", volume.GroupAlways
		return &PodContext{Pod: &pod}
	}
	for name, c := range map[string]struct {
		change func(*csi.NodePublishVolumeRequest)
		pod    *PodContext
		group  string
		policy volume.GroupPolicy
	}{
		"nobody":                 {},
		"the pod":                {pod: with(PodVolume{}), group: "2000", policy: volume.GroupAlways},
		"not for this volume":    {pod: with(PodVolume{NoGroup: true})},
		"a read-only volume":     {pod: with(PodVolume{}), change: readOnly},
		"the request":            {change: named, group: "7"},
		"the request before all": {change: named, pod: with(PodVolume{}), group: "7", policy: volume.GroupAlways},
	} {
		group, change := Group(request(c.change), c.pod)
		check.That(t, group == c.group && change == c.policy, "%s: %q, %q", name, group, change)
	}
}

func TestMountFlags(t *testing.T) {
	all := []string{`noatime,context="system_u:object_r:x:c1,c2"`, "rw", "fscontext=y"}
	for name, c := range map[string]struct {
		readOnly, labels bool
		want             []string
	}{
		"a writer": {want: []string{"noatime", "rw"}},
		"a reader": {readOnly: true, want: []string{"noatime", "ro"}},
		"labels":   {labels: true, want: []string{"noatime", `context="system_u:object_r:x:c1,c2"`, "rw", "fscontext=y"}},
	} {
		got := MountFlags(all, c.readOnly, c.labels)
		check.That(t, slices.Equal(got, c.want), "%s: %q", name, got)
	}
}

func TestDroppedParameters(t *testing.T) {
	got := IgnoredParameters(map[string]string{
		"blockSize": "4096", "mkfsOptions": "-m0", "numberOfInodes": "", "type": "gp3", "fsType": "xfs", "ext4BigAlloc": "true",
		"fsFormatOptions": "-O quota", "inodeSize": "512", "formatOptions": "-K",
	})
	want := []string{"blockSize", "ext4BigAlloc", "formatOptions", "fsFormatOptions", "inodeSize", "mkfsOptions"}
	check.That(t, slices.Equal(got, want), "got %q, want %q", got, want)
	got = IgnoredParameters(nil)
	check.That(t, len(got) == 0, "got %q of nothing", got)
}

// TestHazards: what runtime-rs does wrong, where the pod's runtime is or may be runtime-rs.
func TestHazards(t *testing.T) {
	const twice, paths, space = "attached a second time", "at several paths", "has a space"
	two := func(a, b PodVolume) []PodVolume {
		a.Driver, a.VolumeID, b.Driver, b.VolumeID = driver, volumeID, driver, volumeID
		return []PodVolume{a, b}
	}
	shared := PodVolume{Together: []string{"app", "sidecar"}}
	for name, c := range map[string]struct {
		runtime    string
		volumes    []PodVolume
		says       string
		containers []string
	}{
		"two containers":          {runtime: "kata-qemu-runtime-rs", volumes: two(shared, PodVolume{}), says: twice, containers: []string{"app", "sidecar"}},
		"by two names":            {runtime: "kata", volumes: two(PodVolume{Together: []string{"b"}}, PodVolume{Together: []string{"a"}}), says: twice, containers: []string{"a", "b"}},
		"the default runtime":     {volumes: two(shared, PodVolume{}), says: twice, containers: []string{"app", "sidecar"}},
		"a container's two paths": {runtime: "kata-qemu-runtime-rs", volumes: two(PodVolume{Mounts: []string{"setup", "app", "setup"}}, PodVolume{}), says: paths, containers: []string{"setup"}},
		"two paths by two names":  {runtime: "kata", volumes: two(PodVolume{Mounts: []string{"a"}}, PodVolume{Mounts: []string{"b", "a"}}), says: paths, containers: []string{"a"}},
		"a space":                 {runtime: "kata-dragonball", volumes: two(PodVolume{Spaced: []string{"app"}}, PodVolume{}), says: space, containers: []string{"app"}},
		"the Go runtime":          {runtime: "kata-qemu", volumes: two(shared, PodVolume{})},
		"one container":           {runtime: "kata", volumes: two(PodVolume{Together: []string{"app"}, Mounts: []string{"setup", "app"}}, PodVolume{})},
		"another volume's two":    {runtime: "kata", volumes: append(two(PodVolume{}, PodVolume{}), PodVolume{Driver: "other", VolumeID: "o", Together: []string{"a", "b"}})},
	} {
		t.Run(name, func(t *testing.T) {
			pod := contextOf(t, Pod{RuntimeHandler: c.runtime, Volumes: c.volumes})
			check.Empty(t, Hazards("crust", pod), "of another handler")
			got := Hazards("kata", pod)
			if c.says == "" && len(got) == 0 {
				return
			}
			check.That(t, len(got) == 1 && strings.Contains(got[0].Text, c.says) && slices.Equal(got[0].Containers, c.containers), "got %+v", got)
		})
	}
}

// TestVolumeInAPod: by its driver and id under each of its names, or inline by its name; another driver's has the same
// id. It is read only if it is so under all of its names.
func TestVolumeInAPod(t *testing.T) {
	pod := &Pod{Volumes: []PodVolume{
		{Name: "other", Driver: "other", VolumeID: volumeID}, {Name: "a", Driver: driver, VolumeID: volumeID, ReadOnlyMounts: true},
		{Name: "b", Driver: driver, VolumeID: "vol-2"}, {Name: "", Driver: driver, VolumeID: "vol-3"}, {Name: "c", Driver: driver, VolumeID: volumeID},
	}}
	for _, c := range []struct{ driver, id, inline, want string }{
		{driver, volumeID, "", "a c"}, {driver, "vol-2", "", "b"}, {driver, "inline", "b", "b"}, {"other", volumeID, "", "other"}, {"other", "inline", "b", ""},
	} {
		check.Equal(t, strings.Join(sys.Map(pod.volumesOf(c.driver, c.id, c.inline), func(v PodVolume) string { return v.Name }), " "), c.want, "%+v", c)
	}
	found, err := pod.ForVolume(driver, volumeID, "")
	check.That(t, err == nil && !found.Volume.ReadOnlyMounts, "%+v, %v", found, err)
}
