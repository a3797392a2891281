package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// locks has one lock for each volume. A call waits for a lock only as long as its caller waits
// for the call.
type locks struct{ sys.KeyLocks[string] }

// take acquires the locks of volumes, or of a volume and its source; "" is no volume. The
// order is always the same, so that no two callers wait for each other.
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

// lockWait is how long an earlier driver of the data directory may take to end.
const lockWait = 2 * time.Second

// lockDataDir locks the data directory until release is called or the process dies. A second
// driver would mistake unfinished volumes of this one for those of a driver that was killed,
// and remove them.
func lockDataDir(dir string) (release func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(dir, "driver.lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600) //nolint:gosec // in a directory of ours
	if err != nil {
		return nil, fmt.Errorf("open the lock of the data directory: %w", err)
	}
	err = sys.Lock(context.Background(), int(file.Fd()), lockWait)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("another crust-driver has the data directory %s: stop it, or give this one a --data-dir of its own", dir)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return func() { _ = file.Close() }, nil // nothing was written
}
