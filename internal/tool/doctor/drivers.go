package doctor

import (
	"cmp"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// How long a driver may take to become ready, and kubelet to register it.
const (
	readyTime   = 10 * time.Second
	kubeletTime = time.Minute
)

// checkDrivers checks the drivers behind the front.
func checkDrivers(_ Node, d Daemon) []Finding {
	ready := map[string]bool{}
	for _, one := range d.Drivers {
		ready[one.GetName()] = ready[one.GetName()] || one.GetReady()
	}
	var found []Finding
	for _, one := range d.Drivers {
		found = append(found, driverFindings(one, ready[one.GetName()])...)
	}
	return orOK(found, "%d drivers behind crust-proxy are ready and registered with kubelet", len(d.Drivers))
}

// driverFindings returns what is wrong with one registrar and its driver. served is set if the driver is ready through
// this registrar or another one.
func driverFindings(d *adminv1.Driver, served bool) []Finding {
	const look = "look into the driver's pod on this node and its log"
	name, kubelet, problem := cmp.Or(d.GetName(), "of a registrar that does not answer"), d.GetKubeletStatus(), cmp.Or(d.GetProblem(), noReason)
	down, waited := time.Since(d.GetSince().AsTime()), time.Since(d.GetWaitingSince().AsTime())
	switch {
	case d.GetReady() && d.GetProblem() != "":
		return []Finding{failure("kubectl get csinode NODE -o yaml, and kubelet's log: what removes the driver there",
			"driver %s: %s", name, problem)}
	case !d.GetReady() && served:
		return []Finding{warning("remove the second registrar", "driver %s is served, and a second registrar is not taken: %s", name, problem)}
	case !d.GetReady() && down < readyTime:
		return []Finding{waiting("driver %s: %s", name, problem)}
	case !d.GetReady():
		return []Finding{failure(look+"; if it was removed for good, remove the socket of its registrar",
			"driver %s has not been ready for %s, and kubelet's calls to it fail: %s", name, show.Duration(down), problem)}
	case d.GetWaitingSince() == nil:
		return nil
	case strings.HasPrefix(kubelet, "refused: "):
		return []Finding{failure("remove what kubelet names, or "+look, "kubelet does not register driver %s: %s", name, kubelet)}
	case waited < kubeletTime:
		return []Finding{waiting("driver %s: %s", name, kubelet)}
	}
	return []Finding{warning("see that kubelet runs, and that front.kubeletRegistry is its directory",
		"kubelet has not registered driver %s for %s: %s", name, show.Duration(waited), kubelet)}
}
