package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// aloneTime is how long an earlier daemon of the run directory may take to be gone.
const aloneTime = 5 * time.Second

// alone gives the run directory to this daemon until release is called or it dies.
// Two at once, say one of the package and one of a DaemonSet, would each repair the
// node by its own memory of the records.
func alone(ctx context.Context, runDir string, patience time.Duration) (release func(), err error) {
	if err := os.MkdirAll(runDir, 0o711); err != nil { //nolint:gosec // what is in it has modes of its own
		return nil, err
	}
	path := filepath.Join(runDir, "daemon.lock")
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600) //nolint:gosec // our own directory
	if err != nil {
		return nil, fmt.Errorf("the run directory's lock cannot be opened: %w", err)
	}
	for end := time.Now().Add(patience); ; {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return func() { _ = lock.Close() }, nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), lock.Close())
		case ctx.Err() != nil:
			return nil, errors.Join(ctx.Err(), lock.Close())
		case time.Now().After(end):
			return nil, errors.Join(fmt.Errorf("another crust-proxy has the run directory %s: stop it (a package and a "+
				"DaemonSet on one node?), or give this one a runDir and a kubeletRoot of its own", runDir), lock.Close())
		}
		time.Sleep(20 * time.Millisecond)
	}
}
