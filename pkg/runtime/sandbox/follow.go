package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	"github.com/containerd/containerd/api/types"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

const (
	// settleTime is when the first listing is repeated: an event after our request to
	// subscribe and before containerd handles it would be in neither. It is also how
	// soon a listing replaces a query that failed.
	settleTime = time.Second
	// relistTime is how often everything is listed again, in case that events were
	// lost for any other reason.
	relistTime = 5 * time.Minute
	// eventRoom is how many events are buffered; more wait in containerd's own queue.
	eventRoom = 1024
	// lookTime bounds a query of a container whose task started.
	lookTime = 10 * time.Second
	// maxLooks is how many such queries may be under way; more events wait.
	maxLooks = 64
)

// follower uses one connection to containerd until that breaks. Everything that may take
// time is done outside of its loop, so that the end of a sandbox is known at once, whatever
// else hangs.
//
// A sandbox is what CRI labels as one and whose task runs. A runtime for which
// containerd is set to `sandboxer = "shim"` has sandboxes without a container,
// which are not seen here, but through the CRI; Kata's default is containerd's
// "podsandbox", whose are.
type follower struct {
	t       *Tracker
	c       *client
	beside  *sync.WaitGroup
	events  chan *types.Envelope
	done    chan func() error             // results of work outside of the loop, for the loop to apply
	looks   map[string]context.CancelFunc // by the id of a task that started, and may be a sandbox
	relist  *time.Timer
	touched map[string]bool // the ids of events since the listing began; nil if none is under way
	warned  atomic.Bool     // of sandboxes that are no containers
}

func followContainerd(ctx context.Context, t *Tracker, conn *grpc.ClientConn, beside *sync.WaitGroup) error {
	f := &follower{
		t: t, c: newClient(t, conn), beside: beside, events: make(chan *types.Envelope, eventRoom),
		done: make(chan func() error), looks: make(map[string]context.CancelFunc), relist: time.NewTimer(settleTime),
	}
	defer f.relist.Stop()
	if err := f.c.checkVersion(ctx); err != nil {
		return err
	}
	// Subscribed before listing, so that nothing falls between the two.
	beside.Go(func() {
		err := f.subscribe(ctx)
		f.report(ctx, func() error { return fmt.Errorf("containerd: events: %w", err) })
	})
	f.startListing(ctx)
	return f.loop(ctx)
}

func (f *follower) report(ctx context.Context, what func() error) {
	select {
	case f.done <- what:
	case <-ctx.Done():
	}
}

func (f *follower) loop(ctx context.Context) error {
	for {
		events := f.events
		if len(f.looks) >= maxLooks {
			events = nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case envelope := <-events:
			f.event(ctx, envelope)
		case what := <-f.done:
			if err := what(); err != nil {
				return err
			}
		case <-f.relist.C:
			if f.startListing(ctx) {
				f.relist.Reset(relistTime)
			} else {
				f.relist.Reset(settleTime)
			}
		}
	}
}

// filters select the events that matter; containerd does not send the others.
var filters = []string{
	`topic=="/tasks/start"`, `topic=="/tasks/exit"`, `topic=="/tasks/delete"`, `topic=="/containers/delete"`,
}

