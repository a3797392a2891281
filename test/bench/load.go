package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"time"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

const manyCallers = 64

// rates compares 64 callers of the daemon with 64 of the empty server, over one
// connection and over one for each 8.
func rates(ctx context.Context, set settings, r *testbed, s *sheet) error {
	bound, err := r.boundMany(ctx, manyCallers, 0)
	if err != nil {
		return err
	}
	for _, connections := range []int{1, 8} {
		if err := r.compareRates(ctx, set, s, bound, connections); err != nil {
			return err
		}
	}
	return nil
}

func (r *testbed) compareRates(ctx context.Context, set settings, s *sheet, bound []*volume, connections int) error {
	pairs := make([]*pair, connections)
	for i := range pairs {
		p, err := r.pair()
		if err != nil {
			return err
		}
		defer p.close()
		pairs[i] = p
	}
	var ours, empties []float64
	for range max(3, set.scale(5)) {
		empty, err := rate(manyCallers, time.Second, func(caller int) error {
			return emptyStats(ctx, pairs[caller%connections].empty, bound[caller].stats)
		})
		if err != nil {
			return err
		}
		our, err := rate(manyCallers, time.Second, func(caller int) error {
			return emptyStats(ctx, pairs[caller%connections].ours, bound[caller].stats)
		})
		if err != nil {
			return err
		}
		empties, ours = append(empties, empty), append(ours, our)
	}
	share := median(ours) / median(empties)
	s.atLeast(fmt.Sprintf("stats a second by %d callers over %d connection(s), share of the empty call's", manyCallers, connections),
		">= 50 %", share, 0.5, fmt.Sprintf("%.0f %% (%.0f/s)", 100*share, median(ours)))
	return nil
}

// boundMany starts everything and binds volumes over image files.
func (r *testbed) boundMany(ctx context.Context, count, hung int) ([]*volume, error) {
	if _, err := r.start(); err != nil {
		return nil, err
	}
	if err := r.spawn(r.dir+"/empty.sock", roleEmpty, r.dir+"/empty.sock"); err != nil {
		return nil, err
	}
	ready := r.dir + "/shims-ready"
	if err := r.spawn(ready, roleShims, r.sandboxes, fmt.Sprint(count), fmt.Sprint(hung), r.images, ready); err != nil {
		return nil, err
	}
	volumes := make([]*volume, count)
	for n := range volumes {
		image, err := r.image(n)
		if err != nil {
			return nil, err
		}
		if volumes[n], err = r.bound(ctx, n, image); err != nil {
			return nil, err
		}
	}
	return volumes, nil
}

// processes compares with a process for each question, eight at once.
func processes(ctx context.Context, set settings, r *testbed, s *sheet) error {
	bound, err := r.boundMany(ctx, 8, 0)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	p, err := r.pair()
	if err != nil {
		return err
	}
	defer p.close()
	var ours, theirs []float64
	for range max(2, set.scale(3)) {
		cli, err := rate(8, 2*time.Second, func(caller int) error {
			v := bound[caller]
			return exec.CommandContext(ctx, self, roleCLI, v.socket, v.request.GetVolumeBackingPath()).Run() //nolint:gosec // ourselves
		})
		if err != nil {
			return err
		}
		our, err := rate(8, time.Second, func(caller int) error { return emptyStats(ctx, p.ours, bound[caller].stats) })
		if err != nil {
			return err
		}
		ours, theirs = append(ours, our), append(theirs, cli)
	}
	times := median(ours) / median(theirs)
	s.atLeast("stats a second by 8 callers, against a process for each (a light stand-in)", ">= 100x", times, 100,
		fmt.Sprintf("%.0fx (%.0f/s to %.0f/s)", times, median(ours), median(theirs)))
	known := median(ours) / kataRuntimeRate
	s.atLeast(fmt.Sprintf("the same, against the %.0f/s that kata-runtime itself reached", kataRuntimeRate), ">= 100x", known, 100,
		fmt.Sprintf("%.0fx", known))
	return nil
}

// kataRuntimeRate is what `kata-runtime direct-volume stats` of Kata 4.1.0, a
// far larger program than our stand-in, reached on a machine of this size with
// eight processes at once.
const kataRuntimeRate = 158.0

const (
	hungVolumes = 1000
	hungOnes    = 10
	hungCallers = 32
)

// hungSandboxes asks for the stats of 1,000 volumes with 32 callers, once with
// all sandboxes alive and once with 10 that hang.
func hungSandboxes(ctx context.Context, set settings, r *testbed, s *sheet) error {
	bound, err := r.boundMany(ctx, hungVolumes, hungOnes)
	if err != nil {
		return err
	}
	client, done, err := r.client()
	if err != nil {
		return err
	}
	defer done()
	var without, with durations
	for range max(3, set.scale(10)) {
		calm, err := sweep(ctx, client, bound[hungOnes:], nil)
		if err != nil {
			return err
		}
		stormy, err := sweep(ctx, client, bound[hungOnes:], bound[:hungOnes])
		if err != nil {
			return err
		}
		without, with = append(without, calm...), append(with, stormy...)
	}
	ratio := float64(with.at(0.99)) / float64(without.at(0.99))
	s.atMost("1,000 volumes, 32 callers, 10 sandboxes hang: p99 of the other 990", "<= 2x", ratio, 2,
		fmt.Sprintf("%.2fx (%s to %s)", ratio, micros(with.at(0.99)), micros(without.at(0.99))))
	return nil
}

// sweep asks for all live volumes once, while the hung ones are being waited
// for by callers of their own.
func sweep(ctx context.Context, client runtimev1.RuntimeClient, live, hung []*volume) (durations, error) {
	waiting, cancel := context.WithCancel(ctx)
	var stuck sync.WaitGroup
	for _, v := range hung {
		stuck.Go(func() { _, _ = client.RuntimeGetVolumeStats(waiting, v.stats) })
	}
	defer func() { cancel(); stuck.Wait() }()
	work := make(chan *volume, len(live))
	for _, v := range live {
		work <- v
	}
	close(work)
	var mu sync.Mutex
	var all durations
	var failed error
	var callers sync.WaitGroup
	for range hungCallers {
		callers.Go(func() {
			for v := range work {
				start := time.Now()
				_, err := client.RuntimeGetVolumeStats(ctx, v.stats)
				took := time.Since(start)
				mu.Lock()
				all = append(all, took)
				if err != nil {
					failed = err
				}
				mu.Unlock()
			}
		})
	}
	callers.Wait()
	if len(all) == 0 {
		return nil, errNoSample
	}
	return all, failed
}
