//go:build system

package kube_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// running starts a writer of each lane, and waits until they write.
func running(k *cluster.Kube, lanes []*lane, generation int) []*writer {
	k.T.Helper()
	var out []*writer
	for _, l := range lanes {
		out = append(out, l.start(k, generation))
	}
	for _, w := range out {
		w.settle(k)
	}
	return out
}

// program runs one of crust-proxy's commands and gives its exit code and words.
func program(k *cluster.Kube, args ...string) (int, string) {
	k.T.Helper()
	cmd := exec.Command(rig.Program(k.T, "crust-proxy"), append(args, "--config", k.ProxyConfig())...)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		k.T.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// waitKubeletHas waits until kubelet has drivers registered, or has them no more.
func waitKubeletHas(k *cluster.Kube, want bool, drivers ...string) {
	k.T.Helper()
	k.Eventually(fmt.Sprintf("kubelet has the drivers: %t", want), func(ctx context.Context) error {
		node, err := k.Client.StorageV1().CSINodes().Get(ctx, cluster.NodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		has := make(map[string]bool)
		for _, one := range node.Spec.Drivers {
			has[one.Name] = true
		}
		for _, driver := range drivers {
			if has[driver] != want {
				return fmt.Errorf("it has %v", has)
			}
		}
		return nil
	})
}

// loseInNode removes a driver from the CSINode, as a late removal by kubelet does.
func loseInNode(k *cluster.Kube, driver string) {
	k.T.Helper()
	k.Eventually("the CSINode loses "+driver, func(ctx context.Context) error {
		nodes := k.Client.StorageV1().CSINodes()
		node, err := nodes.Get(ctx, cluster.NodeName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		node.Spec.Drivers = slices.DeleteFunc(node.Spec.Drivers, func(one storagev1.CSINodeDriver) bool { return one.Name == driver })
		_, err = nodes.Update(ctx, node, metav1.UpdateOptions{})
		return err
	})
}

// killSides kills a container of each pod; see unchanged.
func killSides(k *cluster.Kube, pods []*writer) {
	k.T.Helper()
	for _, w := range pods {
		k.Must(syscall.Kill(w.side, syscall.SIGKILL))
	}
	for _, w := range pods {
		k.Eventually("a container of pod "+w.Name+" is restarted", w.hasNewSide)
	}
}

// TestFrontAwayUnderPods takes crust-proxy away as if for good, and puts it back.
func TestFrontAwayUnderPods(t *testing.T) {
	k := cluster.On(t)
	lanes := newLanes(k)
	stay, leaving := running(k, lanes, 0), running(k, lanes, 1)

	k.Must(k.Proxy.Stop())
	if code, said := program(k, "withdraw"); code != 0 || !strings.Contains(said, cluster.Block) || !strings.Contains(said, cluster.Native) {
		t.Errorf("withdraw gave %d and %q", code, said)
	}
	k.Must(os.RemoveAll(cluster.ProxyRunDir + "/csi"))
	waitKubeletHas(k, false, cluster.Block, cluster.Native)
	for _, w := range stay {
		w.goesOn(k)
	}
	killSides(k, stay) // which needs no driver

	leave(k, leaving)
	coming := make([]*writer, len(lanes))
	for i, l := range lanes {
		coming[i] = l.start(k, 2)
	}
	for _, w := range leaving {
		soon(k, "pod "+w.Name+" ends", func() bool { _, err := born(w.pid); return err != nil })
	}
	k.Never("a pod comes or goes without the front", 5*time.Second, func(ctx context.Context) error {
		for _, w := range coming {
			if err := isReady(ctx, w.Pod); err == nil {
				return nil
			}
		}
		for _, w := range leaving {
			if err := w.hasGone(ctx); err == nil {
				return nil
			}
		}
		return errors.New("they all wait")
	})

	// A kubelet that begins without the drivers knows the volumes from the disk alone.
	k.Must(k.Kubelet.Restart())
	k.Must(k.WaitNode(corev1.ConditionTrue))
	for _, w := range stay {
		w.goesOn(k)
	}
	k.Must(k.Proxy.Start())
	waitKubeletHas(k, true, cluster.Block, cluster.Native)
	hasLeft(k, leaving)
	for _, w := range coming {
		w.settle(k)
		w.keeps(k)
	}
	for _, w := range stay {
		w.unchanged(k, true)
	}
	k.Eventually("all is well again", func(ctx context.Context) error { return well(ctx, append(stay, coming...)) })
	for _, w := range stay[:2] {
		w.WaitStats(w.on.Volume, "/data")
	}
}

// TestFrontIsNotRemovedUnderPods wants a removal to be refused, with the volumes and
// pods that are in its way; and where somebody insists, nothing to be lost.
func TestFrontIsNotRemovedUnderPods(t *testing.T) {
	k := cluster.On(t)
	if code, said := program(k, "removable"); code != 0 {
		t.Errorf("removable gave %d without any volume: %s", code, said)
	}
	stay := running(k, newLanes(k), 0)
	deferred := stay[:2]
	named := func(what, said string) {
		for _, w := range deferred {
			if !strings.Contains(said, w.Target(w.on.Volume)) || !strings.Contains(said, w.on.Driver) {
				t.Errorf("%s does not name the volume of pod %s: %s", what, w.Name, said)
			}
		}
		if plain := stay[2]; strings.Contains(said, plain.Target(plain.on.Volume)) {
			t.Errorf("%s names the volume of pod %s, which is not deferred: %s", what, plain.Name, said)
		}
	}
	code, said := program(k, "removable")
	named("removable", said)
	if code == 0 {
		t.Error("it can be removed")
	}
	if code, said := program(k, "removable", cluster.Plain); code != 0 {
		t.Errorf("a driver without volumes gave %d: %s", code, said)
	}

	loseInNode(k, cluster.Block)
	waitKubeletHas(k, true, cluster.Block, cluster.Native) // crust-proxy notices, and renews the registration

	normal := k.DefaultProxy()
	off := normal
	off.Front = "{enabled: false}"
	if err := k.ConfigureProxy(off); err == nil {
		t.Error("crust-proxy has started without its front")
	} else {
		named("the start without the front", err.Error())
	}
	k.Proxy.Kill()
	killSides(k, stay)

	off.Front = "{enabled: false, abandonVolumes: true}"
	k.Must(k.ConfigureProxy(off))
	waitKubeletHas(k, false, cluster.Block, cluster.Native)
	for _, w := range stay {
		w.goesOn(k)
	}
	has, err := volumesOf(t.Context())
	k.Must(err)
	for _, w := range deferred {
		if v := has[w.Target(w.on.Volume)]; v.GetState() != adminv1.VolumeState_VOLUME_STATE_BOUND {
			t.Errorf("without its front, crust-proxy shows %v", v)
		}
		if !guarded(w.Target(w.on.Volume)) {
			t.Errorf("the guard of pod %s has gone", w.Name)
		}
	}

	k.Must(k.ConfigureProxy(normal))
	waitKubeletHas(k, true, cluster.Block, cluster.Native)
	for _, w := range stay {
		w.unchanged(k, true)
	}
	k.Eventually("all is well again", func(ctx context.Context) error { return well(ctx, stay) })
	leave(k, stay)
	hasLeft(k, stay)
	if code, said := program(k, "removable"); code != 0 {
		t.Errorf("removable gave %d when all pods had gone: %s", code, said)
	}
}
