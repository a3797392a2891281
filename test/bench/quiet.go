package main

import (
	"fmt"
	"time"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// quiet measures what a daemon costs of which nobody wants anything: with no volume, and then with 1,000, whose
// sandboxes live.
func quiet(r *testbed) {
	r.daemon.Start()
	idle(r, "idle without volumes: wake-ups, CPU time, resident memory", 30)
	count := r.set.scale(1000)
	r.boundMany(count)
	idle(r, fmt.Sprintf("idle with %d volumes: wake-ups, CPU time, resident memory", count), 64)
}

// idle measures two minutes, with two reconciles, when two are over: after its start the daemon examines all that there
// is, and what is new until its times tell it from a later one.
func idle(r *testbed, what string, mostMiB float64) {
	whole := time.Duration(r.set.scale(120)) * time.Second
	time.Sleep(whole)
	began, woken, used := time.Now(), rig.WakeUps(r.t, r.daemon.Pid()), rig.CPUTime(r.t, r.daemon.Pid())
	time.Sleep(whole)
	passed := time.Since(began)
	wakeUps := float64(rig.WakeUps(r.t, r.daemon.Pid())-woken) / passed.Seconds()
	cpu := (rig.CPUTime(r.t, r.daemon.Pid()) - used).Seconds() / passed.Hours()
	memory := r.memory() / mib
	r.sheet.add(figure{
		what: what, target: fmt.Sprintf("<= 2/s, <= 0.5 s/h, <= %.0f MiB", mostMiB),
		value: fmt.Sprintf("%.1f/s, %.2f s/h, %.1f MiB", wakeUps, cpu, memory),
		met:   wakeUps <= 2 && cpu <= 0.5 && memory <= mostMiB,
	})
}
