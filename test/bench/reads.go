package main

import (
	"context"
	"fmt"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// read is something that operators or Prometheus ask of the daemon, or another work of its.
type read struct {
	name string
	ask  func() error
	most time.Duration // that it may take; 0 is anything
}

const (
	// readRounds is how often each is asked; the median counts.
	readRounds = 7
	// mostBeside is how much longer a stats call may take while the daemon computes, p99.
	mostBeside = 5
	// mostGrown is how much longer anything may take with five times the volumes.
	mostGrown = 6
)

// reads measures what operators and Prometheus ask on a node of count volumes: how long it takes, what
// it does to stats, and the most resident memory after each. It tells how long each took.
func reads(r *testbed, count int) map[string]time.Duration {
	r.build("crustctl")
	disk, client := r.image(0), r.daemon.Runtime()
	r.shims(1, disk)
	asked := r.bound(client, 0, disk)
	beside := func(work func() error) func() time.Duration {
		return func() time.Duration {
			return p99Beside(r, func() error { return stats(r.ctx, client, asked) }, work)
		}
	}
	idle := func() error { time.Sleep(10 * time.Millisecond); return nil }
	took, memory := make(map[string]time.Duration), 0.0
	for _, one := range readsOf(r, count) {
		took[one.name] = median(r.timed(readRounds, 1, one.ask)[0])
		memory = max(memory, r.memory())
		worst := inTurns(3, beside(idle), beside(one.ask))
		f := figure{what: fmt.Sprintf("%s with %d volumes, p50; stats p99 while it goes on, against idle", one.name, count), target: "<= 5x"}
		if one.most > 0 {
			f.target = fmt.Sprintf("<= %d ms, <= 5x", one.most.Milliseconds())
		}
		times := float64(worst[1]) / float64(worst[0])
		f.value = fmt.Sprintf("%s; %.1fx (%s to %s)", millis(took[one.name]), times, millis(worst[0]), millis(worst[1]))
		f.met = times <= mostBeside && (one.most == 0 || took[one.name] <= one.most)
		r.sheet.add(f)
	}
	r.sheet.mib(fmt.Sprintf("the most resident memory with %d volumes after any of these", count), "<= 64 MiB", memory, 64)
	return took
}

// p99Beside is that of a call while something goes on again and again.
func p99Beside(r *testbed, call, work func() error) time.Duration {
	ctx, cancel := context.WithTimeout(r.ctx, time.Duration(r.set.scale(2000))*time.Millisecond)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		for {
			if err := work(); err != nil || ctx.Err() != nil {
				ended <- err
				return
			}
		}
	}()
	var took durations
	for {
		took = append(took, r.timed(1, 1, call)[0]...)
		select {
		case err := <-ended:
			r.must(err)
			return took.p99()
		default:
		}
	}
}

func readsOf(r *testbed, count int) []read {
	admin, client, v := r.daemon.Admin(), r.daemon.Runtime(), r.volume(count, r.image(count))
	return []read{
		{"GetNode", func() error { _, err := admin.GetNode(r.ctx, &adminv1.GetNodeRequest{}); return err }, 50 * time.Millisecond},
		{"a page of ListVolumes", func() error { _, err := admin.ListVolumes(r.ctx, &adminv1.ListVolumesRequest{}); return err }, 50 * time.Millisecond},
		{"ListVolumes, all pages", func() error { return allPages(r.ctx, admin) }, 100 * time.Millisecond},
		{"a scrape of the metrics", func() error { _, err := r.daemon.HTTP("/metrics"); return err }, 50 * time.Millisecond},
		{"Reconcile", func() error { _, err := admin.Reconcile(r.ctx, &adminv1.ReconcileRequest{}); return err }, 200 * time.Millisecond},
		{"crustctl doctor", func() error { return crustctl(r, "doctor") }, 300 * time.Millisecond},
		{"crustctl top --once", func() error { return crustctl(r, "top", "--once") }, 0},
		{"stage and unstage", func() error { return stageAndUnstage(r.ctx, client, v) }, 0},
	}
}

// crustctl runs a command of crustctl. Doctor finds fault with this makeshift node; only whether it ran matters.
func crustctl(r *testbed, args ...string) error {
	cmd := r.daemon.Crustctl(args...)
	out, err := cmd.CombinedOutput()
	if err != nil && cmd.ProcessState != nil && cmd.ProcessState.Exited() && args[0] == "doctor" && len(out) > 1000 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%v: %w\n%s", args, err, out)
	}
	return nil
}

// allPages lists all volumes.
func allPages(ctx context.Context, admin adminv1.AdminClient) error {
	req := &adminv1.ListVolumesRequest{}
	for {
		page, err := admin.ListVolumes(ctx, req)
		if err != nil || page.GetNextPageToken() == "" {
			return err
		}
		req.PageToken = page.GetNextPageToken()
	}
}

// larger measures once more what was measured with a fifth of the volumes.
func larger(r *testbed, count int, before map[string]time.Duration) (grown []ratio) {
	for _, one := range readsOf(r, count) {
		rounds := 3
		if before[one.name] > 100*time.Millisecond { // seconds by now
			rounds = 1
		}
		grown = append(grown, ratio{one.name, median(r.timed(rounds, 1, one.ask)[0]), before[one.name], mostGrown})
	}
	return grown
}
