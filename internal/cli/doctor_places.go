package cli

import (
	"fmt"

	"sigs.k8s.io/yaml"

	"github.com/crust-proxy/crust-proxy/internal/doctor"
)

// places is what doctor needs of the daemon's configuration. An absent key leaves the
// usual place.
type places struct {
	RunDir, KubeletRoot string
	RuntimeSocket       struct{ Path string }
	Handlers            struct {
		Kata struct{ DirectVolumes, GoSandboxes, RustSandboxes, TempDir string }
	}
	Front struct {
		Enabled                   bool
		KubeletRegistry, Registry string
	}
	Cluster struct {
		Kubeconfig, NodeName string
		InCluster            bool
	}
	Containerd struct{ Socket *string } // a pointer, because an empty one says that there is none
	CRI        struct{ Socket string }
}

// readPlaces puts the places of a configuration into the node, except those that are
// given by a flag.
func readPlaces(config string, node *doctor.Node, given func(flag string) bool) error {
	var p places
	if err := yaml.Unmarshal([]byte(config), &p); err != nil {
		return fmt.Errorf("the daemon's configuration cannot be read: %w", err)
	}
	set := func(flag string, to *string, value string) {
		if value != "" && !given(flag) {
			*to = value
		}
	}
	set("run-dir", &node.RunDir, p.RunDir)
	set("kubelet-root", &node.KubeletRoot, p.KubeletRoot)
	set("runtime-socket", &node.RuntimeSocket, p.RuntimeSocket.Path)
	set("kata-dir", &node.KataDir, p.Handlers.Kata.DirectVolumes)
	set("kubelet-root", &node.KubeletRegistry, p.Front.KubeletRegistry)
	set("kubelet-root", &node.FrontRegistry, p.Front.Registry)
	node.KataTempDir = p.Handlers.Kata.TempDir
	node.CRISocket = p.CRI.Socket
	if p.Front.Enabled { // else nobody asks for pods
		node.Kubeconfig, node.InCluster, node.NodeName = p.Cluster.Kubeconfig, p.Cluster.InCluster, p.Cluster.NodeName
	}
	node.Service.InPod = node.Service.InPod || p.Cluster.InCluster
	if p.Containerd.Socket != nil && !given("containerd-socket") {
		node.ContainerdSocket = *p.Containerd.Socket
	}
	for _, dir := range []string{p.Handlers.Kata.GoSandboxes, p.Handlers.Kata.RustSandboxes} {
		if dir != "" {
			node.SandboxDirs = append(node.SandboxDirs, dir)
		}
	}
	return nil
}
