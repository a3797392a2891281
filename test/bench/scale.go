package main

import (
	"fmt"
	"strings"
	"time"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const (
	manyRecords = 10000
	mostRecords = 5 * manyRecords
)

// scale measures a node with 10,000 volumes, and how that grows with 50,000.
func scale(r *testbed) {
	r.daemon.Start()
	count, most := r.set.scale(manyRecords), r.set.scale(mostRecords)
	client := r.daemon.Runtime()
	stageAll := func(from, to int) time.Duration {
		began := time.Now()
		for n := from; n < to; n++ {
			_, err := client.RuntimeStageVolume(r.ctx, r.request(n, r.image(n)))
			r.must(err)
		}
		return time.Since(began) / time.Duration(to-from)
	}
	staged := stageAll(0, count)
	time.Sleep(time.Second)
	r.sheet.mib(fmt.Sprintf("resident memory with %d volumes, staged one by one", count), "<= 64 MiB", r.memory(), 64)
	restarted := restart(r)
	r.sheet.atMost(fmt.Sprintf("restart with %d records, to ready", count), "<= 0.7 s", restarted.Seconds(), 0.7, millis(restarted))
	time.Sleep(2 * time.Second) // after one, the daemon gives back what the start needed
	r.sheet.mib(fmt.Sprintf("resident memory with %d volumes, after a restart", count), "<= 64 MiB", r.memory(), 64)
	took := reads(r, count)
	grown := []ratio{{"for a stage", stageAll(count, most), staged, mostGrown / 5.0}, {"to restart", restart(r), restarted, mostGrown}}
	grown = append(grown, larger(r, most, took)...)
	r.sheet.ratios(fmt.Sprintf("%d volumes against %d", most, count), fmt.Sprintf("%.1f MiB", r.memory()/mib), grown...)
}

// restart is how long the daemon takes to be ready again.
func restart(r *testbed) time.Duration {
	r.daemon.Stop()
	began := time.Now()
	r.daemon.Start()
	return time.Since(began)
}

const manyCycles = 20000

// growth stages, measures and unstages again and again.
func growth(r *testbed) {
	asked, client := r.oneVolume(), r.daemon.Runtime()
	v := r.volume(1, r.disk(1))
	warm, most := r.set.scale(manyCycles/10), r.set.scale(manyCycles)
	cycles(r, client, asked, v, warm)
	memory, fds, routines := footprint(r)
	cycles(r, client, asked, v, most-warm)
	memoryAfter, fdsAfter, routinesAfter := footprint(r)
	grown := (memoryAfter - memory) / mib
	r.sheet.atMost(fmt.Sprintf("growth of memory over %d stage/stats/unstage cycles, after %d to warm up", most-warm, warm),
		"none (<= 2 MiB)", grown, 2, fmt.Sprintf("%+.1f MiB of %.1f", grown, memory/mib))
	r.sheet.atMost("growth of open descriptors and goroutines over them", "none (<= 2)", float64(fdsAfter-fds+routinesAfter-routines), 2,
		fmt.Sprintf("%+d, %+d", fdsAfter-fds, routinesAfter-routines))
}

func footprint(r *testbed) (memory float64, fds, routines int) {
	time.Sleep(time.Second)
	_, rest, _ := strings.Cut(r.http("/metrics"), "\ngo_goroutines ")
	_, err := fmt.Sscan(rest, &routines)
	r.must(err)
	return r.memory(), len(rig.FDs(r.t, r.daemon.Pid())), routines
}

// cycles stages a volume and takes it back, and asks a sandbox in between.
func cycles(r *testbed, client runtimev1.RuntimeClient, asked, v *volume, count int) {
	for range count {
		_, err := client.RuntimeStageVolume(r.ctx, v.request)
		r.must(err)
		r.must(stats(r.ctx, client, asked))
		_, err = client.RuntimeUnstageVolume(r.ctx, v.unstage)
		r.must(err)
	}
}
