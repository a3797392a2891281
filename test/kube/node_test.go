//go:build system

package kube_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestNodeReboots has the same pods find their volumes again after the node was off, those
// in sandboxes and one beside them.
func TestNodeReboots(t *testing.T) {
	k := cluster.On(t)
	k.StartSidecars(cluster.Block, cluster.Native)
	beside := k.NewClaim(cluster.VolumeOptions{Name: "beside", Driver: cluster.Block})
	all := map[*cluster.Pod]*cluster.Volume{k.NewPod("beside", cluster.Runc).With(beside, "/data").Start(): beside.Bound()}
	for way, driver := range ways {
		s := k.NewStatefulSet("rebooted-"+way, driver, 1)
		p := s.Ready()[0]
		all[p] = s.Volume(p)
	}
	for p := range all {
		p.Exec("echo kept > /data/file && sync")
	}
	k.Reboot()
	waitNodeEvent(k, "Rebooted")
	for p, v := range all {
		waitRestarted(k, p)
		wantOut(k, p, "main", "cat /data/file && touch /data/works", "kept\n")
		if v == beside {
			wantOnHost(k, p, v)
			continue
		}
		wantDeferred(k, p, v, inCrust)
		wantGuarded(k, p, v)
	}
}

// waitRestarted waits until a pod's container has been started anew, and is ready.
func waitRestarted(k *cluster.Kube, p *cluster.Pod) {
	k.T.Helper()
	k.Eventually("pod "+p.Name+" is restarted", func(ctx context.Context) error {
		is, err := p.Get(ctx)
		if err != nil {
			return err
		}
		for _, one := range is.Status.ContainerStatuses {
			if one.RestartCount == 0 || !one.Ready {
				return fmt.Errorf("restarts: %d, ready: %t; %s", one.RestartCount, one.Ready, strings.Join(p.Events(), "; "))
			}
		}
		return nil
	})
}

// waitNodeEvent waits until the node has an event.
func waitNodeEvent(k *cluster.Kube, reason string) {
	k.T.Helper()
	k.Eventually("the node has an event "+reason, func(ctx context.Context) error {
		events, err := k.Client.CoreV1().Events(cluster.Namespace).List(ctx, metav1.ListOptions{
			FieldSelector: "involvedObject.kind=Node,reason=" + reason,
		})
		if err == nil && len(events.Items) == 0 {
			err = errors.New("there is none")
		}
		return err
	})
}
