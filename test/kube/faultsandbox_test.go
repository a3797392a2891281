//go:build system

package kube_test

import (
	"context"
	"encoding/json"
	"errors"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestSandboxesEndWhileProxyIsAway: kubelet puts new sandboxes in the place of those
// that have ended, under the same pods and without a word to any driver. They have
// the volumes again, and crust-proxy finds them there when it is back.
func TestSandboxesEndWhileProxyIsAway(t *testing.T) {
	k := cluster.On(t)
	pods := running(k, newLanes(k), 0)
	k.Proxy.Kill()
	for _, w := range pods {
		k.Must(syscall.Kill(pause(k, w), syscall.SIGKILL))
	}
	for _, w := range pods {
		soon(k, "the process that wrote in pod "+w.Name+" ends", func() bool { _, err := born(w.pid); return err != nil })
		was := w.sandbox
		w.settle(k) // it goes on where it has stopped
		if w.sandbox == was {
			t.Errorf("pod %s has its sandbox still", w.Name)
		}
		w.keeps(k)
	}
	k.Must(k.Proxy.Start())
	k.Eventually("crust-proxy knows the new sandboxes", func(ctx context.Context) error { return well(ctx, pods) })
	leave(k, pods)
	hasLeft(k, pods)
}

// pause is the process that keeps a pod's sandbox alive.
func pause(k *cluster.Kube, w *writer) int {
	k.T.Helper()
	var told struct {
		Pid int `json:"pid"`
	}
	k.Eventually("containerd tells the process of pod "+w.Name+"'s sandbox", func(ctx context.Context) error {
		reply, err := k.Containerd.CRI.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: w.sandbox, Verbose: true})
		if err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(reply.GetInfo()["info"]), &told); err != nil {
			return err
		}
		if told.Pid <= 1 {
			return errors.New("it has none")
		}
		return nil
	})
	return told.Pid
}
