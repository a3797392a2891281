package vm

import (
	"bufio"
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/vm/wire"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestTerminalGoesToTheSocket: what a process writes to its terminal is read at the end that the socket got.
func TestTerminalGoesToTheSocket(t *testing.T) {
	check.Fails(t, check.Err(sendTerminal(""))) // or without a socket there is a terminal
	path := filepath.Join(t.TempDir(), "s")
	check.Fails(t, check.Err(sendTerminal(path))) // or nobody listens, and there is a terminal
	listener := check.Value(net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"}))(t)
	defer func() { _ = listener.Close() }()
	slave := check.Value(sendTerminal(path))(t)
	defer func() { _ = slave.Close() }()
	conn := check.Value(listener.AcceptUnix())(t)
	defer func() { _ = conn.Close() }()
	name, rights := make([]byte, 100), make([]byte, unix.CmsgSpace(4))
	n, m, _, _, err := conn.ReadMsgUnix(name, rights)
	check.Must(t, err)
	messages := check.Value(unix.ParseSocketControlMessage(rights[:m]))(t)
	master := os.NewFile(uintptr(check.Value(unix.ParseUnixRights(&messages[0]))(t)[0]), "master")
	defer func() { _ = master.Close() }()
	check.That(t, string(name[:n]) == slave.Name() && strings.HasPrefix(slave.Name(), "/dev/pts/"), "%q is the terminal %s", name[:n], slave.Name())
	check.Value(slave.WriteString("hello\n"))(t)
	line, err := bufio.NewReader(master).ReadString('\n')
	check.That(t, err == nil && line == "hello\r\n", "%q, %v", line, err)
}

// supervised makes the directory of a sandbox, and serves what its supervisor does.
func supervised(t *testing.T, dir sandboxDir, register func(*ttrpc.Server)) {
	t.Helper()
	check.Must(t, os.Mkdir(string(dir), 0o700))
	listener := check.Value(listen(dir.controlSocket()))(t)
	t.Cleanup(func() { _ = listener.Close() })
	go func() { _ = wire.Serve(t.Context(), listener, status.Code, register) }()
}

// execs is a supervisor that is asked for one.
type execs struct {
	wire.ContainersService
	asked []string
}

func (e *execs) ExecProcess(_ context.Context, req *wire.ExecProcessRequest) (*wire.Empty, error) {
	e.asked = append(e.asked, "exec "+req.GetProcess().GetExec())
	return new(wire.Empty), nil
}

func (e *execs) DeleteProcess(_ context.Context, req *wire.DeleteProcessRequest) (*wire.Empty, error) {
	e.asked = append(e.asked, "delete "+req.GetProcess().GetExec())
	return new(wire.Empty), nil
}

// mute is a supervisor whose process ends after some time, or never. Its output fails, that of a process that ends after
// some reads, and late.
type mute struct {
	wire.ContainersService
	runs   time.Duration
	stderr codes.Code
	reads  atomic.Int32
}

func (*mute) WriteInput(context.Context, *wire.WriteInputRequest) (*wire.WriteInputResponse, error) {
	return new(wire.WriteInputResponse), nil
}

func (m *mute) ReadOutput(_ context.Context, req *wire.ReadOutputRequest) (*wire.ReadOutputResponse, error) {
	if req.GetStream() == wire.Stream_STREAM_STDERR || m.runs == 0 || m.reads.Add(1) > lateReads {
		return nil, status.Error(m.stderr, "no more calls")
	}
	time.Sleep(drainTimeout / (lateReads - 1)) // nobody gives up between two, on a busy machine either
	return &wire.ReadOutputResponse{Data: []byte("\n")}, nil
}

func (m *mute) WaitProcess(ctx context.Context, _ *wire.WaitProcessRequest) (*wire.WaitProcessResponse, error) {
	if m.runs == 0 {
		<-ctx.Done()
	}
	time.Sleep(m.runs)
	return new(wire.WaitProcessResponse), ctx.Err()
}

// lateReads take longer than drainTimeout, by which the loss of the other output ends a process that runs.
const lateReads = 6

// TestOutputThatIsLost ends the proxy, and so the process: it would hang when its pipe is full. That is not the error
// output of a terminal, which is none; and a process that has ended has its other output read.
func TestOutputThatIsLost(t *testing.T) {
	for name, m := range map[string]*mute{
		"lost":     {stderr: codes.Internal},
		"terminal": {stderr: codes.InvalidArgument, runs: drainTimeout + time.Second},
		"ended":    {stderr: codes.Internal, runs: time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := Config{StateDir: t.TempDir()}
			supervised(t, cfg.sandbox("pod"), func(s *ttrpc.Server) { wire.RegisterContainersService(s, m) })
			code, err := (&command{cfg: cfg}).proxy(&record{ID: "c", Sandbox: "pod"}, "").run()
			if m.runs == 0 {
				check.That(t, code == killedCode && err != nil && strings.Contains(err.Error(), "no more calls"), "%d, %v", code, err)
				return
			}
			check.That(t, code == 0 && err == nil && m.reads.Load() == lateReads+1, "%d, %v, %d reads", code, err, m.reads.Load())
		})
	}
}

// TestSlowReader gets the output of a process that has ended for as long as it reads, within a minute.
func TestSlowReader(t *testing.T) {
	for pieces, want := range map[int]time.Duration{0: drainTimeout, 5: 20*time.Second + drainTimeout, 15: outputRetention} {
		synctest.Test(t, func(t *testing.T) {
			p, began := &proxy{progress: make(chan struct{}, pieces)}, time.Now()
			go func() {
				for range pieces {
					time.Sleep(4 * time.Second)
					p.progress <- struct{}{}
				}
			}()
			p.waitDrained(make(chan struct{}))
			check.Equal(t, time.Since(began), want, "after %d pieces", pieces)
		})
	}
}

// TestExecWithoutAProxy is deleted: nobody would.
func TestExecWithoutAProxy(t *testing.T) {
	cfg := Config{StateDir: t.TempDir()}
	guest := new(execs)
	supervised(t, cfg.sandbox("pod"), func(s *ttrpc.Server) { wire.RegisterContainersService(s, guest) })
	check.Must(t, cfg.writeRecord(&record{ID: "c", Sandbox: "pod"}))
	process := filepath.Join(t.TempDir(), "process")
	check.Must(t, os.WriteFile(process, []byte(`{"args":["sh"],"terminal":true}`), 0o600))
	c := &command{cfg: cfg, in: handler.ParseArgs([]string{"exec", "--detach", "--process", process, "c"})}
	check.Fails(t, check.Err(c.exec()), "--console-socket is missing")
	check.That(t, len(guest.asked) == 2 && guest.asked[1] == strings.Replace(guest.asked[0], "exec", "delete", 1), "asked: %q", guest.asked)
}
