//go:build system

package containerd

import (
	"fmt"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
)

const manyPods = 40

// TestManyPodsAtOnce starts many pods with a volume each, all at once.
func TestManyPodsAtOnce(t *testing.T) {
	r := newTestNode(t)
	volumes := make([]*volume, manyPods)
	for i := range volumes {
		volumes[i] = r.volume(fmt.Sprintf("pod-%d", i), "ext4", 16*mib)
	}
	pods := make([]*cri.Pod, manyPods)
	began := time.Now()
	var all errgroup.Group
	for i, v := range volumes {
		all.Go(func() (err error) {
			pods[i], err = r.start(v)
			return err
		})
	}
	check.Must(t, all.Wait())
	t.Logf("%d pods run after %v", manyPods, time.Since(began).Round(time.Millisecond))
	for _, v := range volumes {
		if _, err := v.stats(); err != nil {
			t.Error(err)
		}
	}
	volumes[0].wantUnseen()
	for _, pod := range pods {
		all.Go(func() error { return pod.Remove(r.ctx()) })
	}
	check.Must(t, all.Wait())
	for _, v := range volumes {
		v.unstage()
		v.whenFree(v.isFree)
	}
	volumes[0].check()
	r.wantClean()
}

// start publishes a volume and runs a pod that writes to it.
func (r *testNode) start(v *volume) (*cri.Pod, error) {
	if err := v.tryStage(); err != nil {
		return nil, fmt.Errorf("%s: stage: %w", v.pod, err)
	}
	pod, err := r.node.RunPod(r.ctx(), v.pod, "crust", 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", v.pod, err)
	}
	id, err := pod.Run(r.ctx(), cri.Container{Name: "main", Mounts: []cri.Mount{at(v.target)}})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", v.pod, err)
	}
	if _, err := r.node.Exec(r.ctx(), id, "echo "+v.pod+" > /data/name && sync"); err != nil {
		return nil, fmt.Errorf("%s: %w", v.pod, err)
	}
	return pod, nil
}
