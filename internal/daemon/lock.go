package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// lockWait is how long the start waits for an earlier daemon to end.
const lockWait = 5 * time.Second

// lockRunDir locks the run directory and the kubelet root for this daemon until release is
// called or the process dies. Two daemons at once, one of the package and one of a
// DaemonSet for example, would each repair the node according to its own view of it.
func lockRunDir(ctx context.Context, log *zap.Logger, runDir, kubeletRoot string, patience time.Duration) (release func(), err error) {
	if err := os.MkdirAll(runDir, 0o711); err != nil { //nolint:gosec // sockets and files in it have modes of their own
		return nil, fmt.Errorf("the run directory (runDir) cannot be created: %w", err)
	}
	lock, err := openLock(runDir)
	if err != nil {
		return nil, fmt.Errorf("the run directory's lock cannot be opened: %w", err)
	}
	const remedy = "stop it (a package and a DaemonSet on one node?), or give this one a runDir and a kubeletRoot of its own"
	wait := lockWaiter{log, patience}
	if err := wait.lock(ctx, lock, "another crust-proxy has the run directory "+runDir, remedy); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	// The root is created as kubelet does, which starts later on a new node.
	if err := os.MkdirAll(filepath.Join(kubeletRoot, "crust-proxy"), 0o750); err != nil {
		return nil, errors.Join(fmt.Errorf("the kubelet root (kubeletRoot) cannot be created: %w", err), lock.Close())
	}
	root, err := openLock(filepath.Join(kubeletRoot, "crust-proxy"))
	if err == nil {
		err = wait.lock(ctx, root, "another crust-proxy serves the kubelet root "+kubeletRoot, remedy)
	}
	if err != nil {
		_ = root.Close()
		return nil, errors.Join(err, lock.Close())
	}
	return func() { _ = root.Close(); _ = lock.Close() }, nil
}

// openLock opens the lock in a directory. It is a file that only root can open, because
// whoever can open a file or directory, if only to read it, can lock it. It is opened for
// reading, which works on a filesystem that has become read-only.
func openLock(dir string) (*os.File, error) {
	return os.OpenFile(filepath.Join(dir, "daemon.lock"), os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW, 0o600) //nolint:gosec // our own directory
}

// errOtherDaemon is part of the error of a lock that another daemon has. No configuration is to blame.
var errOtherDaemon = errors.New("so this one cannot start")

// lockWaiter waits for a lock while an earlier daemon ends, and logs which process holds it.
type lockWaiter struct {
	log      *zap.Logger
	patience time.Duration
}

func (w lockWaiter) lock(ctx context.Context, file *os.File, taken, remedy string) error {
	err := sys.Lock(ctx, int(file.Fd()), 0)
	if errors.Is(err, unix.EWOULDBLOCK) && w.patience > 0 {
		w.log.Warn(taken+": waiting until it ends", zap.String("holder", holderOf(file)), zap.Duration("atMost", w.patience))
		err = sys.Lock(ctx, int(file.Fd()), w.patience)
	}
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		return fmt.Errorf("%s, %w: %s: %s", taken, errOtherDaemon, holderOf(file), remedy)
	case err != nil && ctx.Err() == nil:
		return fmt.Errorf("lock %s: %w", file.Name(), err)
	}
	return err
}

func holderOf(file *os.File) string {
	return cmp.Or(sys.LockHolder(file.Name()), "a process that cannot be seen from here (in another container?)")
}
