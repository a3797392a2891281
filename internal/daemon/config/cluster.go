package config

import (
	"errors"
	"regexp"
)

// Cluster is the Kubernetes cluster to ask about the pods of this node.
type Cluster struct {
	// Kubeconfig is the path of a kubeconfig, such as kubelet's own; empty is off.
	Kubeconfig string `json:"kubeconfig"`
	// InCluster uses the service account of the pod that the daemon runs in.
	InCluster bool `json:"inCluster"`
	// NodeName is this node's name in the cluster; empty is the host name in lower
	// case, as for kubelet.
	NodeName string `json:"nodeName"`
}

// On reports whether a cluster is configured.
func (c Cluster) On() bool { return c.Kubeconfig != "" || c.InCluster }

var nodeForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`) // a DNS subdomain

func (c Cluster) validate() error {
	return errors.Join(
		absoluteOrEmpty("cluster.kubeconfig", c.Kubeconfig),
		wrong(c.Kubeconfig != "" && c.InCluster, "cluster.inCluster: the API server is asked by one identity: leave "+
			"cluster.kubeconfig empty for the service account of the daemon's pod, or set inCluster to false"),
		wrong(c.NodeName != "" && (len(c.NodeName) > 253 || !nodeForm.MatchString(c.NodeName)),
			"cluster.nodeName: %q is not a node's name: kubectl get nodes shows it", c.NodeName))
}
