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
	run, err := lockDir(ctx, log, runDir, "another crust-proxy has the run directory "+runDir, patience)
	if err != nil {
		return nil, err
	}
	// The root is created as kubelet does, which starts later on a new node.
	ours := filepath.Join(kubeletRoot, "crust-proxy")
	if err := os.MkdirAll(ours, 0o750); err != nil {
		return nil, errors.Join(fmt.Errorf("the kubelet root (kubeletRoot) cannot be created: %w", err), run.Close())
	}
	root, err := lockDir(ctx, log, ours, "another crust-proxy serves the kubelet root "+kubeletRoot, patience)
	if err != nil {
		return nil, errors.Join(err, run.Close())
	}
	return func() { _ = root.Close(); _ = run.Close() }, nil
}

// errOtherDaemon is part of the error of a lock that another daemon has. No configuration is to blame.
var errOtherDaemon = errors.New("so this one cannot start")

// lockDir takes the lock in a directory. It is a file that only root can open, because whoever can open a file or
// directory, if only to read it, can lock it. It is opened for reading, which works on a filesystem that has become
// read-only. While an earlier daemon ends, it waits and logs which process has the lock.
func lockDir(ctx context.Context, log *zap.Logger, dir, taken string, patience time.Duration) (*os.File, error) {
	file, err := os.OpenFile(filepath.Join(dir, "daemon.lock"), os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW, 0o600) //nolint:gosec // our own directory
	if err != nil {
		return nil, fmt.Errorf("the lock of %s cannot be opened: %w", dir, err)
	}
	holder := func() string {
		return cmp.Or(sys.LockHolder(file.Name()), "a process that cannot be found from here (in another container, or on btrfs?)")
	}
	err = sys.Lock(ctx, int(file.Fd()), 0)
	if errors.Is(err, unix.EWOULDBLOCK) && patience > 0 {
		log.Warn(taken+": waiting until it ends", zap.String("holder", holder()), zap.Duration("atMost", patience))
		err = sys.Lock(ctx, int(file.Fd()), patience)
	}
	switch {
	case err == nil:
		return file, nil
	case errors.Is(err, unix.EWOULDBLOCK):
		err = fmt.Errorf("%s, %w: %s: stop it (the package's: systemctl disable --now crust-proxy.service crust-proxy-runtime.socket "+
			"crust-proxy-admin.socket), or give this one a runDir and a kubeletRoot of its own", taken, errOtherDaemon, holder())
	case ctx.Err() == nil:
		err = fmt.Errorf("lock %s: %w", file.Name(), err)
	}
	return nil, errors.Join(err, file.Close())
}
