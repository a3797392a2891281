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

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// criListTime bounds one listing, which runtimes make from memory.
const criListTime = 10 * time.Second

// pace is how often a runtime is asked.
type pace struct {
	// poll is for one that sends no events, while there are volumes; kubelet's is 1 s.
	poll time.Duration
	// idle is the same while there are none.
	idle time.Duration
	// gap is the least time between two listings: a few of them cover hundreds of
	// events in a row.
	gap time.Duration
	// settle is when the first listing is repeated: a change after our request for
	// events and before the runtime handles it would be in neither.
	settle time.Duration
	// relist is how often everything is listed in any case.
	relist time.Duration
	// again is how often a runtime that offers no events is asked for them once more.
	again time.Duration
}

func usualPace() pace {
	return pace{poll: 2 * time.Second, idle: 30 * time.Second, gap: 20 * time.Millisecond, settle: settleTime, relist: relistTime, again: 30 * time.Second}
}

// criFollower uses one connection until that breaks. A sandbox is live while the runtime
// lists it as ready, which includes sandboxes without a container.
//
// An event only triggers a new listing. Its content is not used, because runtimes read and
// send a sandbox's state in two steps: "ready" can arrive after "not ready".
type criFollower struct {
	t      *Tracker
	c      *criClient
	hints  chan struct{}
	ended  chan error
	pushed bool      // the runtime sends events
	asked  time.Time // when events were requested last
	// unsettled is set when events were requested, until the next listing.
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

// subscribe starts to listen to the runtime's events, where it broadcasts them.
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
		f.t.polled.Store(!f.pushed || f.unsettled && f.t.polled.Load()) // events that were just requested may be refused
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

// unpushed switches to polling if the runtime offers no events. Any other end of the stream
// is a broken connection, and an error.
func (f *criFollower) unpushed(err error) error {
	if !errors.Is(err, io.EOF) && status.Code(err) != codes.Unimplemented {
		return fmt.Errorf("events: %w", err)
	}
	f.pushed = false
	if !f.t.polled.Swap(true) {
		f.t.log.Info("the container runtime sends no events; it is polled every few seconds instead", zap.String("runtime", f.t.party))
	}
	return nil
}

// listen reads the event stream until it ends, and triggers listings.
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
		default: // one is pending already
		}
	}
}

// isNews reports whether an event can mean that a sandbox came or went. A sandbox's own
// event always can, whatever is known: a listing under way may be older. Most events are of
// containers in known sandboxes.
func (f *criFollower) isNews(event *runtimeapi.ContainerEventResponse) bool {
	sandbox := event.GetPodSandboxStatus()
	if sandbox == nil || event.GetContainerId() == sandbox.GetId() {
		return true
	}
	_, known := f.t.PodOf(sandbox.GetId())
	return known != (sandbox.GetState() == runtimeapi.PodSandboxState_SANDBOX_READY)
}
