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
// unstage, stats, and a question to the shim without us. They take turns, so
// that whatever else the machine does hits all of them.
func latency(ctx context.Context, set settings, r *testbed, s *sheet) error {
	bound, err := r.oneVolume(ctx)
	if err != nil {
		return err
	}
	disk, err := r.disk(1)
	if err != nil {
		return err
	}
	other := &volume{}
	if other.request, err = r.request(1, disk); err != nil {
		return err
	}
	p, err := r.pair()
	if err != nil {
		return err
	}
	defer p.close()
	calls := []struct {
		times int
		call  func() error
		all   durations
	}{
		{times: 200, call: func() error { return emptyStats(ctx, p.empty, bound.stats) }},
		{times: 100, call: func() error { return stageAndUnstage(ctx, p.ours, other) }},
		{times: 200, call: func() error { _, err := p.ours.RuntimeGetVolumeStats(ctx, bound.stats); return err }},
		{times: 200, call: func() error { return askDirectly(ctx, bound.socket, bound.request.GetVolumeBackingPath()) }},
		{times: 200, call: func() error { _, err := p.empty.RuntimeStageVolume(ctx, other.request); return err }},
	}
	for range set.scale(20) {
		for i := range calls {
			took, err := timed(calls[i].times, calls[i].call)
			if err != nil {
				return err
			}
			calls[i].all = append(calls[i].all, took...)
		}
	}
	empty, staged, stats := calls[0].all.median(), calls[1].all.median(), calls[2].all.median()
	direct, emptyStage := calls[3].all.median(), calls[4].all.median()
	s.tell("empty call of the size of stats, p50", micros(empty))
	s.tell("empty call of the size of stage, p50", micros(emptyStage))
	s.ratio("stage and unstage together, p50, against one empty call", "<= 4x", staged, emptyStage, 4)
	if err := openDevices(ctx, s); err != nil {
		return err
	}
	s.ratio("stats from a live shim, p50, against an empty call", "<= 2x", stats, empty, 2)
	s.ratio("stats through crust-proxy against dialling the shim for each question, p50", "<= 1.0x", stats, direct, 1)
	return nil
}

// openDevices takes the cost of the look at open devices from the benchmark of its
// package, whose last line is a name, rounds, and pairs of a value and its unit.
func openDevices(ctx context.Context, s *sheet) error {
	out, err := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-bench", "^BenchmarkFind$", "./pkg/deferral/claim/internal/holders").CombinedOutput()
	if err != nil {
		return fmt.Errorf("the look at open devices: %w\n%s", err, out)
	}
	of := make(map[string]float64)
	_, line, _ := strings.Cut(string(out), "\nBenchmarkFind")
	line, _, _ = strings.Cut(line, "\n")
	fields := strings.Fields(line)
	for i := 3; i < len(fields); i += 2 {
		if of[fields[i]], err = strconv.ParseFloat(fields[i-1], 64); err != nil {
			return err
		}
	}
	look, descriptors := time.Duration(of["ns/op"]), of["descriptors"]
	if look == 0 || descriptors == 0 {
		return errNoSample
	}
	s.tell("the look at open devices, of which a stage and an unstage each take one, for 1,000 descriptors",
		fmt.Sprintf("%s (%s for %.0f of %.0f processes)", micros(time.Duration(float64(look)*1000/descriptors)), micros(look), descriptors, of["processes"]))
	return nil
}

func emptyStats(ctx context.Context, client runtimev1.RuntimeClient, req *runtimev1.RuntimeGetVolumeStatsRequest) error {
	_, err := client.RuntimeGetVolumeStats(ctx, req)
	return err
}

func stageAndUnstage(ctx context.Context, client runtimev1.RuntimeClient, v *volume) error {
	if _, err := client.RuntimeStageVolume(ctx, v.request); err != nil {
		return err
	}
	_, err := client.RuntimeUnstageVolume(ctx, v.unstage())
	return err
}

func micros(d time.Duration) string { return fmt.Sprintf("%.0f us", float64(d.Nanoseconds())/1000) }

func (s *sheet) ratio(what, target string, value, unit time.Duration, limit float64) {
	ratio := float64(value) / float64(unit)
	s.atMost(what, target, ratio, limit, fmt.Sprintf("%.2fx (%s)", ratio, micros(value)))
}
