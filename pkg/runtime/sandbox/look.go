package sandbox

import (
	"context"
	"time"

	containersapi "github.com/containerd/containerd/api/services/containers/v1"
	"go.uber.org/zap"
)

const (
	// lookTime bounds the question what a container is.
	lookTime = 10 * time.Second
	// maxLooks is how many such questions may be open; more events wait.
	maxLooks = 64
)

// look is the question whether a task that started is a sandbox.
type look struct {
	id        string
	cancel    context.CancelFunc
	container *containersapi.Container
	err       error
}

// startLook asks about one container, beside the loop.
func (f *follower) startLook(ctx context.Context, id string) {
	if !f.goodID(id) || f.looks[id] != nil {
		return
	}
	asking, cancel := context.WithTimeout(ctx, lookTime)
	l := &look{id: id, cancel: cancel}
	f.looks[id] = l
	f.beside.Go(func() {
		defer cancel()
		l.container, l.err = f.c.get(asking, id)
		select {
		case f.found <- l:
		case <-ctx.Done():
		}
	})
}

// endLook takes the answer, unless the task ended meanwhile. It is false where
// there was none, so that only a listing can tell.
func (f *follower) endLook(l *look) bool {
	if f.looks[l.id] != l {
		return true
	}
	delete(f.looks, l.id)
	if l.err != nil {
		f.t.log.Warn("containerd did not tell what it started; listing anew", zap.String("id", l.id), zap.Error(l.err))
		return false
	}
	if s, ok := f.t.sandboxOf(l.container); ok {
		f.touch(s.id)
		f.t.add(s)
	}
	return true
}
