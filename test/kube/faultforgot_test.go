//go:build system

package kube_test

import (
	"context"
	"time"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// forgetTime is how long a volume has to be staged for nobody before we take it that
// kubelet does not know of it. It tries more often than that.
const forgetTime = 20 * time.Second

// haveLeft waits until the pods have gone with all that they had.
//
// Kubelet itself forgets a volume where it ends after the last unpublish and before
// it has removed the staging directory: when it starts it looks for volumes in the
// directories of pods, and there is none any more. That is so with every driver. Such a
// volume is given back, or its empty directory is removed where the unstage was served,
// when the next pod that has it goes.
func (m *matrix) haveLeft(k *cluster.Kube, r round, leaving []*writer, logf func(string, ...any)) {
	k.T.Helper()
	if !r.has("kubelet") {
		hasLeft(k, leaving)
		return
	}
	for _, w := range leaving {
		k.Eventually("pod "+w.Name+" has gone", w.hasGoneButStaged)
	}
	var staged []*writer
	for end := time.Now().Add(forgetTime); ; time.Sleep(100 * time.Millisecond) {
		staged = nil
		for _, w := range leaving {
			if w.hasGone(k.T.Context()) != nil {
				staged = append(staged, w)
			}
		}
		if len(staged) == 0 || time.Now().After(end) {
			break
		}
	}
	for _, w := range staged {
		logf("kubelet has forgotten the volume of pod %s: a pod comes and goes", w.Name)
		visitor := newWriter(m.k, w.Name+"-visitor", w.class(), w.on)
		visitor.settle(k)
		visitor.keeps(k)
		leave(k, []*writer{visitor})
		hasLeft(k, []*writer{visitor})
	}
}

// class is the pod's runtime class.
func (w *writer) class() string {
	if w.Spec.RuntimeClassName == nil {
		return cluster.Runc
	}
	return *w.Spec.RuntimeClassName
}

// What a volume that was staged has on the node.
const (
	stage     = "stage"
	device    = "device"
	directory = "staging directory"
)

// hasGoneButStaged tells whether nothing of the pod is left, but for the volume's
// stage perhaps.
func (w *writer) hasGoneButStaged(ctx context.Context) error {
	return w.hasGoneBut(ctx, stage, device, directory)
}
