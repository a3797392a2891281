//go:build system

package cluster

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// TestControlPlane needs no root: it is what tests of policies and rights stand on.
func TestControlPlane(t *testing.T) {
	c := StartControlPlane(t)
	if err := c.Apply("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: kept}\ndata: {a: b}\n"); err != nil {
		t.Fatal(err)
	}
	for name, end := range map[string]func() error{
		"asked to end": c.APIServer.Stop,
		"killed":       func() error { c.APIServer.Kill(); c.Etcd.Kill(); return c.Etcd.Launch() },
	} {
		if err := end(); err != nil {
			t.Fatal(name, err)
		}
		if err := c.APIServer.Start(); err != nil {
			t.Fatal(name, err)
		}
		kept, err := c.Client.CoreV1().ConfigMaps("default").Get(t.Context(), "kept", metav1.GetOptions{})
		if err != nil || kept.Data["a"] != "b" {
			t.Errorf("%s: %v, %v", name, kept.Data, err)
		}
	}
	nodeHasFewRights(t, c)
}

func nodeHasFewRights(t *testing.T, c *ControlPlane) {
	t.Helper()
	config, err := restConfig(c.NodeKubeconfig("node-a"))
	if err != nil {
		t.Fatal(err)
	}
	node, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	nodes := node.CoreV1().Nodes()
	if _, err := nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}}, metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
	_, err = nodes.Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-b"}}, metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) {
		t.Errorf("a node makes another node: %v", err)
	}
	_, err = node.CoreV1().PersistentVolumeClaims("default").List(t.Context(), metav1.ListOptions{})
	if !apierrors.IsForbidden(err) {
		t.Errorf("a node lists claims: %v", err)
	}
}
