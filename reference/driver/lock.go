package driver

import (
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// locks is one lock a volume, waited for no longer than the caller does.
type locks struct{ sys.KeyLocks[string] }

// take takes the locks of volumes, or of a volume and its source; "" is no volume. All
// callers take them in the same order, so that no two of them wait for each other.
func (l *locks) take(ctx context.Context, ids ...string) (release func(), err error) {
	var held []func()
	release = func() {
		for _, unlock := range held {
			unlock()
		}
	}
	for _, id := range slices.DeleteFunc(slices.Compact(slices.Sorted(slices.Values(ids))), func(id string) bool { return id == "" }) {
		unlock, err := l.Lock(ctx, id)
		if err != nil {
			release()
			return nil, status.Errorf(codes.Aborted, "volume %q: another operation is still under way", id)
		}
		held = append(held, unlock)
	}
	return release, nil
}
