package crust

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/guest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// errNobodyThere marks a socket that is not served, or not trusted.
var errNobodyThere = errors.New("nobody serves its socket")

func (a *asker) askSocket(ctx context.Context, v *volume.Volume, id, path string, q *question) error {
	fd, err := a.conns.sockets.open(path)
	if err != nil {
		return fmt.Errorf("%w: %w", errNobodyThere, err)
	}
	sys.CloseFD(fd)
	raw, sent, err := a.conns.invoke(ctx, path, q.method, q.in)
	if err != nil {
		return socketError(ctx, v, id, q, sent, err)
	}
	if err := proto.Unmarshal(raw, q.out); err != nil {
		return malformed(v, id, err)
	}
	return nil
}

func socketError(ctx context.Context, v *volume.Volume, id string, q *question, sent bool, err error) error {
	if ctx.Err() != nil {
		return contextError(v, id, ctx.Err())
	}
	said := status.Convert(err)
	kind := volume.Refused
	switch said.Code() {
	case codes.Unavailable, codes.Canceled:
		if sent && q.once {
			return volume.Errorf(volume.Timeout, "volume %s: the handler of sandbox %s went away before it answered %s: try again", v.Target, id, q.words[0])
		}
		return fmt.Errorf("%w: %s", errNobodyThere, guest.Printable(oneLine(said.Message()), guest.MaxErrorText))
	case codes.NotFound:
		kind = volume.NoSandbox
	case codes.Unimplemented, codes.InvalidArgument: // as kindOfExit says
		kind = volume.Unsupported
	case codes.OutOfRange:
		kind = volume.OutOfRange
	case codes.FailedPrecondition:
		kind = volume.InUse
	case codes.DeadlineExceeded:
		kind = volume.Timeout
	case codes.ResourceExhausted:
		kind = volume.Exhausted
	}
	return refusal(v, id, kind, q.words[0], said.Message())
}

// sockets checks whether sockets are trusted.
type sockets struct {
	dirs  []string
	owner uint32
}

// open opens a socket's file with O_PATH, if the socket is trusted.
func (s sockets) open(path string) (int, error) {
	for _, dir := range s.dirs {
		dir = filepath.Clean(dir)
		if name, below := sys.Below(dir, path); below && filepath.Clean(path) == path {
			return s.openBelow(dir, name)
		}
	}
	return -1, volume.Errorf(volume.Denied, "the socket %s lies below none of handlers.crust.socketDirs (%s)",
		path, strings.Join(s.dirs, ", "))
}

func (s sockets) openBelow(dir, name string) (int, error) {
	base, err := sys.OpenDir(dir)
	if err != nil {
		return -1, fmt.Errorf("the directory %s: %w", dir, err)
	}
	defer sys.CloseFD(base)
	fd, err := sys.OpenBeneath(base, name, unix.O_PATH, unix.RESOLVE_NO_SYMLINKS)
	if err != nil {
		return -1, fmt.Errorf("the socket %s/%s: %w", dir, name, err)
	}
	if err := s.check(fd, dir+"/"+name); err != nil {
		sys.CloseFD(fd)
		return -1, err
	}
	return fd, nil
}

func (s sockets) check(fd int, path string) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return volume.Errorf(volume.Denied, "%s is not a socket", path)
	}
	if st.Uid != s.owner {
		return volume.Errorf(volume.Denied, "the socket %s belongs to user %d and must belong to user %d", path, st.Uid, s.owner)
	}
	return nil
}

// dial connects to the file that was checked, and checks who serves it.
func (s sockets) dial(ctx context.Context, path string) (net.Conn, error) {
	fd, err := s.open(path)
	if err != nil {
		return nil, err
	}
	defer sys.CloseFD(fd)
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", sys.ProcFD(fd))
	if err != nil {
		return nil, err
	}
	if err := s.checkPeer(conn, path); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return conn, nil
}

func (s sockets) checkPeer(conn net.Conn, path string) error {
	who, err := sys.Peer(conn)
	if err != nil {
		return fmt.Errorf("%s: the kernel does not say who serves it: %w", path, err)
	}
	if who.Uid != s.owner {
		return volume.Errorf(volume.Denied, "the socket %s is served by user %d and must be by user %d", path, who.Uid, s.owner)
	}
	return nil
}
