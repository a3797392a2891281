package daemon

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/apiserver"
)

func TestIdentityInTheCluster(t *testing.T) {
	cfg := config.Default()
	cfg.Cluster = config.Cluster{Kubeconfig: "/etc/kubernetes/kubelet.conf", NodeName: "node-1"}
	identity, name, err := clusterOf(&cfg)
	if err != nil || name != "node-1" || identity.Kubeconfig != cfg.Cluster.Kubeconfig || identity.InCluster ||
		!strings.HasPrefix(identity.UserAgent, "crust-proxy/") {
		t.Errorf("%+v, %q, %v", identity, name, err)
	}
	cfg.Cluster.NodeName = ""
	host, err := apiserver.NodeName()
	if err != nil {
		t.Fatal(err)
	}
	if _, name, err = clusterOf(&cfg); err != nil || name != host {
		t.Errorf("got %q, %v; want %q", name, err, host)
	}
}

// TestWithoutAClusterThereIsNoSourceOfPods: an interface around a nil pointer would
// be one.
func TestWithoutAClusterThereIsNoSourceOfPods(t *testing.T) {
	cfg := config.Default()
	for name, change := range map[string]func(){
		"off":       func() {},
		"front off": func() { cfg.Cluster.Kubeconfig = "/k" },
	} {
		change()
		cluster, err := newCluster(&cfg, nil, nil)
		if err != nil || podSource(cluster) != nil || (&daemon{cluster: cluster}).remarks() != nil {
			t.Errorf("%s: %v, %v", name, err, cluster)
		}
	}
}
