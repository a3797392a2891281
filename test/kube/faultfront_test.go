//go:build system

package kube_test

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

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

// leave asks pods to go, and notes down what they have promised.
func leave(k *cluster.Kube, pods []*writer) {
	k.T.Helper()
	for _, w := range pods {
		k.Eventually(fmt.Sprintf("pod %s tells what it has written", w.Name), func(context.Context) error { return w.wrote(0) })
		w.AskDelete()
	}
}

// hasLeft waits until pods have gone, with everything.
func hasLeft(k *cluster.Kube, pods []*writer) {
	k.T.Helper()
	for _, w := range pods {
		k.Eventually("pod "+w.Name+" has gone, and its volume was given back", w.hasGone)
	}
}

// register has the registrars of the two drivers behind crust-proxy go elsewhere, as a
// change of their DaemonSets does.
func register(k *cluster.Kube, registry string) {
	k.T.Helper()
	for _, name := range []string{cluster.Block, cluster.Native} {
		registrar := k.Drivers[name].Registrar
		k.Must(registrar.Stop())
		registrar.Dir = registry
		k.Must(registrar.Start())
	}
}

// past takes the front away under living volumes and has the drivers register with
// kubelet directly. The way back is given, and is gone when the test fails, too.
func past(k *cluster.Kube) (back func()) {
	k.T.Helper()
	const behind, direct = cluster.KubeletRoot + "/crust-proxy/registry", cluster.KubeletRoot + "/plugins_registry"
	normal := k.DefaultProxy()
	off := normal
	off.Front = "{enabled: false, abandonVolumes: true}"
	back = sync.OnceFunc(func() {
		register(k, behind)
		k.Must(k.ConfigureProxy(normal))
		waitKubeletHas(k, true, cluster.Block, cluster.Native)
	})
	k.T.Cleanup(back)
	k.Must(k.ConfigureProxy(off))
	waitKubeletHas(k, false, cluster.Block, cluster.Native)
	register(k, direct)
	waitKubeletHas(k, true, cluster.Block, cluster.Native)
	return back
}

// TestFrontIsNotRemovedUnderPods wants a removal to be refused. Where somebody insists, and
// has the drivers register with kubelet themselves, pods keep running and new ones come,
// until all is put back under them.
func TestFrontIsNotRemovedUnderPods(t *testing.T) {
	k := cluster.On(t)
	if code, said := program(k, "removable"); code != 0 {
		t.Errorf("removable gave %d without any volume: %s", code, said)
	}
	lanes := newLanes(k)
	stay, going := running(k, lanes, 0), running(k, lanes[:2], 1)
	wantNotRemovable(k, slices.Concat(stay[:2], going), stay[2])
	back := past(k)
	has, err := volumesOf(t.Context())
	k.Must(err)
	for _, w := range slices.Concat(stay[:2], going) {
		w.goesOn(k)
		target := w.Target(w.on.Volume)
		if v := has[target]; v.GetState() != adminv1.VolumeState_VOLUME_STATE_BOUND || !guarded(target) {
			t.Errorf("without its front, crust-proxy shows %v, and a guard: %t", v, guarded(target))
		}
	}
	// Kubelet believes that the volumes of pods that are deleted now were unpublished, and
	// cannot remove the pods, for the guards are there.
	leave(k, going)
	for _, w := range going {
		soon(k, "pod "+w.Name+" ends", func() bool { _, err := born(w.pid); return err != nil })
	}
	// Without the front new volumes are as any other.
	onHost := running(k, lanes, 2)
	for _, w := range onHost {
		wantOnHost(k, w.Pod, w.on.Volume)
	}
	killSides(k, stay)
	for _, w := range going {
		if w.hasGoneButStaged(t.Context()) == nil {
			t.Errorf("pod %s goes without the front", w.Name)
		}
	}

	back()
	k.Must(k.Kubelet.Restart()) // which has it look at the disk
	for _, w := range going {
		k.Eventually("pod "+w.Name+" has gone", w.hasGoneButStaged)
	}
	for _, w := range stay {
		w.unchanged(k, true)
	}
	for _, w := range onHost {
		w.unchanged(k, false)
	}
	k.Eventually("all that was deferred is so still", func(ctx context.Context) error { return well(ctx, stay) })
	for _, pods := range [][]*writer{onHost, stay} {
		leave(k, pods)
		hasLeft(k, pods)
	}
	comeAgain(k, lanes) // what the drivers had mounted by themselves is deferred
	if code, said := program(k, "removable"); code != 0 {
		t.Errorf("removable gave %d when all pods had gone: %s", code, said)
	}
}

// wantNotRemovable wants a removal, and a start without the front, to be refused with the
// volumes that are in its way.
func wantNotRemovable(k *cluster.Kube, deferred []*writer, plain *writer) {
	k.T.Helper()
	named := func(what, said string) {
		k.T.Helper()
		for _, w := range deferred {
			if !strings.Contains(said, w.Target(w.on.Volume)) || !strings.Contains(said, w.on.Driver) {
				k.T.Errorf("%s does not name the volume of pod %s: %s", what, w.Name, said)
			}
		}
		if strings.Contains(said, plain.Target(plain.on.Volume)) {
			k.T.Errorf("%s names the volume of pod %s, which is not deferred: %s", what, plain.Name, said)
		}
	}
	code, said := program(k, "removable")
	named("removable", said)
	if code == 0 {
		k.T.Error("it can be removed")
	}
	if code, said := program(k, "removable", cluster.Plain); code != 0 {
		k.T.Errorf("a driver without volumes gave %d: %s", code, said)
	}
	off := k.DefaultProxy()
	off.Front = "{enabled: false}"
	if err := k.ConfigureProxy(off); err == nil {
		k.T.Error("crust-proxy has started without its front")
	} else {
		// Before it ends, the log may name any volume that kubelet asks the stats of.
		_, refusal, _ := strings.Cut(err.Error(), "cannot be put in force")
		named("the start without the front", refusal)
	}
	k.Proxy.Kill()
}

// comeAgain has pods come to all volumes that others have had, and go.
func comeAgain(k *cluster.Kube, lanes []*lane) {
	k.T.Helper()
	var again []*writer
	for _, l := range lanes {
		for i := range l.ledgers {
			again = append(again, l.start(k, len(l.ledgers)*100+i))
		}
	}
	for _, w := range again {
		w.settle(k)
		w.keeps(k)
	}
	k.Eventually("all is well", func(ctx context.Context) error { return well(ctx, again) })
	leave(k, again)
	hasLeft(k, again)
}
