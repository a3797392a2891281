// Package systemd implements the daemon's side of the service manager's protocols: sockets
// and stored descriptors that are passed at the start, notifications, the watchdog and the
// file-descriptor store. Without systemd all of it does nothing.
package systemd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// answerTime bounds each exchange with the service manager.
const answerTime = 5 * time.Second

// Notifier sends messages to the service manager. All methods of the zero value do nothing.
type Notifier struct {
	socket   string
	watchdog time.Duration
	stores   bool
	room     int
}

// FromEnvironment reads the service manager's address from the environment, and unsets it: no
// program that we start may send messages in our name.
func FromEnvironment() (*Notifier, error) {
	n := &Notifier{socket: os.Getenv("NOTIFY_SOCKET")}
	room, given := os.LookupEnv("FDSTORE") // since systemd 254
	n.stores = n.socket != "" && (!given || room != "0")
	n.room, _ = strconv.Atoi(room) // 0 if it is not given
	for _, name := range []string{"NOTIFY_SOCKET", "FDSTORE"} {
		if err := os.Unsetenv(name); err != nil {
			return nil, fmt.Errorf("unset %s: %w", name, err)
		}
	}
	var err error
	if n.watchdog, err = daemon.SdWatchdogEnabled(true); err != nil {
		return nil, fmt.Errorf("the watchdog of systemd: %w", err)
	}
	return n, nil
}

// CanStore reports whether the service manager stores descriptors. Versions before 254 do not
// say so, and are assumed to.
func (n *Notifier) CanStore() bool { return n.stores }

// unitRoom is FileDescriptorStoreMax= of our unit.
const unitRoom = 16384

// Room is how many descriptors the service manager stores. It silently drops all others.
func (n *Notifier) Room() int { return cmp.Or(n.room, unitRoom) }

// Ready reports that the start is complete.
func (n *Notifier) Ready() error { return n.send(daemon.SdNotifyReady, nil) }

// Stopping reports that the daemon begins to stop.
func (n *Notifier) Stopping() error { return n.send(daemon.SdNotifyStopping, nil) }

// send sends one message, with a descriptor unless file is nil.
func (n *Notifier) send(state string, file *os.File) error {
	if n.socket == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: n.socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("tell systemd: %w", err)
	}
	err = conn.SetWriteDeadline(time.Now().Add(answerTime))
	if err == nil {
		err = write(conn, state, file)
	}
	if err = errors.Join(err, conn.Close()); err != nil {
		return fmt.Errorf("tell systemd: %w", err)
	}
	return nil
}

func write(conn *net.UnixConn, state string, file *os.File) error {
	if file == nil {
		_, err := conn.Write([]byte(state))
		return err
	}
	return sys.OnFD(file, func(fd int) error { return writeWithRights(conn, state, fd) })
}

// writeWithRights sends a descriptor on a connected datagram socket, which net.UnixConn.WriteMsgUnix refuses to do.
func writeWithRights(conn *net.UnixConn, state string, fd int) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var sent error
	err = raw.Write(func(socket uintptr) bool {
		sent = unix.Sendmsg(int(socket), []byte(state), unix.UnixRights(fd), nil, unix.MSG_NOSIGNAL)
		return !errors.Is(sent, unix.EAGAIN)
	})
	return errors.Join(err, sent)
}

// nameForm is stricter than systemd's rule: no name can contain a separator of the protocol or of $LISTEN_FDNAMES.
var nameForm = regexp.MustCompile(`^[A-Za-z0-9-]{1,255}$`)

// StoreFD stores a duplicate of a descriptor in the service manager, which passes it to the next start of the service.
// It returns when the manager has processed the message, so that a kill right afterwards loses nothing. FDPOLL=0:
// systemd must not drop a device's descriptor because poll reports an error on it.
func (n *Notifier) StoreFD(name string, file *os.File) error {
	return n.storeOrRemove("store", name, "FDSTORE=1\nFDNAME="+name+"\nFDPOLL=0", file)
}

// RemoveFD removes the descriptors of a name from the service manager. It returns when the
// manager has processed the message. systemd closes its copy later, in a process of its own,
// so only the kernel can say whether a device is free again.
func (n *Notifier) RemoveFD(name string) error {
	return n.storeOrRemove("remove", name, "FDSTOREREMOVE=1\nFDNAME="+name, nil)
}

func (n *Notifier) storeOrRemove(verb, name, state string, file *os.File) error {
	if !nameForm.MatchString(name) {
		return fmt.Errorf("%s a descriptor: %q is not a name of [A-Za-z0-9-], at most 255 long", verb, name)
	}
	if !n.stores {
		return nil
	}
	err := n.send(state, file)
	if err == nil {
		err = n.barrier()
	}
	if err != nil {
		return fmt.Errorf("%s the descriptor %s: %w", verb, name, err)
	}
	return nil
}

