package main

import (
	"fmt"
	"time"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// quiet measures what a daemon costs of which nobody wants anything, with no volume and
// with 1,000, whose sandboxes live, at the same time.
func quiet(r *testbed) {
	r.daemon.Start()
	full := newTestbed(r.t, r.set, r.sheet)
	count := r.set.scale(1000)
	full.boundMany(count)
	whole := time.Duration(r.set.scale(120)) * time.Second // two reconciles
	none, many := idle(r), idle(full)
	time.Sleep(whole)
	none("idle without volumes: wake-ups, CPU time, resident memory", 30)
	many(fmt.Sprintf("idle with %d volumes: wake-ups, CPU time, resident memory", count), 64)
}

// idle begins to measure, and the function that it gives writes down what was used since.
func idle(r *testbed) func(what string, mostMiB float64) {
	time.Sleep(2 * time.Second) // what came before is over
	began, woken, used := time.Now(), rig.WakeUps(r.t, r.daemon.Pid()), rig.CPUTime(r.t, r.daemon.Pid())
	return func(what string, mostMiB float64) {
		whole := time.Since(began)
		wakeUps := float64(rig.WakeUps(r.t, r.daemon.Pid())-woken) / whole.Seconds()
		cpu := (rig.CPUTime(r.t, r.daemon.Pid()) - used).Seconds() / whole.Hours()
		memory := r.memory() / mib
		r.sheet.add(figure{
			what: what, target: fmt.Sprintf("<= 2/s, <= 0.5 s/h, <= %.0f MiB", mostMiB),
			value: fmt.Sprintf("%.1f/s, %.2f s/h, %.1f MiB", wakeUps, cpu, memory),
			met:   wakeUps <= 2 && cpu <= 0.5 && memory <= mostMiB,
		})
	}
}
