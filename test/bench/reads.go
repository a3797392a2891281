package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// read is something that operators or Prometheus ask of the daemon.
type read struct {
	name string
	ask  func(context.Context) error
	// program is whether a program of its own asks.
	program bool
}

// readRounds is how often each is asked; the median counts.
const readRounds = 7

// reads measures what operators and Prometheus ask on a node of count volumes: how
// long it takes, and what it adds to the slowest stage or unstage under way.
func reads(ctx context.Context, r *testbed, s *sheet, count int) error {
	conn, err := r.dial(r.dir + "/run/admin.sock")
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := rig.BuildRelease(r.dir, "crustctl"); err != nil {
		return err
	}
	ctl := r.dir + "/crustctl"
	load, err := r.newStaging(count)
	if err != nil {
		return err
	}
	defer load.done()
	for _, one := range r.reads(adminv1.NewAdminClient(conn), ctl) {
		took, err := timed(readRounds, func() error { return one.ask(ctx) })
		if err != nil {
			return fmt.Errorf("%s: %w", one.name, err)
		}
		s.atMost(fmt.Sprintf("%s with %d volumes, p50", one.name, count), "<= 1 s", took.median().Seconds(), 1, milliseconds(took.median()))
		beside, control, err := load.slowest(ctx, one.ask, func(ctx context.Context) error { return one.spin(ctx, took.median()) })
		if err != nil {
			return fmt.Errorf("%s: %w", one.name, err)
		}
		delay := max(0, beside-control)
		s.atMost("the slowest stage or unstage beside it, against one beside a busy program that asks nothing", "<= 10 ms more", delay.Seconds(), 0.010,
			fmt.Sprintf("%s more (%s to %s)", milliseconds(delay), milliseconds(beside), milliseconds(control)))
	}
	return nil
}

// spin keeps a core busy for as long as the read takes, in the same process or in one of
// its own, as the read does, but asks the daemon nothing.
func (o read) spin(ctx context.Context, took time.Duration) error {
	if !o.program {
		return spin(took.String())
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return exec.CommandContext(ctx, self, roleSpin, took.String()).Run() //nolint:gosec // ourselves
}

func spin(d string) error {
	end, err := time.ParseDuration(d)
	for start := time.Now(); time.Since(start) < end; {
	}
	return err
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
}

func (r *testbed) reads(admin adminv1.AdminClient, ctl string) []read {
	run := func(args ...string) func(context.Context) error {
		return func(ctx context.Context) error { return r.crustctl(ctx, ctl, args...) }
	}
	id := ""
	return []read{
		{name: "GetNode", ask: func(ctx context.Context) error { _, err := admin.GetNode(ctx, &adminv1.GetNodeRequest{}); return err }},
		{name: "ListVolumes, all pages", ask: func(ctx context.Context) (err error) { id, err = allPages(ctx, admin); return err }},
		{name: "GetVolume by the beginning of an id", ask: func(ctx context.Context) error {
			_, err := admin.GetVolume(ctx, &adminv1.GetVolumeRequest{Volume: id[:20]})
			return err
		}},
		{name: "ListHandlers", ask: func(ctx context.Context) error {
			_, err := admin.ListHandlers(ctx, &adminv1.ListHandlersRequest{})
			return err
		}},
		{name: "ListDrivers", ask: func(ctx context.Context) error {
			_, err := admin.ListDrivers(ctx, &adminv1.ListDriversRequest{})
			return err
		}},
		{name: "WatchVolumes, to the end of what is there", ask: func(ctx context.Context) error { return untilSynced(ctx, admin) }},
		{name: "Reconcile", ask: func(ctx context.Context) error {
			_, err := admin.Reconcile(ctx, &adminv1.ReconcileRequest{})
			return err
		}},
		{name: "a scrape of the metrics", ask: func(context.Context) error { _, err := r.get("/metrics"); return err }},
		{name: "crustctl top --once", ask: run("top", "--once"), program: true},
		{name: "crustctl doctor", ask: run("doctor", "--kubelet-root", r.kubelet, "--kata-dir", r.kata), program: true},
	}
}

// crustctl runs a command of crustctl. Doctor finds fault with this makeshift node;
// only whether it ran matters.
func (r *testbed) crustctl(ctx context.Context, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, program, append(args, "--socket", r.dir+"/run/admin.sock")...) //nolint:gosec // our own program
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

// staging stages and unstages one volume over and over.
type staging struct {
	client runtimev1.RuntimeClient
	volume *volume
	done   func()
}

func (r *testbed) newStaging(n int) (*staging, error) {
	client, done, err := r.client()
	if err != nil {
		return nil, err
	}
	image, err := r.image(n)
	if err == nil {
		var req *runtimev1.RuntimeStageVolumeRequest
		if req, err = r.request(n, image); err == nil {
			return &staging{client: client, volume: &volume{request: req}, done: done}, nil
		}
	}
	done()
	return nil, err
}

// slowest is the median of the slowest stages or unstages of each round, beside the one
// and beside the other. The two take turns, so that what else the machine does hits both.
func (l *staging) slowest(ctx context.Context, one, other func(context.Context) error) (ofOne, ofOther time.Duration, err error) {
	var all [2]durations
	for range readRounds {
		for i, f := range []func(context.Context) error{one, other} {
			worst, err := l.beside(ctx, f)
			if err != nil {
				return 0, 0, err
			}
			all[i] = append(all[i], worst)
		}
	}
	return all[0].median(), all[1].median(), nil
}

// beside stages and unstages until f ends, and tells how long the slowest took.
func (l *staging) beside(ctx context.Context, f func(context.Context) error) (worst time.Duration, err error) {
	ended := make(chan error, 1)
	go func() { ended <- f(ctx) }()
	for {
		took, err := l.once(ctx)
		if err != nil {
			return 0, err
		}
		worst = max(worst, took[0], took[1])
		select {
		case err := <-ended:
			return worst, err
		default:
		}
	}
}

// once stages and unstages, and tells how long each took.
func (l *staging) once(ctx context.Context) (durations, error) {
	start := time.Now()
	if _, err := l.client.RuntimeStageVolume(ctx, l.volume.request); err != nil {
		return nil, err
	}
	staged := time.Now()
	_, err := l.client.RuntimeUnstageVolume(ctx, l.volume.unstage())
	return durations{staged.Sub(start), time.Since(staged)}, err
}
