package main

import (
	"context"
	"fmt"
	"os/exec"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// read is something that operators or Prometheus ask of the daemon.
type read struct {
	name string
	ask  func() error
	// program is whether a program of its own asks.
	program bool
}

// readRounds is how often each is asked; the median counts.
const readRounds = 7

// reads measures what operators and Prometheus ask on a node of count volumes: how
// long it takes, and what it adds to the slowest stage or unstage under way.
func reads(r *testbed, count int) {
	r.build("crustctl")
	client, v := r.daemon.Runtime(), r.volume(count, r.image(count))
	beside := func(f func() error) func() time.Duration {
		return func() time.Duration { return slowest(r, client, v, f) }
	}
	for _, one := range readsOf(r, r.daemon.Admin()) {
		took := median(r.timed(readRounds, 1, one.ask)[0])
		worst := inTurns(readRounds, beside(one.ask), beside(func() error { return spinBeside(r, one, took) }))
		delay := max(0, worst[0]-worst[1])
		r.sheet.add(figure{
			what:   fmt.Sprintf("%s with %d volumes, p50; the slowest stage or unstage beside it", one.name, count),
			value:  fmt.Sprintf("%s; %s more (%s to %s)", millis(took), millis(delay), millis(worst[0]), millis(worst[1])),
			target: "<= 1 s, <= 10 ms more", met: took <= time.Second && delay <= 10*time.Millisecond,
		})
	}
}

// spinBeside keeps a core busy for as long as the read takes, in the same process or in one of
// its own, as the read does, but asks the daemon nothing.
func spinBeside(r *testbed, o read, took time.Duration) error {
	if !o.program {
		return spin(took.String())
	}
	p := r.again(roleSpin, took.String())
	return exec.CommandContext(r.ctx, p.Program, p.Args...).Run() //nolint:gosec // ourselves
}

func spin(d string) error {
	end, err := time.ParseDuration(d)
	for start := time.Now(); time.Since(start) < end; {
	}
	return err
}

func readsOf(r *testbed, admin adminv1.AdminClient) []read {
	id := ""
	return []read{
		{name: "GetNode", ask: func() error { _, err := admin.GetNode(r.ctx, &adminv1.GetNodeRequest{}); return err }},
		{name: "ListVolumes, all pages", ask: func() (err error) { id, err = allPages(r.ctx, admin); return err }},
		{name: "GetVolume by the beginning of an id", ask: func() error {
			_, err := admin.GetVolume(r.ctx, &adminv1.GetVolumeRequest{Volume: id[:20]})
			return err
		}},
		{name: "ListHandlers", ask: func() error { _, err := admin.ListHandlers(r.ctx, &adminv1.ListHandlersRequest{}); return err }},
		{name: "ListDrivers", ask: func() error { _, err := admin.ListDrivers(r.ctx, &adminv1.ListDriversRequest{}); return err }},
		{name: "WatchVolumes, to the end of what is there", ask: func() error { return untilSynced(r.ctx, admin) }},
		{name: "Reconcile", ask: func() error { _, err := admin.Reconcile(r.ctx, &adminv1.ReconcileRequest{}); return err }},
		{name: "a scrape of the metrics", ask: func() error { _, err := r.daemon.HTTP("/metrics"); return err }},
		{name: "crustctl top --once", ask: func() error { return crustctl(r, "top", "--once") }, program: true},
		{name: "crustctl doctor", ask: func() error { return crustctl(r, "doctor") }, program: true},
	}
}

// crustctl runs a command of crustctl. Doctor finds fault with this makeshift node;
// only whether it ran matters.
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

// allPages lists all volumes and gives the id of the last one.
func allPages(ctx context.Context, admin adminv1.AdminClient) (id string, err error) {
	req := &adminv1.ListVolumesRequest{}
	for {
		page, err := admin.ListVolumes(ctx, req)
		if err != nil {
			return "", err
		}
		for _, v := range page.GetVolumes() {
			id = v.GetId()
		}
		if page.GetNextPageToken() == "" {
			return id, nil
		}
		req.PageToken = page.GetNextPageToken()
	}
}

func untilSynced(ctx context.Context, admin adminv1.AdminClient) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := admin.WatchVolumes(ctx, &adminv1.WatchVolumesRequest{})
	if err != nil {
		return err
	}
	for {
		change, err := stream.Recv()
		if err != nil || change.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED {
			return err
		}
	}
}

// slowest stages and unstages a volume until f ends, and tells how long the slowest of
// these calls took.
func slowest(r *testbed, client runtimev1.RuntimeClient, v *volume, f func() error) (worst time.Duration) {
	ended := make(chan error, 1)
	go func() { ended <- f() }()
	for {
		start := time.Now()
		_, err := client.RuntimeStageVolume(r.ctx, v.request)
		staged := time.Now()
		r.must(err)
		_, err = client.RuntimeUnstageVolume(r.ctx, v.unstage)
		r.must(err)
		worst = max(worst, staged.Sub(start), time.Since(staged))
		select {
		case err := <-ended:
			r.must(err)
			return worst
		default:
		}
	}
}
