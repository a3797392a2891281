package doctor

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// apiServer answers as one does that knows node-1, and writes a kubeconfig for it.
func apiServer(t *testing.T, tr tree, refuse string) {
	t.Helper()
	kinds := map[string]string{
		"/api/v1/pods":                            `{"apiVersion":"v1","kind":"PodList","metadata":{}}`,
		"/apis/node.k8s.io/v1/runtimeclasses":     `{"apiVersion":"node.k8s.io/v1","kind":"RuntimeClassList","metadata":{}}`,
		"/apis/storage.k8s.io/v1/csidrivers":      `{"apiVersion":"storage.k8s.io/v1","kind":"CSIDriverList","metadata":{}}`,
		"/apis/storage.k8s.io/v1/csinodes/node-1": `{"apiVersion":"storage.k8s.io/v1","kind":"CSINode","metadata":{"name":"node-1"},"spec":{"drivers":[]}}`,
		"/api/v1/nodes/node-1":                    `{"apiVersion":"v1","kind":"Node","metadata":{"name":"node-1"}}`,
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if answer := kinds[r.URL.Path]; answer != "" && !strings.HasSuffix(r.URL.Path, refuse) {
			_, _ = fmt.Fprint(w, answer)
			return
		}
		w.WriteHeader(http.StatusForbidden)
		_, _ = fmt.Fprint(w, `{"apiVersion":"v1","kind":"Status","status":"Failure","reason":"Forbidden","code":403,"message":"forbidden"}`)
	}))
	t.Cleanup(server.Close)
	tr.write("/etc/kubernetes/kubelet.conf", fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\n"+
		"clusters: [{name: c, cluster: {server: %q}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n"+
		"users: [{name: u, user: {token: t}}]\n", server.URL))
	tr.chmod("/etc/kubernetes/kubelet.conf", 0o600)
}

func TestCluster(t *testing.T) {
	cases := []bad{
		{"off", "cluster", func(_ tree, n *Node, _ *Daemon) { n.Kubeconfig = "" }, OK, "no cluster is asked", ""},
		{"in cluster", "cluster", func(_ tree, n *Node, _ *Daemon) { n.InCluster = true }, OK, "service account", ""},
		{"all is well", "cluster", func(tr tree, _ *Node, _ *Daemon) { apiServer(t, tr, "nothing") }, OK, "node node-1", ""},
		{"no file", "cluster", func(tree, *Node, *Daemon) {}, Error, "does not exist", "docs/front.md"},
		{"no right", "cluster", func(tr tree, _ *Node, _ *Daemon) { apiServer(t, tr, "csidrivers") }, Error, "CSI drivers can be listed", "docs/front.md"},
		{"no CSINode", "cluster", func(tr tree, _ *Node, _ *Daemon) { apiServer(t, tr, "csinodes/node-1") }, Error, "the CSINode of node node-1 can be read", "docs/front.md"},
		{"another name", "cluster", func(tr tree, n *Node, _ *Daemon) {
			apiServer(t, tr, "pods")
			n.NodeName = "node-2"
		}, Error, `is "node-2" this node's name`, "kubectl get nodes"},
		{"the daemon is kept off", "cluster", func(tr tree, _ *Node, d *Daemon) {
			apiServer(t, tr, "nothing")
			d.Node.Findings = []string{"pods cannot be looked up: the API server x cannot be reached: i/o timeout"}
		}, Warn, "systemd's IP filter", "cluster.conf"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			tr := newTree(t)
			node, daemon := tr.node, healthyDaemon()
			node.Kubeconfig, node.NodeName = "/etc/kubernetes/kubelet.conf", "node-1"
			c.spoil(tr, &node, &daemon)
			assertFinding(t, findingsOf(t, c.check, node, daemon), c)
		})
	}
}
