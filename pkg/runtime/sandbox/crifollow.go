package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// criListTime bounds one listing, which runtimes make from memory.
const criListTime = 10 * time.Second

// pace is how often a runtime is asked.
type pace struct {
	// poll is for one that tells of no changes, while there are volumes; kubelet's is 1 s.
	poll time.Duration
	// idle is the same while there are none.
	idle time.Duration
	// gap is between two listings at least: hundreds of events in a row are
	// answered by a few of them.
	gap time.Duration
	// settle is when the first listing is repeated: a change between our asking
	// for events and the runtime's taking it up would be in neither.
	settle time.Duration
	// relist is how often everything is listed in any case.
	relist time.Duration
	// again is how often a runtime that offers no events is asked for them once more.
	again time.Duration
}

func usualPace() pace {
	return pace{poll: 2 * time.Second, idle: 30 * time.Second, gap: 20 * time.Millisecond, settle: settleTime, relist: relistTime, again: 30 * time.Second}
}

// criFollower goes by one connection until that breaks. A sandbox is live while the
// runtime says that it is ready. What exactly makes it so is the runtime's affair, and
// includes sandboxes without a container.
//
// Events only say when to list anew. What they tell is not taken, because
// runtimes read a sandbox's state and send it in two steps: the word that it is
// ready can come after the word that it is not.
type criFollower struct {
	t      *Tracker
	c      *criClient
	hints  chan struct{}
	ended  chan error
	pushed bool      // changes are told
	asked  time.Time // for events, the last time
	// unsettled is set after events were asked for, until a listing is to be repeated.
	unsettled bool
	beside    *sync.WaitGroup
}

func followCRI(ctx context.Context, t *Tracker, conn *grpc.ClientConn, beside *sync.WaitGroup) error {
	c := &criClient{t: t, api: runtimeapi.NewRuntimeServiceClient(conn)}
	f := &criFollower{t: t, c: c, hints: make(chan struct{}, 1), ended: make(chan error, 1), beside: beside}
	if err := f.subscribe(ctx); err != nil {
		return err
	}
	return f.loop(ctx)
}

// subscribe listens to the runtime's events where that is possible, until they end.
func (f *criFollower) subscribe(ctx context.Context) error {
	f.asked, f.unsettled = time.Now(), true
	broadcasts, err := f.c.broadcasts(ctx)
	if err != nil {
		return err
	}
	if f.pushed = broadcasts; broadcasts {
		f.beside.Go(func() { f.ended <- f.listen(ctx) })
	}
	return nil
}

func (f *criFollower) loop(ctx context.Context) error {
	for {
		live, err := f.c.live(ctx)
		if err != nil {
			return err
		}
		f.t.replace(f.c, live, nil)
		f.t.polled.Store(!f.pushed || f.unsettled && f.t.polled.Load()) // events just asked for may be refused
		most := f.t.pace.relist
		if f.unsettled {
			f.unsettled, most = false, f.t.pace.settle
		}
		if err := f.wait(ctx, most); err != nil {
			return err
		}
	}
}

func (f *criFollower) wait(ctx context.Context, most time.Duration) error {
	sys.Sleep(ctx, f.t.pace.gap)
	start, busy := time.Now(), f.t.cfg.Busy
	tick := time.NewTicker(f.t.pace.poll)
	defer tick.Stop()
	end := time.NewTimer(most)
	defer end.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.hints:
			return nil
		case <-end.C:
			return nil
		case err := <-f.ended:
			return f.unpushed(err)
		case <-tick.C:
			if !f.pushed && time.Since(f.asked) >= f.t.pace.again {
				return f.subscribe(ctx)
			}
			if !f.pushed && (busy == nil || busy() || time.Since(start) >= f.t.pace.idle) {
				return nil
			}
		}
	}
}

// unpushed goes over to asking where a runtime offers no events. Whatever else
// ended them is a connection that broke.
func (f *criFollower) unpushed(err error) error {
	if !errors.Is(err, io.EOF) && status.Code(err) != codes.Unimplemented {
		return fmt.Errorf("events: %w", err)
	}
	f.pushed = false
	if !f.t.polled.Swap(true) {
		f.t.log.Info("the container runtime tells of no changes; it is asked every few seconds instead", zap.String("runtime", f.t.party))
	}
	return nil
}

// listen makes a hint of each event until there are no more.
func (f *criFollower) listen(ctx context.Context) error {
	stream, err := f.c.api.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return err
		}
		if !f.isNews(event) {
			continue
		}
		select {
		case f.hints <- struct{}{}:
		default: // the one that waits will do
		}
	}
}

// isNews tells whether an event can mean that a sandbox came or went. A sandbox's
// own always can, whatever is known: a listing under way may be older. Most are
// of containers in sandboxes that are known.
func (f *criFollower) isNews(event *runtimeapi.ContainerEventResponse) bool {
	sandbox := event.GetPodSandboxStatus()
	if sandbox == nil || event.GetContainerId() == sandbox.GetId() {
		return true
	}
	_, known := f.t.PodOf(sandbox.GetId())
	return known != (sandbox.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY)
}
