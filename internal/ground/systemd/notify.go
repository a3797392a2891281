// Package systemd implements the daemon's side of the service manager's protocols: sockets
// and stored descriptors that are passed at the start, notifications, the watchdog and the
// file-descriptor store. Without systemd all of it does nothing.
package systemd

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
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

// send sends one message, with a descriptor unless file is nil. The socket is not connected:
// net.UnixConn sends descriptors on no connected datagram socket.
func (n *Notifier) send(state string, file *os.File) (err error) {
	if n.socket == "" {
		return nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("tell systemd: %w", err)
		}
	}()
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	if err := conn.SetWriteDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	send := func(rights []byte) error {
		_, _, err := conn.WriteMsgUnix([]byte(state), rights, &net.UnixAddr{Name: n.socket, Net: "unixgram"})
		return err
	}
	if file == nil {
		return send(nil)
	}
	return sys.OnFD(file, func(fd int) error { return send(unix.UnixRights(fd)) })
}
