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

	"github.com/crust-proxy/crust-proxy/internal/sys"
)

// answerTime bounds each exchange with the service manager.
const answerTime = 5 * time.Second

// Notifier speaks to the service manager. The zero value has none to speak to,
// and all its methods do nothing.
type Notifier struct {
	socket   string
	watchdog time.Duration
	stores   bool
	room     int
}

// FromEnvironment takes the service manager's address from the environment, and
// unsets it there: no program that we start is to speak in our name.
func FromEnvironment() (*Notifier, error) {
	n := &Notifier{socket: os.Getenv("NOTIFY_SOCKET")}
	room, told := os.LookupEnv("FDSTORE") // since systemd 254
	n.stores = n.socket != "" && (!told || room != "0")
	n.room, _ = strconv.Atoi(room) // 0 where it does not say
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

// CanStore tells whether the service manager keeps descriptors, as far as can be
// known: before systemd 254 it does not say.
func (n *Notifier) CanStore() bool { return n.stores }

// unitRoom is FileDescriptorStoreMax= of our unit.
const unitRoom = 16384

// Room is how many descriptors the service manager keeps. It drops more without a word.
func (n *Notifier) Room() int { return cmp.Or(n.room, unitRoom) }

// Ready says that the start is done.
func (n *Notifier) Ready() error { return n.send(daemon.SdNotifyReady, nil) }

// Stopping says that the end began.
func (n *Notifier) Stopping() error { return n.send(daemon.SdNotifyStopping, nil) }

// send sends one message, with a descriptor if there is one.
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

// writeWithRights is what net.UnixConn.WriteMsgUnix refuses to do on a connected
// datagram socket.
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
