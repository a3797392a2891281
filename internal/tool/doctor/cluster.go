package doctor

import (
	"context"
	"errors"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
)

const clusterWait = 10 * time.Second

// checkCluster asks the API server as the daemon does, but not from within the daemon's unit.
func checkCluster(ctx context.Context, n Node, d Daemon) []Finding {
	switch {
	case n.InCluster:
		return []Finding{okay("not tried from here: the daemon asks by the service account of its pod")}
	case n.Kubeconfig == "":
		return []Finding{okay("no cluster is asked by this daemon's configuration")}
	}
	node := n.NodeName
	if node == "" {
		name, err := apiserver.NodeName()
		if err != nil {
			return []Finding{failure("set cluster.nodeName in crust-proxy's configuration", "%v", err)}
		}
		node = name
	}
	ctx, cancel := context.WithTimeout(ctx, clusterWait)
	defer cancel()
	var found []Finding
	for _, one := range apiserver.Try(ctx, apiserver.Identity{Kubeconfig: n.at(n.Kubeconfig), UserAgent: "crustctl"}, node) {
		switch {
		case one.Err == nil:
			continue
		case errors.Is(one.Err, fs.ErrPermission):
			return []Finding{okay("not tried: %s may not be read by this user (run as root)", n.Kubeconfig)}
		}
		found = append(found, failure("kubectl get nodes shows the names; the rights that it takes are in docs/front.md. "+
			"The daemon goes on and serves the pods that it knows", "this is not the case: %s: %v", one.What, one.Err))
	}
	if len(found) == 0 && daemonCannotReach(d) && n.Service.InPod {
		found = append(found, warning(n.Service.Logs(), "the API server answers here and not to the daemon in the same pod"))
	} else if len(found) == 0 && daemonCannotReach(d) {
		found = append(found, warning("copy /usr/share/crust-proxy/cluster.conf into /etc/systemd/system/crust-proxy.service.d/, then "+
			"systemctl daemon-reload and restart crust-proxy",
			"the API server answers here and not to the daemon: systemd's IP filter may keep the daemon off the network"))
	}
	return orOK(found, "the API server answers, knows node %s and gives the rights to look up its pods", node)
}

// daemonCannotReach reports whether the daemon cannot reach the API server.
func daemonCannotReach(d Daemon) bool {
	return d.up() && slices.ContainsFunc(d.Node.GetFindings(), func(text string) bool {
		return strings.Contains(text, "pods cannot be looked up") && strings.Contains(text, "cannot be reached")
	})
}
