package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// played is a monitor whose QEMU is the test.
func played(t *testing.T) (*qmp, *net.UnixConn) {
	t.Helper()
	fds := check.Value(unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0))(t)
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), "")
		conn := check.Value(net.FileConn(file))(t)
		check.Must(t, file.Close())
		ends[i], _ = conn.(*net.UnixConn)
		t.Cleanup(func() { _ = conn.Close() })
	}
	return newQMP(ends[0]), ends[1]
}

// answers says something for each command, in which ID is the command's.
func answers(t *testing.T, conn net.Conn, texts ...string) {
	t.Helper()
	go func() {
		lines := bufio.NewScanner(conn)
		for _, text := range texts {
			if !lines.Scan() {
				return
			}
			var asked struct{ ID json.Number }
			if json.Unmarshal(lines.Bytes(), &asked) != nil {
				return
			}
			_, _ = conn.Write([]byte(strings.ReplaceAll(text, "ID", asked.ID.String())))
		}
	}()
}

// soon is for an answer that comes, shortly for one that does not.
func soon(t *testing.T) context.Context    { return check.Within(t, time.Minute) }
func shortly(t *testing.T) context.Context { return check.Within(t, 2*time.Second) }

func TestWhatQEMUSays(t *testing.T) {
	for name, c := range map[string]struct{ says, want string }{
		"yes":           {`{"return":{},"id":ID}` + "\n", ""},
		"greets first":  {`{"QMP":{}}` + "\n" + `{"event":"RESUME"}` + "\n" + `{"return":{},"id":ID}` + "\n", ""},
		"no":            {`{"error":{"class":"GenericError","desc":"no \u001b[0m place"},"id":ID}` + "\n", `no \x1b[0m place`},
		"a long no":     {`{"error":{"desc":"` + strings.Repeat("x", 10_000) + `"},"id":ID}` + "\n", "QEMU refuses"},
		"to another":    {`{"return":{},"id":77}` + "\n", "does not answer"},
		"nothing":       {"", "does not answer"},
		"no JSON":       {"what?\n", "invalid JSON"},
		"without end":   {strings.Repeat("x", maxLine+1), "has ended"},
		"another shape": {`{"return":{},"id":"one"}` + "\n", "invalid JSON"},
	} {
		t.Run(name, func(t *testing.T) {
			q, conn := played(t)
			answers(t, conn, c.says)
			ctx := soon(t)
			if c.want == "does not answer" {
				ctx = shortly(t)
			}
			err := q.execute(ctx, "stop", nil, nil)
			check.Require(t, (err == nil) == (c.want == "") && (err == nil || strings.Contains(err.Error(), c.want) && len(err.Error()) <= 400),
				"%v", err)
		})
	}
}

// An answer that comes when nobody waits any more is not taken for the next one's. Nor does the
// deadline of a command hold for a later one that has none.
func TestLateAnswer(t *testing.T) {
	q, conn := played(t)
	answers(t, conn, "", `{"error":{"desc":"late"},"id":1}`+"\n"+`{"return":{},"id":ID}`+"\n")
	check.Require(t, q.execute(shortly(t), "one", nil, nil) != nil, "it was not answered")
	check.Must(t, q.execute(context.Background(), "two", nil, nil))
}

func TestADeviceIsGoneWhenQEMUSaysSo(t *testing.T) {
	q, conn := played(t)
	gone := q.deleted("disk-a")
	for _, text := range []string{`{"event":"DEVICE_DELETED","data":{"path":"/x"}}`, `{"event":"DEVICE_DELETED","data":{"device":"disk-b"}}`} {
		check.Value(conn.Write([]byte(text + "\n")))(t)
	}
	answers(t, conn, `{"return":{},"id":ID}`+"\n")
	check.Must(t, q.execute(soon(t), "query", nil, nil))
	select {
	case <-gone:
		t.Fatal("another device is taken for it")
	default:
	}
	check.Value(conn.Write([]byte(`{"event":"DEVICE_DELETED","data":{"device":"disk-a"}}` + "\n")))(t)
	select {
	case <-gone:
	case <-soon(t).Done():
		t.Fatal("the device is not gone")
	}
}

// TestSizeThatIsRefused: QEMU is not told of it.
func TestSizeThatIsRefused(t *testing.T) {
	q, conn := played(t)
	m, d := &Machine{qmp: q}, &Disk{Serial: "a", file: check.Value(os.Open(os.DevNull))(t)}
	refused := errors.New("it is too large")
	check.Is(t, check.Err(m.Resize(shortly(t), d, func(int64) error { return refused })), refused)
	answers(t, conn, `{"return":{},"id":1}`+"\n")
	check.Must(t, check.Err(m.Resize(soon(t), d, func(int64) error { return nil })))
}

func TestTailKeepsTheLast(t *testing.T) {
	tail := new(Tail)
	for range 10_000 {
		_, _ = tail.Write([]byte("0123456789"))
	}
	_, _ = tail.Write([]byte("\x1b[31mpanic\x00\n"))
	text := tail.String()
	check.That(t, len(text) <= tailSize && strings.HasSuffix(text, "9[31mpanic\n"), "%d bytes, the last are %q", len(text), text[len(text)-20:])
}
