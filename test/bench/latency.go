package main

import (
	"context"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// latency compares single calls, one after the other: an empty one, stage and
// unstage, stats, and a question to the shim without us.
func latency(r *testbed) {
	bound := r.oneVolume()
	other := r.volume(1, r.disk(1))
	ours, empty := r.daemon.Runtime(), r.empty(1)[0]
	all := r.timed(r.set.scale(20), 200,
		func() error { return stats(r.ctx, empty, bound) },
		func() error { _, err := empty.RuntimeStageVolume(r.ctx, other.request); return err },
		func() error { return stageAndUnstage(r.ctx, ours, other) },
		func() error { return stats(r.ctx, ours, bound) },
		func() error { return askDirectly(r.ctx, bound.socket, bound.request.GetVolumeBackingPath()) },
	)
	emptyStats, emptyStage, staged, live, direct := median(all[0]), median(all[1]), median(all[2]), median(all[3]), median(all[4])
	r.sheet.tell("empty call of the size of stats, p50", micros(emptyStats))
	r.sheet.tell("empty call of the size of stage, p50", micros(emptyStage))
	r.sheet.ratio("stage and unstage together, p50, against one empty call", "<= 4x", staged, emptyStage, 4)
	openDevices(r)
	r.sheet.ratio("stats from a live shim, p50, against an empty call", "<= 2x", live, emptyStats, 2)
	r.sheet.ratio("stats through crust-proxy against dialling the shim for each question, p50", "<= 1.0x", live, direct, 1)
}

// openDevices takes the cost of the look at open devices from the benchmark of its
// package, whose last line is a name, rounds, and pairs of a value and its unit.
func openDevices(r *testbed) {
	out, err := exec.CommandContext(r.ctx, "go", "test", "-run", "^$", "-bench", "^BenchmarkFind$", "./pkg/deferral/claim/internal/holders").CombinedOutput()
	if err != nil {
		r.t.Fatalf("the look at open devices: %v\n%s", err, out)
	}
	of := make(map[string]float64)
	_, line, _ := strings.Cut(string(out), "\nBenchmarkFind")
	line, _, _ = strings.Cut(line, "\n")
	fields := strings.Fields(line)
	for i := 3; i < len(fields); i += 2 {
		of[fields[i]], err = strconv.ParseFloat(fields[i-1], 64)
		r.must(err)
	}
	look, descriptors := time.Duration(of["ns/op"]), of["descriptors"]
	if look == 0 || descriptors == 0 {
		r.t.Fatalf("the look at open devices was not measured:\n%s", out)
	}
	r.sheet.tell("the look at open devices, of which a stage takes one and an unstage two, for 1,000 descriptors",
		fmt.Sprintf("%s (%s for %.0f of %.0f processes)", micros(time.Duration(float64(look)*1000/descriptors)), micros(look), descriptors, of["processes"]))
}

func stats(ctx context.Context, client runtimev1.RuntimeClient, v *volume) error {
	_, err := client.RuntimeGetVolumeStats(ctx, v.stats)
	return err
}

func stageAndUnstage(ctx context.Context, client runtimev1.RuntimeClient, v *volume) error {
	if _, err := client.RuntimeStageVolume(ctx, v.request); err != nil {
		return err
	}
	_, err := client.RuntimeUnstageVolume(ctx, v.unstage)
	return err
}