// subscribe reads the event stream until it breaks or ctx ends.
func (f *follower) subscribe(ctx context.Context) error {
	stream, err := f.c.events.Subscribe(f.c.in(ctx), &eventsapi.SubscribeRequest{Filters: filters})
	if err != nil {
		return err
	}
	for {
		envelope, err := stream.Recv()
		if err != nil {
			return err
		}
		// Containerd sends the events of all namespaces.
		if envelope.GetNamespace() != f.t.cfg.Namespace {
			continue
		}
		select {
		case f.events <- envelope:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// event handles one event. One that cannot be read is ignored: shims send events, too.
func (f *follower) event(ctx context.Context, envelope *types.Envelope) {
	switch envelope.GetTopic() {
	case "/tasks/start":
		var started eventtypes.TaskStart
		if f.read(envelope, &started) {
			f.startLook(ctx, started.GetContainerID())
		}
	case "/tasks/exit":
		f.taskEnded(envelope, &eventtypes.TaskExit{})
	case "/tasks/delete":
		f.taskEnded(envelope, &eventtypes.TaskDelete{})
	case "/containers/delete":
		var deleted eventtypes.ContainerDelete
		if f.read(envelope, &deleted) {
			f.gone(deleted.GetID())
		}
	}
}

func (f *follower) taskEnded(envelope *types.Envelope, ended interface {
	proto.Message
	GetID() string
	GetContainerID() string
},
) {
	// An exec in the sandbox exits under an id of its own.
	if f.read(envelope, ended) && (ended.GetID() == "" || ended.GetID() == ended.GetContainerID()) {
		f.gone(ended.GetContainerID())
	}
}

func (f *follower) read(envelope *types.Envelope, into proto.Message) bool {
	if err := proto.Unmarshal(envelope.GetEvent().GetValue(), into); err != nil {
		f.t.log.Warn("an event of containerd cannot be read", zap.String("topic", clip(envelope.GetTopic())), zap.Error(err))
		return false
	}
	return true
}

func (f *follower) gone(id string) {
	if !f.goodID(id) {
		return
	}
	if cancel, pending := f.looks[id]; pending {
		cancel()
		delete(f.looks, id)
	}
	f.touch(id)
	f.t.remove(id)
}

// goodID reports whether an id can be one of CRI's, and logs one that cannot.
func (f *follower) goodID(id string) bool {
	if abi.IsSandboxID(id) {
		return true
	}
	f.t.log.Warn("an event of containerd with an odd id is ignored", zap.String("id", clip(id)))
	return false
}

// touch records that an event of a sandbox is newer than the listing under way.
func (f *follower) touch(id string) {
	if f.touched != nil {
		f.touched[id] = true
	}
}

func (f *follower) startLook(ctx context.Context, id string) {
	if !f.goodID(id) || f.looks[id] != nil {
		return
	}
	asking, cancel := context.WithTimeout(ctx, lookTime)
	f.looks[id] = cancel
	f.beside.Go(func() {
		container, err := f.c.get(asking, id)
		f.report(ctx, func() error { f.endLook(asking, id, container, err); return nil })
	})
}

// endLook handles the answer, unless the task has ended. If there is none, everything is
// listed again.
func (f *follower) endLook(asking context.Context, id string, container *containersapi.Container, err error) {
	if errors.Is(asking.Err(), context.Canceled) {
		return
	}
	f.looks[id]()
	delete(f.looks, id)
	if err != nil {
		f.t.log.Warn("a container that was started cannot be queried; listing all of them again", zap.String("id", id), zap.Error(err))
		f.relist.Reset(settleTime)
		return
	}
	if s, ok := f.t.sandboxOf(container); ok {
		f.touch(s.id)
		f.t.add(s)
	}
}

// startListing lists outside of the loop. It returns false if a listing is under way.
func (f *follower) startListing(ctx context.Context) bool {
	if f.touched != nil {
		return false
	}
	f.touched = make(map[string]bool)
	f.beside.Go(func() {
		live, err := f.c.list(ctx)
		f.report(ctx, func() error { return f.endListing(live, err) })
		if err == nil && !f.warned.Load() {
			f.warnOfOthers(ctx)
		}
	})
	return true
}

// endListing applies the listing, except to sandboxes with an event since it began.
func (f *follower) endListing(live map[string]sandbox, err error) error {
	touched := f.touched
	f.touched = nil
	if err == nil {
		f.t.replace(f.c, live, touched)
	}
	return err
}

// warnOfOthers logs once that containerd has sandboxes without a container, which are not
// followed.
func (f *follower) warnOfOthers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	others, err := f.c.others(ctx)
	if err != nil {
		f.t.log.Debug("containerd does not list its sandboxes", zap.Error(err))
		return
	}
	if len(others) > 0 && !f.warned.Swap(true) {
		f.t.log.Warn("containerd has sandboxes that are not containers, and they are not followed; "+
			"to follow all, set containerd.socket to \"\" and cri.socket to containerd's socket",
			zap.String("sandboxer", clip(others[0].GetSandboxer())), zap.String("runtime", f.t.party))
	}
}
