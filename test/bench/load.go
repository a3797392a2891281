package main

import (
	"context"
	"fmt"
	"os/exec"
	"sync"
	"time"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

const manyCallers = 64

// rates compares 64 callers of the daemon with 64 of the empty server, over one
// connection and over one for each 8.
func rates(r *testbed) {
	const most = 8
	bound := r.boundMany(manyCallers, 0)
	empty, ours := r.empty(most), r.clients(r.daemon.RuntimeSocket, most)
	for _, connections := range []int{1, most} {
		of := func(clients []runtimev1.RuntimeClient) func() float64 {
			return func() float64 {
				return r.rate(manyCallers, func(caller int) error { return stats(r.ctx, clients[caller%connections], bound[caller]) })
			}
		}
		got := inTurns(max(3, r.set.scale(5)), of(empty), of(ours))
		share := got[1] / got[0]
		r.sheet.atLeast(fmt.Sprintf("stats a second by %d callers over %d connection(s), share of the empty call's", manyCallers, connections),
			">= 50 %", share, 0.5, fmt.Sprintf("%.0f %% (%.0f/s)", 100*share, got[1]))
	}
}

// kataRuntimeRate is what `kata-runtime direct-volume stats` of Kata 4.1.0, a
// far larger program than our stand-in, reached on a machine of this size with
// eight processes at once.
const kataRuntimeRate = 158.0

// processes compares with a process for each question, eight at once.
func processes(r *testbed) {
	const callers = 8
	bound := r.boundMany(callers, 0)
	client, cli := r.daemon.Runtime(), r.again(roleCLI).Program
	got := inTurns(max(2, r.set.scale(3)),
		func() float64 {
			return r.rate(callers, func(caller int) error {
				v := bound[caller]
				return exec.CommandContext(r.ctx, cli, roleCLI, v.socket, v.request.GetVolumeBackingPath()).Run() //nolint:gosec // ourselves
			})
		},
		func() float64 {
			return r.rate(callers, func(caller int) error { return stats(r.ctx, client, bound[caller]) })
		})
	times, known := got[1]/got[0], got[1]/kataRuntimeRate
	r.sheet.atLeast("stats a second by 8 callers, against a process for each (a light stand-in)", ">= 100x", times, 100,
		fmt.Sprintf("%.0fx (%.0f/s to %.0f/s)", times, got[1], got[0]))
	r.sheet.atLeast(fmt.Sprintf("the same, against the %.0f/s that kata-runtime itself reached", kataRuntimeRate), ">= 100x", known, 100,
		fmt.Sprintf("%.0fx", known))
}

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