// barrier waits until the service manager has processed all earlier messages: then it closes
// the descriptor that was sent with BARRIER=1.
func (n *Notifier) barrier() error {
	ours, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer func() { _ = ours.Close() }()
	if err := errors.Join(n.send("BARRIER=1", theirs), theirs.Close()); err != nil {
		return err
	}
	if err := ours.SetReadDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	_, err = ours.Read(make([]byte, 1))
	if errors.Is(err, io.EOF) {
		return nil
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("systemd did not process it within %v: %w", answerTime, err)
	}
	return fmt.Errorf("wait for systemd: %w", err)
}

// Inherited holds the descriptors that the service manager passed at the start.
type Inherited struct {
	// Listeners are the sockets, by the names of their socket units' FileDescriptorName=.
	Listeners map[string]net.Listener
	// Stored are the descriptors of the file-descriptor store, by name.
	Stored map[string]*os.File
}

// Inherit returns the descriptors that were passed, and unsets their environment variables.
// The given names are those of sockets; everything else was stored by us.
func Inherit(sockets ...string) (*Inherited, error) {
	return classify(activation.Files(true), sockets)
}

// classify separates listeners from stored descriptors.
func classify(files []*os.File, sockets []string) (*Inherited, error) {
	in := &Inherited{Listeners: map[string]net.Listener{}, Stored: map[string]*os.File{}}
	var problems []error
	for _, file := range files {
		switch name := file.Name(); {
		case slices.Contains(sockets, name):
			problems = append(problems, in.addListener(file))
		case in.Stored[name] != nil: // a leftover: a descriptor is removed from the store before another one of its name is stored
			_ = file.Close()
		default:
			in.Stored[name] = file
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, errors.Join(err, in.Close())
	}
	return in, nil
}

// addListener adds a listener, which has a duplicate of the descriptor, and closes the file.
func (in *Inherited) addListener(file *os.File) error {
	name := file.Name()
	defer func() { _ = file.Close() }()
	if in.Listeners[name] != nil {
		return fmt.Errorf("systemd passed two sockets named %q: leave one ListenStream= in the socket unit", name)
	}
	if err := sys.OnFD(file, mustListen); err != nil {
		return fmt.Errorf("the socket %q of systemd: %w", name, err)
	}
	listener, err := net.FileListener(file)
	if err != nil {
		return fmt.Errorf("the socket %q of systemd: %w", name, err)
	}
	in.Listeners[name] = listener
	return nil
}

// mustListen accepts only listening unix stream sockets: for no others does the kernel know the peer.
func mustListen(fd int) error {
	for option, want := range map[int]int{
		unix.SO_DOMAIN: unix.AF_UNIX, unix.SO_TYPE: unix.SOCK_STREAM, unix.SO_ACCEPTCONN: 1,
	} {
		is, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, option)
		if err != nil {
			return err
		}
		if is != want {
			return errors.New("it is not a listening unix stream socket: use ListenStream=/an/absolute/path, with Accept=no")
		}
	}
	return nil
}

// Close closes everything that was passed, after a failed start.
func (in *Inherited) Close() error {
	var problems []error
	for _, listener := range in.Listeners {
		problems = append(problems, listener.Close())
	}
	for _, file := range in.Stored {
		problems = append(problems, file.Close())
	}
	return errors.Join(problems...)
}

// Watchdog notifies the service manager at twice the required rate while the daemon is
// alive. Without these notifications the manager restarts the daemon.
type Watchdog struct {
	Notifier *Notifier
	// Alive returns why the daemon is not alive, or nil. It must end with its context.
	Alive func(ctx context.Context) error
	Log   *zap.Logger
}

// Run notifies until ctx ends. Without a watchdog it only waits.
func (w *Watchdog) Run(ctx context.Context) error {
	interval := w.Notifier.watchdog / 2
	if interval <= 0 {
		<-ctx.Done()
		return nil
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		w.notify(ctx, interval)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (w *Watchdog) notify(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := w.Alive(ctx); err != nil {
		if ctx.Err() == nil || context.Cause(ctx) == context.DeadlineExceeded { //nolint:errorlint // the limit itself, not the end of the daemon
			w.Log.Error("not alive: systemd gets no notification and will restart the daemon", zap.Error(err))
		}
		return
	}
	if err := w.Notifier.send("WATCHDOG=1", nil); err != nil {
		w.Log.Error("the watchdog cannot be notified", zap.Error(err))
	}
}
