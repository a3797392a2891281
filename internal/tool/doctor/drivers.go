package doctor

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"

	nodev1 "k8s.io/api/node/v1"

	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// How long a driver may take to become ready, and kubelet to register it.
const (
	readyTime   = 10 * time.Second
	kubeletTime = time.Minute
)

func checkDrivers(_ context.Context, _ Node, d Daemon) (found []Finding) {
	ready := map[string]bool{}
	for _, one := range d.Drivers {
		ready[one.GetName()] = ready[one.GetName()] || one.GetReady()
	}
	for _, one := range d.Drivers {
		if one.GetDirectlyRegistered() {
			found = append(found, failure("see check daemon-findings, and CrustProxyDriverBypassed in docs/runbooks.md",
				"driver %s is registered with kubelet directly, too: kubelet may call it past crust-proxy, also for volumes that are deferred", one.GetName()))
		}
		found = append(found, driverFindings(one, ready[one.GetName()])...)
	}
	return orOK(found, "%d drivers behind crust-proxy are ready and registered with kubelet", len(d.Drivers))
}

// driverFindings returns what is wrong with one registrar and its driver. served is set if the driver is ready through
// this registrar or another one.
func driverFindings(d *adminv1.Driver, served bool) []Finding {
	const look = "look into the driver's pod on this node and its log"
	name, kubelet, problem := cmp.Or(d.GetName(), "whose name is not known"), d.GetKubeletStatus(), cmp.Or(d.GetProblem(), noReason)
	down, waited := time.Since(d.GetSince().AsTime()), time.Since(d.GetWaitingSince().AsTime())
	switch {
	case d.GetName() == "" && down >= readyTime: // kubelet never had it from us
		return []Finding{warning(look+"; if it was removed for good, remove the socket of its registrar",
			"a registrar has not said its driver's name for %s: %s", show.Duration(down), problem)}
	case strings.HasPrefix(kubelet, "refused: "):
		return []Finding{failure("remove what kubelet names, or "+look, "kubelet does not register driver %s: %s", name, cmp.Or(d.GetProblem(), kubelet))}
	case d.GetReady() && d.GetProblem() != "":
		return []Finding{failure("kubectl get csinode NODE -o yaml, and kubelet's log: what removes the driver there", "driver %s: %s", name, problem)}
	case !d.GetReady() && served:
		return []Finding{warning("remove the second registrar", "driver %s is served, and a second registrar is not taken: %s", name, problem)}
	case !d.GetReady() && down < readyTime:
		return []Finding{waiting("driver %s: %s", name, problem)}
	case !d.GetReady():
		return []Finding{failure(look+"; if it was removed for good, remove the socket of its registrar",
			"driver %s has not been ready for %s, and kubelet's calls to it fail: %s", name, show.Duration(down), problem)}
	case d.GetWaitingSince() == nil:
		return nil
	case waited < kubeletTime:
		return []Finding{waiting("driver %s: %s", name, kubelet)}
	}
	return []Finding{warning("see that kubelet runs, and that front.kubeletRegistry is its directory",
		"kubelet has not registered driver %s for %s: %s", name, show.Duration(waited), kubelet)}
}

// csiDriver is what a deferred volume may lack of what a CSIDriver object asks kubelet for. The other fields, such as
// podInfoOnMount, attachRequired and fsGroupPolicy, may have any value.
type csiDriver struct {
	Metadata struct{ Name string }
	Spec     struct{ RequiresRepublish, SELinuxMount bool }
}

// identity is the daemon's, by which the API server is asked.
func (n Node) identity() apiserver.Identity {
	of := n.Config.Cluster
	return apiserver.Identity{Kubeconfig: show.When(!of.InCluster, n.at(of.Kubeconfig)), InCluster: of.InCluster, UserAgent: "crustctl"}
}

