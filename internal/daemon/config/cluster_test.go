package config

import (
	"strings"
	"testing"
)

func TestClusterIsCheckedByKey(t *testing.T) {
	for file, want := range map[string]string{ // what the error says; empty is none
		"": "",
		"cluster: {kubeconfig: /etc/kubernetes/kubelet.conf}":                   "",
		"cluster: {inCluster: true, nodeName: ip-10-0-0-1.eu.compute.internal}": "",
		"cluster: {kubeconfig: kubelet.conf}":                                   "cluster.kubeconfig",
		"cluster: {kubeconfig: /k, inCluster: true}":                            "cluster.inCluster",
		"cluster: {kubeconfig: /k, nodeName: Node-1}":                           "cluster.nodeName",
		"cluster: {kubeconfig: /k, nodeName: \"a,metadata.name!=b\"}":           "cluster.nodeName",
		"cluster: {nodename: a}":                                                "cluster.nodename: unknown key",
	} {
		_, err := load(t, file)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: got %v, want %q", file, err, want)
		}
	}
}

func TestClusterIsOffUnlessNamed(t *testing.T) {
	off, err := load(t, "cluster: {nodeName: a}")
	if err != nil || off.Cluster.On() {
		t.Errorf("got %+v, %v", off.Cluster, err)
	}
	on, err := load(t, "", "--kubeconfig", "/etc/kubernetes/kubelet.conf", "--node-name", "a")
	if err != nil || !on.Cluster.On() || on.Cluster.NodeName != "a" {
		t.Errorf("got %+v, %v", on.Cluster, err)
	}
}
