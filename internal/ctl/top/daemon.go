package top

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/status"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// The watch is tried again after a time that grows up to a bound.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// What the watch tells is gathered for a moment, so that a node on which much
// happens is drawn a few times a second and not for each change.
const (
	gatherFor  = 100 * time.Millisecond
	gatherMost = 1000
)

// bound bounds one call.
func (d Daemon) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if d.Timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, d.Timeout)
}

// ask asks the sandbox of a volume.
func (d Daemon) ask(ctx context.Context, id string) Answered {
	ctx, cancel := d.bound(ctx)
	defer cancel()
	start := time.Now()
	reply, err := d.GetVolumeStats(ctx, &adminv1.GetVolumeStatsRequest{Volume: id})
	answer := Answered{ID: id, At: time.Now(), Took: time.Since(start), Reply: reply}
	if err != nil {
		answer.Reply, answer.Failure = nil, status.Convert(err).Message() // as the daemon keeps it
		return answer
	}
	if took := reply.GetTook(); took != nil {
		answer.Took = took.AsDuration() // without our own way to the daemon
	}
	return answer
}

// look asks the daemon for what the watch does not tell. What fails is left out:
// the watch tells when the daemon is away, and an older one does not know it all.
func (d Daemon) look(ctx context.Context, settings Settings, health bool) Looked {
	ctx, cancel := d.bound(ctx)
	defer cancel()
	var e Looked
	e.Volumes, _ = d.volumes(ctx, settings)
	if !health {
		e.At = time.Now()
		return e
	}
	e.Node, _ = d.GetNode(ctx, &adminv1.GetNodeRequest{})
	if handlers, err := d.ListHandlers(ctx, &adminv1.ListHandlersRequest{}); err == nil {
		e.Handlers = handlers.GetHandlers()
	}
	e.Drivers, _ = d.ListDrivers(ctx, &adminv1.ListDriversRequest{})
	e.At = time.Now()
	return e
}

// volumes gathers all pages of a listing.
func (d Daemon) volumes(ctx context.Context, settings Settings) ([]*adminv1.Volume, error) {
	req := &adminv1.ListVolumesRequest{Driver: settings.Driver, Handler: settings.Handler}
	var all []*adminv1.Volume
	for {
		page, err := d.ListVolumes(ctx, req)
		if err != nil {
			return nil, err
		}
		all = append(all, page.GetVolumes()...)
		next := page.GetNextPageToken()
		if next == "" || next == req.GetPageToken() {
			return all, nil
		}
		req.PageToken = next
	}
}

// watch follows the volumes until ctx ends, through restarts of the daemon.
func (d Daemon) watch(ctx context.Context, settings Settings, tell func(Event)) {
	wait := firstRetry
	for {
		synced, err := d.watchOnce(ctx, settings, tell)
		if ctx.Err() != nil {
			return
		}
		if synced {
			wait = firstRetry
		}
		reason := "the daemon ended the watch"
		if !errors.Is(err, io.EOF) {
			reason = d.Explain(err)
		}
		// Not all of a node's watchers at one moment.
		pause := wait/2 + rand.N(wait) //nolint:gosec // no secret
		tell(Away{At: time.Now(), Retry: time.Now().Add(pause), Reason: reason})
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		wait = min(2*wait, lastRetry)
	}
}

// watchOnce follows one watch to its end, and tells whether it was ever whole.
func (d Daemon) watchOnce(ctx context.Context, settings Settings, tell func(Event)) (synced bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := d.WatchVolumes(ctx, &adminv1.WatchVolumesRequest{Driver: settings.Driver, Handler: settings.Handler})
	if err != nil {
		return false, err
	}
	changes := make(chan *adminv1.WatchVolumesResponse)
	var ended error
	go func() {
		defer close(changes)
		for {
			change, err := stream.Recv()
			if err != nil {
				ended = err
				return
			}
			select {
			case changes <- change:
			case <-ctx.Done():
				ended = ctx.Err()
				return
			}
		}
	}()
	for batch := range batches(changes) {
		for _, change := range batch {
			synced = synced || change.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED
		}
		tell(Watched{Changes: batch})
	}
	return synced, ended
}

// batches gathers what comes close together.
func batches(changes <-chan *adminv1.WatchVolumesResponse) func(yield func([]*adminv1.WatchVolumesResponse) bool) {
	return func(yield func([]*adminv1.WatchVolumesResponse) bool) {
		for change := range changes {
			batch := gather(change, changes)
			if !yield(batch) {
				return
			}
		}
	}
}

func gather(first *adminv1.WatchVolumesResponse, changes <-chan *adminv1.WatchVolumesResponse) []*adminv1.WatchVolumesResponse {
	batch := []*adminv1.WatchVolumesResponse{first}
	timer := time.NewTimer(gatherFor)
	defer timer.Stop()
	for len(batch) < gatherMost {
		if batch[len(batch)-1].GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED {
			return batch // the first picture need not wait
		}
		select {
		case change, more := <-changes:
			if !more {
				return batch
			}
			batch = append(batch, change)
		case <-timer.C:
			return batch
		}
	}
	return batch
}