// checkCSIDrivers checks the CSIDriver objects of the drivers behind the front, where a cluster is asked.
func checkCSIDrivers(ctx context.Context, n Node, d Daemon) (found []Finding) {
	cluster := n.Config.Cluster
	switch {
	case !cluster.On():
		return []Finding{okay("no cluster is asked by this daemon's configuration")}
	case len(d.Drivers) == 0:
		return []Finding{show.Either(d.up(), okay("no driver is known to be behind crust-proxy"), skipped("the daemon did not say which drivers are behind it"))}
	}
	who := n.identity()
	var list struct{ Items []csiDriver }
	if err := apiserver.Get(ctx, who, cluster.NodeName, "/apis/storage.k8s.io/v1/csidrivers", &list); err != nil {
		return []Finding{skipped("not looked at: %v", err)}
	}
	objects := make(map[string]csiDriver, len(list.Items))
	for _, object := range list.Items {
		objects[object.Metadata.Name] = object
	}
	filesystems, _ := n.read("/proc/filesystems")   // selinuxfs is one where SELinux is on
	enforce, _ := n.read("/sys/fs/selinux/enforce") // missing where no policy was loaded, and in a pod
	on := bytes.HasPrefix(enforce, []byte("1")) || n.Service.InPod && bytes.Contains(filesystems, []byte("\tselinuxfs\n"))
	labels := on && d.has("crust")
	for _, driver := range d.Drivers {
		if object, there := objects[driver.GetName()]; there {
			found = append(found, object.findings(driver.GetMode() == volume.WayBlock, labels)...)
		}
		if driver.GetName() == azureDisk {
			found = append(found, n.azureClasses(ctx, who)...)
		}
	}
	return orOK(found, "the CSIDriver objects ask kubelet for nothing that a deferred volume lacks")
}

// findings are those for a driver that is asked for block devices or not, and on a node where the runtime handler crust
// depends on SELinux labels or not.
func (c csiDriver) findings(block, labels bool) (found []Finding) {
	if c.Spec.RequiresRepublish && block {
		found = append(found, warning("where its volumes need that, let a rule with `defer: false` match them; else set requiresRepublish: false",
			"driver %s: its CSIDriver object has requiresRepublish, but the driver is not called again while a volume is deferred: what it "+
				"renews then, such as by new tokens (tokenRequests), does not reach the pod", c.Metadata.Name))
	}
	if labels && !c.Spec.SELinuxMount {
		found = append(found, warning("set seLinuxMount: true in the CSIDriver object",
			"driver %s: its CSIDriver object lacks seLinuxMount, so nothing labels the files of a deferred volume: with SELinux on this "+
				"node, containers of crust-runc may be denied them", c.Metadata.Name))
	}
	return found
}

// azureDisk is the driver that, in its own Kata mode, hands volumes of pods of an annotated RuntimeClass to Kata by
// itself, raw block volumes too, and provides no device for these.
const azureDisk, azureKata = "disk.csi.azure.com", "azure.csi.disk/kata-mount"

// azureClasses finds the RuntimeClasses for whose pods azuredisk and crust-proxy both hand volumes to Kata.
func (n Node) azureClasses(ctx context.Context, who apiserver.Identity) (found []Finding) {
	var list nodev1.RuntimeClassList
	if err := apiserver.Get(ctx, who, n.Config.Cluster.NodeName, "/apis/node.k8s.io/v1/runtimeclasses", &list); err != nil {
		return []Finding{skipped("RuntimeClasses are not looked at: %v", err)}
	}
	for _, class := range list.Items {
		if class.Annotations[azureKata] == "direct-volume" && n.defers(azureDisk, class.Handler) {
			found = append(found, warning(fmt.Sprintf("remove the annotation, or let a rule with `defer: false` match driver %s", azureDisk),
				"RuntimeClass %s has the annotation %s, and crust-proxy defers volumes of driver %s for its pods: if the driver runs with "+
					"node.enableKataMount, it hands them to Kata by itself, and crust-proxy gets no device: the pods do not start",
				class.Name, azureKata, azureDisk))
		}
	}
	return found
}

// defers reports whether the policy may defer volumes of a driver for pods of a runtime handler.
func (n Node) defers(driver, handler string) bool {
	for _, r := range n.Config.Policy.Rules {
		alone := policy.Policy{Rules: []policy.Rule{{Drivers: r.Drivers, RuntimeHandlers: r.RuntimeHandlers, Defer: true}}}
		verdict, err := alone.Decide(policy.Input{Driver: driver, PodKnown: true, RuntimeHandler: handler})
		switch others := len(r.Filesystems) + len(r.AccessModes) + len(r.Namespaces) + len(r.StorageClasses) + len(r.Needs); {
		case err != nil || !verdict.Defer:
		case r.Defer:
			return true
		case others == 0 && !r.Annotated:
			return false // no later rule decides
		}
	}
	return false
}
