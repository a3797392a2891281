package sandbox

import (
	"context"
	"fmt"
	"time"

	eventtypes "github.com/containerd/containerd/api/events"
	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	eventsapi "github.com/containerd/containerd/api/services/events/v1"
	"github.com/containerd/containerd/api/types"
	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"
)

const (
	// askTime bounds one question to containerd.
	askTime = 10 * time.Second
	// settleTime is when the first listing is repeated: an event between our
	// subscribing and containerd's taking it up would be seen by neither.
	settleTime = time.Second
	// relistTime is how often everything is listed anew, against events that
	// were lost for any other reason.
	relistTime = 5 * time.Minute
	// eventRoom is how many events may wait while a listing runs.
	eventRoom = 1024
)

// follow lists the sandboxes and then goes by events, until something breaks.
func (t *Tracker) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c, err := dial(t.cfg.Socket, t.cfg.Namespace)
	if err != nil {
		return err
	}
	defer func() { _ = c.conn.Close() }()
	// Subscribed before listing, so that nothing falls between the two.
	events, broken := t.subscribe(ctx, c)
	if err := t.list(ctx, c); err != nil {
		return err
	}
	t.setCurrent(c)
	defer t.setCurrent(nil)
	relist := time.NewTimer(settleTime)
	defer relist.Stop()
	for {
		select {
		case err := <-broken:
			return err
		case envelope := <-events:
			if err := t.event(ctx, c, envelope); err != nil {
				return err
			}
		case <-relist.C:
			if err := t.list(ctx, c); err != nil {
				return err
			}
			relist.Reset(relistTime)
		}
	}
}

// filters select the events that matter; containerd answers to the rest.
var filters = []string{
	`topic=="/tasks/start"`, `topic=="/tasks/exit"`, `topic=="/tasks/delete"`, `topic=="/containers/delete"`,
}

// subscribe reads the event stream into a channel until ctx ends.
func (t *Tracker) subscribe(ctx context.Context, c *client) (<-chan *types.Envelope, <-chan error) {
	events, broken := make(chan *types.Envelope, eventRoom), make(chan error, 1)
	go func() {
		stream, err := c.events.Subscribe(c.in(ctx), &eventsapi.SubscribeRequest{Filters: filters})
		for err == nil {
			var envelope *types.Envelope
			if envelope, err = stream.Recv(); err != nil {
				break
			}
			if envelope.GetNamespace() != t.cfg.Namespace {
				continue
			}
			select {
			case events <- envelope:
			case <-ctx.Done():
				return
			}
		}
		broken <- fmt.Errorf("containerd: events: %w", err)
	}()
	return events, broken
}

// list compares what is known with what there is.
func (t *Tracker) list(ctx context.Context, c *client) error {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	live := make(map[string]sandbox)
	err := c.each(ctx, fmt.Sprintf("labels.%q==%s", kindLabel, kindSandbox), func(container *containersapi.Container) {
		if s, ok := sandboxOf(container); ok {
			live[s.id] = s
		}
	})
	if err != nil {
		return err
	}
	running, err := c.running(ctx)
	if err != nil {
		return err
	}
	for id := range live {
		if !running[id] {
			delete(live, id)
		}
	}
	t.replace(live)
	return nil
}

// event goes by one event. What cannot be read is passed over: events come from
// shims as well.
func (t *Tracker) event(ctx context.Context, c *client, envelope *types.Envelope) error {
	switch envelope.GetTopic() {
	case "/tasks/start":
		var started eventtypes.TaskStart
		if t.read(envelope, &started) {
			return t.started(ctx, c, started.GetContainerID())
		}
	case "/tasks/exit":
		var ended eventtypes.TaskExit
		// An exec in the sandbox exits under an id of its own.
		if t.read(envelope, &ended) && (ended.GetID() == "" || ended.GetID() == ended.GetContainerID()) {
			t.remove(ended.GetContainerID())
		}
	case "/tasks/delete":
		var deleted eventtypes.TaskDelete
		if t.read(envelope, &deleted) && (deleted.GetID() == "" || deleted.GetID() == deleted.GetContainerID()) {
			t.remove(deleted.GetContainerID())
		}
	case "/containers/delete":
		var deleted eventtypes.ContainerDelete
		if t.read(envelope, &deleted) {
			t.remove(deleted.GetID())
		}
	}
	return nil
}

func (t *Tracker) read(envelope *types.Envelope, into proto.Message) bool {
	if err := proto.Unmarshal(envelope.GetEvent().GetValue(), into); err != nil {
		t.log.Warn("an event of containerd cannot be read", zap.String("topic", clip(envelope.GetTopic())), zap.Error(err))
		return false
	}
	return true
}

// started looks whether a task that started is a sandbox.
func (t *Tracker) started(ctx context.Context, c *client, id string) error {
	if !idForm.MatchString(id) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	container, err := c.get(ctx, id)
	if err != nil || container == nil {
		return err
	}
	if s, ok := sandboxOf(container); ok {
		t.add(s)
	}
	return nil
}

func clip(s string) string {
	const most = 128
	if len(s) > most {
		return s[:most]
	}
	return s
}
