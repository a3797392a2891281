//go:build system

package kube_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
)

// TestPartsGoAndComeBack takes every component away under a running pod and puts it
// back: the pod does not notice, and all goes on afterwards.
func TestPartsGoAndComeBack(t *testing.T) {
	k := cluster.On(t)
	v := k.NewVolume(cluster.VolumeOptions{Name: "parts", Driver: cluster.Block})
	p := k.NewPod("parts", cluster.Crust).With(v, "/data").Start()
	for name, part := range k.Components() {
		for how, away := range map[string]func() error{
			"stopped": part.Stop, "killed": func() error { part.Kill(); return nil },
		} {
			k.Must(away())
			if part.Alive() {
				t.Errorf("%s: %s: it is alive", name, how)
			}
			if name != "containerd" { // by which the test looks into the pod
				p.Exec("date > /data/" + name + "-" + how + " && sync")
			}
			k.Must(part.Start())
		}
	}
	if got, want := p.Exec("ls /data | grep -c ed$"), 2*len(k.Components())-2; got != fmt.Sprintln(want) {
		t.Errorf("there are %q files instead of %d", got, want)
	}
	k.Must(k.WaitNode(corev1.ConditionTrue))
	is, err := p.Get(t.Context())
	k.Must(err)
	if restarts := is.Status.ContainerStatuses[0].RestartCount; restarts != 0 {
		t.Errorf("the container was restarted %d times", restarts)
	}
	p.WaitStats(v, "/data")
}

// TestKindsOfVolumes is about the rig: each kind of volume comes up and goes.
func TestKindsOfVolumes(t *testing.T) {
	k := cluster.On(t)
	disk := k.NewVolume(cluster.VolumeOptions{Name: "disk", Driver: cluster.Plain, Raw: true})
	files := k.NewVolume(cluster.VolumeOptions{Name: "files", Driver: cluster.Plain, FS: "xfs", Options: []string{"noatime"}})
	p := k.NewPod("kinds", cluster.Runc).With(disk, "/dev/disk").With(files, "/files").
		WithInline("inline", cluster.Plain, "/inline", 32*cluster.Mib)
	p.Spec.Containers = append(p.Spec.Containers, cluster.Sleeper("second"))
	p.Start()
	if got := p.Exec("blockdev --getsize64 /dev/disk"); got != fmt.Sprintln(disk.Size) {
		t.Errorf("the raw block volume has %q bytes", got)
	}
	if has := p.DF("/files"); has.Total > files.Size {
		t.Errorf("the xfs has %+v", has)
	}
	if has := p.DF("/inline"); has.Total > 32*cluster.Mib {
		t.Errorf("the inline volume has %+v", has)
	}
	files.Grow(2 * files.Size)
	files.WaitGrown()
	if has := p.WaitStats(files, "/files"); has.Total < files.Size*8/10 {
		t.Errorf("the xfs has %+v after it was grown to %d", has, files.Size)
	}
	if out, err := p.TryExec("second", "true"); err != nil {
		t.Errorf("%q, %v", out, err)
	}
	k.Eventually("the pod's log can be read", func(context.Context) error { _, err := p.Log("main"); return err })
	failing := k.NewPod("failing", cluster.Runc).Script("exit 3")
	failing.Spec.RestartPolicy = corev1.RestartPolicyNever
	failing.Create().WaitPhase(corev1.PodFailed)
	k.Never("a pod that has failed runs", time.Second, func(ctx context.Context) error {
		is, err := failing.Get(ctx)
		if err == nil && is.Status.Phase != corev1.PodRunning {
			err = fmt.Errorf("it is %s", is.Status.Phase)
		}
		return err
	})
}
