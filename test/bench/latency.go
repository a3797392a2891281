package main

import (
	"cmp"
	"context"
	"errors"
	"os"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// latency compares stats with a question to the shim without us.
func latency(r *testbed) {
	bound, ours := r.oneVolume(), r.daemon.Runtime()
	all := r.timed(r.set.scale(20), 200,
		func() error { return stats(r.ctx, ours, bound) },
		func() error { return askDirectly(r.ctx, bound.socket, bound.request.GetVolumeBackingPath()) },
	)
	r.sheet.ratio("stats through crust-proxy against dialling the shim for each question, p50", "<= 1.0x", median(all[0]), median(all[1]), 1)
}

// looks compares one look at who has a device open, and stage and unstage, with few descriptors on the
// node and beside many.
func looks(r *testbed) {
	r.daemon.Start()
	v, ours, empty := r.volume(0, r.disk(0)), r.daemon.Runtime(), r.empty()
	other, err := os.Open(r.disk(1))
	r.must(err)
	defer func() { _ = other.Close() }()
	began := time.Now()
	finder := openers.New()
	r.sheet.tell("to load the program that reads who has a device open, once at each start", millis(time.Since(began)))
	ways := []func() error{
		func() error {
			users, err := finder.Await(r.ctx, openers.Query{FD: int(other.Fd()), Own: 1}, 0)
			return cmp.Or(err, inUse(users))
		},
		func() error { return stageAndUnstage(r.ctx, ours, v) },
		func() error { _, err := empty.RuntimeStageVolume(r.ctx, v.request); return err },
	}
	few := r.timed(r.set.scale(20), 200, ways...)
	openFiles(r.t)
	many := r.timed(r.set.scale(20), 200, ways...)
	r.sheet.tell("a look at who has a device open, p50", micros(median(few[0])))
	r.sheet.ratio("the same beside 50,000 more open descriptors", "<= 1.5x", median(many[0]), median(few[0]), 1.5)
	r.sheet.ratio("stage and unstage together, p50, against one empty call", "<= 6x", median(few[1]), median(few[2]), 6)
	r.sheet.ratio("the same beside 50,000 more open descriptors", "<= 6x", median(many[1]), median(many[2]), 6)
}

func inUse(users openers.Users) error {
	if users.Names == "" {
		return nil
	}
	return errors.New("it is open in " + users.Names)
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
