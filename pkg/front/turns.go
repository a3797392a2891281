package front

import (
	"context"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// turnPatience is how long a call waits for another one on the same volume. A
// driver that hangs must not gather kubelet's repeated calls behind it: they are
// told to come again.
const turnPatience = 5 * time.Second

// volumeID names a CSI volume on this node.
type volumeID struct{ driver, id string }

// turns lets one call at a time change a volume. It is a mark that an operation
// is under way rather than a lock: nobody waits on it for long.
type turns struct {
	mu    sync.Mutex
	taken map[volumeID]chan struct{} // closed when the turn ends
}

// take waits for the volume's turn and gives the way to end it.
func (t *turns) take(ctx context.Context, id volumeID) (end func(), err error) {
	patience := time.NewTimer(turnPatience)
	defer patience.Stop()
	for {
		before := t.enter(id)
		if before == nil {
			return func() { t.leave(id) }, nil
		}
		select {
		case <-before:
		case <-patience.C:
			return nil, deferral.Errorf(deferral.Busy, "volume %s of driver %s: another call on it has not ended: "+
				"repeat this one later", id.id, id.driver)
		case <-ctx.Done():
			return nil, deferral.Errorf(deferral.Busy, "volume %s of driver %s: another call on it has not ended: %w",
				id.id, id.driver, context.Cause(ctx))
		}
	}
}

// enter takes the turn, or gives the end of who has it.
func (t *turns) enter(id volumeID) (before <-chan struct{}) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if ended, ok := t.taken[id]; ok {
		return ended
	}
	if t.taken == nil {
		t.taken = make(map[volumeID]chan struct{})
	}
	t.taken[id] = make(chan struct{})
	return nil
}

func (t *turns) leave(id volumeID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(t.taken[id])
	delete(t.taken, id)
}
