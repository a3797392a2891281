package main

import (
	"context"
	"fmt"
	"sync"
	"time"
)

const (
	hungVolumes = 1000
	hungOnes    = 10
	hungCallers = 32
)

// hungSandboxes asks for the stats of 1,000 volumes with 32 callers, once with
// all sandboxes alive and once with 10 that hang.
func hungSandboxes(r *testbed) {
	bound := r.boundMany(hungVolumes, hungOnes)
	var without, with durations
	for range max(3, r.set.scale(10)) {
		without = append(without, sweep(r, bound[hungOnes:], nil)...)
		with = append(with, sweep(r, bound[hungOnes:], bound[:hungOnes])...)
	}
	ratio := float64(with.p99()) / float64(without.p99())
	r.sheet.atMost("1,000 volumes, 32 callers, 10 sandboxes hang: p99 of the other 990", "<= 2x", ratio, 2,
		fmt.Sprintf("%.2fx (%s to %s)", ratio, micros(with.p99()), micros(without.p99())))
}

// sweep asks for all live volumes once, while the hung ones are being waited
// for by callers of their own.
func sweep(r *testbed, live, hung []*volume) (all durations) {
	client := r.daemon.Runtime()
	waiting, cancel := context.WithCancel(r.ctx)
	var stuck, callers sync.WaitGroup
	defer func() { cancel(); stuck.Wait() }()
	for _, v := range hung {
		stuck.Go(func() { _ = stats(waiting, client, v) })
	}
	work := make(chan *volume, len(live))
	for _, v := range live {
		work <- v
	}
	close(work)
	var mu sync.Mutex
	var failed error
	for range hungCallers {
		callers.Go(func() {
			for v := range work {
				start := time.Now()
				err := stats(r.ctx, client, v)
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
	r.must(failed)
	return all
}
