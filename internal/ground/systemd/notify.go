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
