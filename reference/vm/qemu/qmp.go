package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// qmp is a client of QEMU's monitor. The guest may have taken QEMU over: messages are bounded,
// and only replies to pending commands are believed.
type qmp struct {
	conn *net.UnixConn

	mu      sync.Mutex
	last    int                      // the number of the last command
	replies chan reply               // of the last command
	devices map[string]chan struct{} // closed when the device with this id was deleted
	closed  chan struct{}
	err     error // why, after closed
}

type reply struct {
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	ID    int    `json:"id"`
	Event string `json:"event"`
	Data  struct {
		Device string `json:"device"`
	} `json:"data"`
}

// maxLine bounds a message from QEMU.
const maxLine = 256 << 10

func newQMP(conn *net.UnixConn) *qmp {
	q := &qmp{conn: conn, devices: make(map[string]chan struct{}), closed: make(chan struct{})}
	go q.read()
	return q
}

var errNoDevice = errors.New("the machine has no such device")

// commandTimeout bounds a command whose caller would wait longer.
const commandTimeout = 2 * time.Minute

// execute runs a command, and passes a file if there is one. Calls must not be concurrent.
func (q *qmp) execute(ctx context.Context, command string, arguments any, file *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, commandTimeout)
	defer cancel()
	replies := make(chan reply, 1)
	q.mu.Lock()
	q.last++
	q.replies = replies
	request := map[string]any{"execute": command, "id": q.last}
	q.mu.Unlock()
	if arguments != nil {
		request["arguments"] = arguments
	}
	if err := q.send(ctx, request, file); err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	select {
	case r := <-replies:
		if r.Error != nil && r.Error.Class == "DeviceNotFound" {
			return fmt.Errorf("%s: %w", command, errNoDevice)
		}
		if r.Error != nil {
			return fmt.Errorf("%s: QEMU refuses: %.300q", command, r.Error.Desc)
		}
		return nil
	case <-q.closed:
		return fmt.Errorf("%s: %w", command, q.err)
	case <-ctx.Done():
		return fmt.Errorf("%s: QEMU does not answer: %w", command, ctx.Err())
	}
}

func (q *qmp) send(ctx context.Context, request any, file *os.File) error {
	raw, err := json.Marshal(request)
	if err != nil {
		return err
	}
	deadline, _ := ctx.Deadline()
	if err := q.conn.SetWriteDeadline(deadline); err != nil {
		return err
	}
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	_, _, err = q.conn.WriteMsgUnix(append(raw, '\n'), rights, nil)
	return err
}

// read dispatches replies and events until the connection ends.
func (q *qmp) read() {
	defer close(q.closed)
	lines := bufio.NewReaderSize(q.conn, maxLine)
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			q.err = fmt.Errorf("QEMU's monitor has ended: %w", err)
			return
		}
		var r reply
		if err := json.Unmarshal(line, &r); err != nil {
			q.err = errors.New("QEMU's monitor sent invalid JSON")
			return
		}
		q.dispatch(r)
	}
}

func (q *qmp) dispatch(r reply) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case r.Event == "DEVICE_DELETED":
		if deleted := q.devices[r.Data.Device]; deleted != nil {
			close(deleted)
			delete(q.devices, r.Data.Device)
		}
	case r.Event == "" && r.ID == q.last && q.replies != nil:
		q.replies <- r
		q.replies = nil
	}
}

// deleted returns a channel that is closed when QEMU has deleted a device.
func (q *qmp) deleted(id string) <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.devices[id] == nil {
		q.devices[id] = make(chan struct{})
	}
	return q.devices[id]
}
