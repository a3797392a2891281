package sandbox

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	"github.com/containerd/containerd/api/types"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"
)

const (
	// settleTime is when the first listing is repeated: an event between our
	// subscribing and containerd's taking it up would be seen by neither. It is
	// also how soon a question that failed is made up for by a listing.
	settleTime = time.Second
	// relistTime is how often everything is listed anew, against events that
	// were lost for any other reason.
	relistTime = 5 * time.Minute
	// eventRoom is how many events may wait for their turn; behind them
	// containerd's own queue fills.
	eventRoom = 1024
)

// follower goes by one connection until that breaks. Everything that may take
// time is done beside its loop, so that a sandbox that goes is known at once,
// whatever else hangs.
type follower struct {
	s       *containerd
	t       *Tracker
	c       *client
	beside  sync.WaitGroup
	events  chan *types.Envelope
	broken  chan error
	looks   map[string]*look
	found   chan *look
	listed  chan listing
	touched map[string]bool // what events told since the listing began; nil without one
	warned  atomic.Bool     // of sandboxes that are no containers
	// answered is set once a listing came back.
	answered bool
}

func (f *follower) loop(ctx context.Context) error {
	relist := time.NewTimer(settleTime)
	defer relist.Stop()
	for {
		events := f.events
		if len(f.looks) >= maxLooks {
			events = nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-f.broken:
			return err
		case envelope := <-events:
			f.event(ctx, envelope)
		case l := <-f.found:
			if !f.endLook(l) {
				relist.Reset(settleTime)
			}
		case l := <-f.listed:
			if err := f.endListing(l); err != nil {
				return err
			}
		case <-relist.C:
			if f.startListing(ctx) {
				relist.Reset(relistTime)
			} else {
				relist.Reset(settleTime)
			}
		}
	}
}

// filters select the events that matter; containerd keeps the rest to itself.
var filters = []string{
	`topic=="/tasks/start"`, `topic=="/tasks/exit"`, `topic=="/tasks/delete"`, `topic=="/containers/delete"`,
}

// subscribe reads the event stream until it breaks or ctx ends.
func (f *follower) subscribe(ctx context.Context) {
	stream, err := f.c.events.Subscribe(f.c.in(ctx), &eventsapi.SubscribeRequest{Filters: filters})
	for err == nil {
		var envelope *types.Envelope
		if envelope, err = stream.Recv(); err != nil {
			break
		}
		// Containerd tells of every namespace, whichever was asked for.
		if envelope.GetNamespace() != f.s.cfg.Namespace {
			continue
		}
		select {
		case f.events <- envelope:
		case <-ctx.Done():
			return
		}
	}
	f.broken <- fmt.Errorf("containerd: events: %w", err)
}

// event goes by one event. What cannot be read is passed over: events come from
// shims as well.
func (f *follower) event(ctx context.Context, envelope *types.Envelope) {
	switch envelope.GetTopic() {
	case "/tasks/start":
		var started eventtypes.TaskStart
		if f.read(envelope, &started) {
			f.startLook(ctx, started.GetContainerID())
		}
	case "/tasks/exit":
		var ended eventtypes.TaskExit
		// An exec in the sandbox exits under an id of its own.
		if f.read(envelope, &ended) && (ended.GetID() == "" || ended.GetID() == ended.GetContainerID()) {
			f.gone(ended.GetContainerID())
		}
	case "/tasks/delete":
		var deleted eventtypes.TaskDelete
		if f.read(envelope, &deleted) && (deleted.GetID() == "" || deleted.GetID() == deleted.GetContainerID()) {
			f.gone(deleted.GetContainerID())
		}
	case "/containers/delete":
		var deleted eventtypes.ContainerDelete
		if f.read(envelope, &deleted) {
			f.gone(deleted.GetID())
		}
	}
}

func (f *follower) read(envelope *types.Envelope, into proto.Message) bool {
	if err := proto.Unmarshal(envelope.GetEvent().GetValue(), into); err != nil {
		f.t.log.Warn("an event of containerd cannot be read", zap.String("topic", clip(envelope.GetTopic())), zap.Error(err))
		return false
	}
	return true
}

// gone forgets a sandbox, and whatever is still being asked about it.
func (f *follower) gone(id string) {
	if !f.goodID(id) {
		return
	}
	if l, pending := f.looks[id]; pending {
		l.cancel()
		delete(f.looks, id)
	}
	f.touch(id)
	f.t.remove(id)
}

// goodID tells whether an id can be one of CRI's, and logs one that cannot.
func (f *follower) goodID(id string) bool {
	if idForm.MatchString(id) {
		return true
	}
	f.t.log.Warn("an event of containerd with an odd id is ignored", zap.String("id", clip(id)))
	return false
}

// touch notes that an event was newer than the listing under way.
func (f *follower) touch(id string) {
	if f.touched != nil {
		f.touched[id] = true
	}
}
