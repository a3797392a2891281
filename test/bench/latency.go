package main

import (
	"context"
	"fmt"
	"time"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// latency compares single calls, one after the other: an empty one, stage and
// unstage, stats, and a question to the shim without us. They take turns, so
// that whatever else the machine does hits all of them.
func latency(ctx context.Context, set settings, r *rig, s *sheet) error {
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
	s.ratio("stats from a live shim, p50, against an empty call", "<= 2x", stats, empty, 2)
	s.ratio("stats through crust-proxy against dialling the shim for each question, p50", "<= 1.0x", stats, direct, 1)
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
