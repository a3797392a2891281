package doctor

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/client-go/rest"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func checkDaemon(_ context.Context, n Node, d Daemon) []Finding {
	if d.Starting {
		return []Finding{waiting("%v", d.Err)}
	}
	if !d.up() {
		found := []Finding{failure(d.Advice, "the daemon cannot be asked: %v", d.Err)}
		if holder := sys.LockHolder(n.at(n.Config.RunDir) + "/daemon.lock"); holder != "" && d.Absent {
			found = append(found, failure("end it, or find out why it does not end", "the lock of the run directory %s is held by %s", n.Config.RunDir, holder))
		}
		return found
	}
	if is := d.Node.GetVersion(); is != sys.Version() {
		return []Finding{warning("finish the upgrade (crust-proxy validate says why the package's may not start), or use the crustctl beside that daemon",
			"crust-proxy %s answers, and this program is %s", is, sys.Version())}
	}
	return []Finding{okay("crust-proxy %s answers, %d volumes", d.Node.GetVersion(), len(d.Volumes))}
}

// settleTime is how long the daemon may take after its start to find its sources. What it says of them begins with
// one of settling.
const settleTime = 10 * time.Second

var settling = []string{"sandboxes cannot be followed", "pods cannot be looked up", "driver "}

func (d Daemon) settles() bool {
	started := d.Node.GetStartedAt()
	return started != nil && time.Since(started.AsTime()) < settleTime
}

func checkDaemonFindings(_ context.Context, n Node, d Daemon) (found []Finding) {
	for _, text := range d.Node.GetFindings() {
		if d.settles() && slices.ContainsFunc(settling, func(begin string) bool { return strings.HasPrefix(text, begin) }) {
			found = append(found, waiting("%s", text))
			continue
		}
		severity := show.Either(slices.Contains(d.Node.GetErrors(), text), failure, warning)
		found = append(found, severity("see the daemon's log: "+n.Service.Logs(), "%s", text))
	}
	return orOK(found, "the daemon itself reports nothing wrong")
}

func checkProof(_ context.Context, _ Node, d Daemon) []Finding {
	if why := d.Node.GetProofReason(); why != "" {
		return []Finding{warning("see \"A process still has the device\" in docs/operations.md",
			"the daemon reads the descriptors of all processes to prove that nobody has a device open, because the kernel's own "+
				"count cannot be used: %s. They do not show a descriptor on its way to another process, as Kata 4.2's runtime-rs sends one to QEMU", why)}
	}
	return []Finding{okay("the kernel's own count proves that nobody has a device open")}
}

func checkHandlers(_ context.Context, n Node, d Daemon) []Finding {
	if len(d.Handlers) == 0 {
		return []Finding{failure("configure a runtime handler in the daemon's configuration", "the daemon has no runtime handler, so every publish fails")}
	}
	var found []Finding
	for _, h := range d.Handlers {
		switch {
		case !h.GetHealthy():
			found = append(found, failure("put right what the handler names, then: crustctl handlers",
				"handler %s cannot work: %s", h.GetName(), h.GetProblem()))
		case h.GetName() == "kata" && len(findKataConfigs(n)) == 0:
			found = append(found, okay("handler kata is ready, %d volumes; no configuration of Kata itself can be seen from here", h.GetVolumes()))
		default:
			found = append(found, okay("handler %s works: %d volumes, %d in a sandbox", h.GetName(), h.GetVolumes(), h.GetBound()))
		}
	}
	return found
}

func checkVolumes(_ context.Context, _ Node, d Daemon) (found []Finding) {
	for _, v := range d.Volumes {
		found = append(found, volumeFindings(v)...)
	}
	return orOK(found, "none of %d volumes is degraded or has failed", len(d.Volumes))
}

