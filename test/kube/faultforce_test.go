//go:build system

package kube_test

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestPodsForgottenWhileKubeletIsAway: pods are removed by force, and the kubelet that
// comes back has nobody to tell it of them. It finds them on the node, and what they
// have is given back.
func TestPodsForgottenWhileKubeletIsAway(t *testing.T) {
	k := cluster.On(t)
	lanes := newLanes(k)
	stay, forgotten := running(k, lanes, 0), running(k, lanes, 1)
	k.Kubelet.Kill()
	for _, w := range forgotten {
		k.Eventually("pod "+w.Name+" tells what it has written", func(context.Context) error { return w.wrote(0) })
		at := int64(0)
		k.Must(k.Client.CoreV1().Pods(cluster.Namespace).Delete(t.Context(), w.Name, metav1.DeleteOptions{GracePeriodSeconds: &at}))
	}
	k.Must(k.Kubelet.Start())
	hasLeft(k, forgotten)
	for _, w := range stay {
		w.unchanged(k, false)
	}
	// The volumes are free for others, with all that was written.
	for _, w := range append(running(k, lanes, 4), stay...) {
		w.keeps(k)
		leave(k, []*writer{w})
		hasLeft(k, []*writer{w})
	}
}
