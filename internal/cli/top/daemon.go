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

// The pause before the watch is tried again doubles up to a bound.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// Changes from the watch are gathered for a moment, so that a busy node is drawn a few
// times a second and not for each change.
const (
	gatherFor  = 100 * time.Millisecond
	gatherMost = 1000
)

// withTimeout bounds one call.
func (d Daemon) withTimeout(ctx context.Context) (context.Context, context.CancelFunc) {
	if d.Timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, d.Timeout)
}

// fetchStats asks the sandbox of a volume for its numbers.
func (d Daemon) fetchStats(ctx context.Context, id string) StatsFetched {
	ctx, cancel := d.withTimeout(ctx)
	defer cancel()
	start := time.Now()
	reply, err := d.GetVolumeStats(ctx, &adminv1.GetVolumeStatsRequest{Volume: id})
	answer := StatsFetched{ID: id, At: time.Now(), Took: time.Since(start), Reply: reply}
	if err != nil {
		answer.Reply, answer.Failure = nil, status.Convert(err).Message() // as the daemon records it
		return answer
	}
	if took := reply.GetTook(); took != nil {
		answer.Took = took.AsDuration() // without the call to the daemon
	}
	return answer
}

// poll asks the daemon for what the watch does not report. A part that fails is left
// out: the watch reports when the daemon is away, and an older daemon lacks some calls.
func (d Daemon) poll(ctx context.Context, settings Settings, health bool) Polled {
	ctx, cancel := d.withTimeout(ctx)
	defer cancel()
	var e Polled
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

// PageSize is the most volumes that the daemon gives in one page.
const PageSize = 5000

// volumes reads all pages of a listing.
func (d Daemon) volumes(ctx context.Context, settings Settings) ([]*adminv1.Volume, error) {
	req := &adminv1.ListVolumesRequest{Driver: settings.Driver, Handler: settings.Handler, PageSize: PageSize}
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
func (d Daemon) watch(ctx context.Context, settings Settings, send func(Event)) {
	wait := firstRetry
	for {
		synced, err := d.watchOnce(ctx, settings, send)
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
		// Random, so that not all watchers of a node retry at the same moment.
		pause := wait/2 + rand.N(wait) //nolint:gosec // no secret
		send(Disconnected{At: time.Now(), Retry: time.Now().Add(pause), Reason: reason})
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		wait = min(2*wait, lastRetry)
	}
}

// watchOnce follows one watch to its end. synced tells whether its listing was complete.
func (d Daemon) watchOnce(ctx context.Context, settings Settings, send func(Event)) (synced bool, err error) {
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
	for first := range changes {
		batch := gather(first, changes)
		// A batch ends at the mark that the listing is complete.
		synced = synced || batch[len(batch)-1].GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED
		send(Watched{Changes: batch})
	}
	return synced, ended
}

// gather collects the changes that follow a first one closely.
func gather(first *adminv1.WatchVolumesResponse, changes <-chan *adminv1.WatchVolumesResponse) []*adminv1.WatchVolumesResponse {
	batch := []*adminv1.WatchVolumesResponse{first}
	timer := time.NewTimer(gatherFor)
	defer timer.Stop()
	for len(batch) < gatherMost {
		if batch[len(batch)-1].GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED {
			return batch // the first screen need not wait
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