func volumeFindings(v *adminv1.Volume) (found []Finding) {
	look := "crustctl get " + show.ShortID(v.GetId())
	switch {
	case v.GetReleasedByForce():
		return []Finding{failure("delete its pod, or where that has gone: "+toEnd(v)+"; until then give the device to nobody else",
			"volume %s was released by force %s ago, and its device %s is still open in %s, which may write to it beside the next owner",
			v.GetTargetPath(), since(v.GetHeldSince()), v.GetDevice(), v.GetHeldBy())}
	case v.GetState() == adminv1.VolumeState_VOLUME_STATE_DEGRADED:
		found = []Finding{failure("crustctl reconcile, then "+look, "volume %s is degraded: %s", v.GetTargetPath(), cmp.Or(v.GetLastError(), noReason))}
	case v.GetCondition().GetAbnormal():
		found = []Finding{failure(look+"; the sandbox reports this, look into the pod",
			"volume %s is abnormal: %s", v.GetTargetPath(), cmp.Or(v.GetCondition().GetMessage(), noReason))}
	case v.GetHeldBy() != "": // below: it is the last error, too
	case v.GetState() == adminv1.VolumeState_VOLUME_STATE_REFUSED:
		found = []Finding{warning(look+"; its pod does not start", "refused by the %s: %s", cmp.Or(v.GetRefusedBy(), noReason), cmp.Or(v.GetLastError(), noReason))}
	case v.GetLastError() != "" && !sys.IsEmptyDir(v.GetTargetPath()): // runtime-rs has no stats of Kata's own emptyDirs
		named := "volume " + v.GetTargetPath() + ": " // most errors name it already
		found = []Finding{warning(look, "%s%s", named, strings.TrimPrefix(v.GetLastError(), named))}
	case v.GetGroupProblem() != "":
		found = []Finding{warning("correct that; then "+look, "volume %s of pod %s with group %s: %s", v.GetTargetPath(),
			show.Pod(v), v.GetSupplementalGroup(), v.GetGroupProblem())}
	}
	if v.GetHeldBy() != "" {
		found = append(found, warning("if its pod has gone: "+toEnd(v),
			"volume %s: its device %s is to be released or claimed, and has been open in %s for %s", v.GetTargetPath(), v.GetDevice(),
			v.GetHeldBy(), since(v.GetHeldSince())))
	}
	if v.GetFrozenSince() != nil {
		found = append(found, warning("crustctl thaw "+show.ShortID(v.GetId()), "volume %s is frozen: its writes have been held for %s, "+
			"and go on by themselves in %s", v.GetTargetPath(), since(v.GetFrozenSince()), show.Duration(time.Until(v.GetFrozenUntil().AsTime()))))
	}
	return found
}

// toEnd says how a sandbox ends that still has the volume. The handler crust cannot tell whether one has ended.
func toEnd(v *adminv1.Volume) string {
	return show.Either(v.GetHandler() == "crust", "end its sandbox (crictl stopp, ctr task rm), or unmount it", "crustctl end "+v.GetId())
}

func since(at *timestamppb.Timestamp) string { return show.Duration(time.Since(at.AsTime())) }

const noReason = "no reason given"

const clusterWait = 10 * time.Second

// checkCluster asks the API server as the daemon does, but not from within the daemon's unit.
func checkCluster(ctx context.Context, n Node, d Daemon) []Finding {
	cluster := n.Config.Cluster
	if !cluster.On() {
		return []Finding{okay("no cluster is asked by this daemon's configuration")}
	}
	node, err := cluster.Node()
	if err != nil {
		return []Finding{failure("set cluster.nodeName in crust-proxy's configuration", "%v", err)}
	}
	ctx, cancel := context.WithTimeout(ctx, clusterWait)
	defer cancel()
	var found []Finding
	for _, one := range apiserver.Try(ctx, n.identity(), node) {
		switch {
		case one.Err == nil:
			continue
		case errors.Is(one.Err, rest.ErrNotInCluster):
			return []Finding{skipped("not tried from here: the daemon asks by the service account of its pod")}
		case errors.Is(one.Err, fs.ErrPermission):
			return []Finding{skipped("not tried: %s may not be read by this user (run as root)", cluster.Kubeconfig)}
		}
		found = append(found, failure("kubectl get nodes shows the names; the rights that it takes are in docs/front.md. "+
			"The daemon goes on and serves the pods that it knows", "this is not the case: %s: %v", one.What, one.Err))
	}
	unreachable := func(text string) bool {
		return strings.Contains(text, "pods cannot be looked up") && strings.Contains(text, "cannot be reached")
	}
	if len(found) == 0 && d.up() && !d.settles() && slices.ContainsFunc(d.Node.GetFindings(), unreachable) {
		found = append(found, show.Either(n.Service.InPod, failure(n.Service.Logs(), "the API server answers here and not to the daemon in the same pod"), failure("copy /usr/share/crust-proxy/cluster.conf into /etc/systemd/system/crust-proxy.service.d/, then "+
			"systemctl daemon-reload and restart crust-proxy",
			"the API server answers here and not to the daemon: systemd's IP filter may keep the daemon off the network")))
	}
	return orOK(found, "the API server answers, knows node %s and gives the rights to look up its pods", node)
}
