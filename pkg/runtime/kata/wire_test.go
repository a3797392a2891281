package kata

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// recordedSize is the size that the recordings wish, and recordedPath where the guest has the volume.
const (
	recordedSize = 134217728
	recordedPath = "/run/kata-containers/shared/containers/passthrough/91a12d9664-8ab33669-data"
)

var recordedFS = unix.Statfs_t{Bsize: 1024, Blocks: 56037, Bfree: 37683, Files: 16384, Ffree: 16350}

// exchanged is a request to a real shim's management socket, and its answer.
type exchanged struct {
	Case    string `json:"case"`
	Request string `json:"request"`
	Answer  string `json:"answer"` // ends in <open> or <EOF>
	Agent   *struct {
		Path string `json:"volume_guest_path"`
		Size uint64 `json:"size"`
	} `json:"agent"` // what the agent was asked to resize
}

// notReplayed are the exchanges that the emulation is not held to, and why.
var notReplayed = map[string]string{
	"agent-url": "the handler never asks for it, and the emulation has no agent's socket",
	"stats of the path of an ended container (directory still there)": "the numbers are of the recording node's tmpfs, " +
		"and the answer is abridged: TestTheEmulationAnswersForAnEndedContainer",
}

func readExchanges(t *testing.T) map[string]exchanged {
	t.Helper()
	raw := check.Value(os.ReadFile("testdata/kata-http/rs-shim-monitor-http.jsonl"))(t)
	found := make(map[string]exchanged)
	for line := range bytes.Lines(raw) {
		var e exchanged
		check.Must(t, json.Unmarshal(line, &e))
		found[e.Case] = e
	}
	return found
}

// The emulation of runtime-rs answers raw requests as the real shim did: status,
// body, whether it hangs up, and what it asks of the agent.
func TestTheEmulationAnswersAsRuntimeRS(t *testing.T) {
	replayed := 0
	for name, e := range readExchanges(t) {
		if notReplayed[name] != "" {
			continue
		}
		replayed++
		t.Run(name, func(t *testing.T) {
			asked := make(chan string, 4)
			shim, _ := startRust(t, func(path string, size uint64) error {
				asked <- fmt.Sprint(path, " ", size)
				return io.ErrUnexpectedEOF // any error: the agent cannot
			})
			status, body, open := ask(t, shim.Socket(), e.Request)
			wantStatus, wantBody, wantOpen := e.parse(t)
			check.That(t, status == wantStatus && body == wantBody && open == wantOpen,
				"the emulation: %d %q, open %v\nKata: %d %q, open %v", status, body, open, wantStatus, wantBody, wantOpen)
			var want []string
			if e.Agent != nil {
				want = []string{fmt.Sprint(e.Agent.Path, " ", e.Agent.Size)}
			}
			check.Same(t, cmp.Diff(want, drain(asked)), "the agent was asked (-Kata +emulation)")
		})
	}
	check.That(t, replayed >= 10, "only %d exchanges", replayed)
}

// drain returns what was sent so far: the agent is asked before the shim answers.
func drain(c <-chan string) (all []string) {
	for len(c) > 0 {
		all = append(all, <-c)
	}
	return all
}

// A path in the guest in which nothing is mounted any more has the numbers of the node's filesystem.
func TestTheEmulationAnswersForAnEndedContainer(t *testing.T) {
	e := readExchanges(t)["stats of the path of an ended container (directory still there)"]
	shim, shared := startRust(t, nil)
	_, after, _ := strings.Cut(e.Request, "path=")
	guest, _, _ := strings.Cut(after, " ")
	check.Must(t, os.Mkdir(filepath.Join(shared, filepath.Base(guest)), 0o700))
	var st unix.Statfs_t
	check.Must(t, unix.Statfs(shared, &st))
	status, body, open := ask(t, shim.Socket(), e.Request)
	report, err := parseStatsDebug([]byte(body))
	check.Require(t, status == http.StatusOK && open && err == nil, "%d %q, open %v: %v", status, body, open, err)
	bytes, inodes := totals(report)
	check.That(t, bytes == int64(st.Blocks)*st.Bsize && inodes == int64(st.Files),
		"%d bytes and %d inodes; the node has %d blocks of %d, and %d inodes", bytes, inodes, st.Blocks, st.Bsize, st.Files)
}

// startRust starts an emulated shim of runtime-rs with the recorded volume. It also
// returns the directory that it shares with the node.
func startRust(t *testing.T, resize func(string, uint64) error) (shim *kataemu.Shim, shared string) {
	t.Helper()
	dir := check.ShortDir(t)
	shared = filepath.Join(dir, "shared/sb1/rw/passthrough")
	check.Must(t, os.MkdirAll(shared, 0o700))
	shim = check.Value(kataemu.Start(kataemu.Options{
		Flavor: kataemu.Rust, SandboxID: "sb1", Sandboxes: filepath.Join(dir, "rs"), Shared: filepath.Join(dir, "shared"), Resize: resize,
		Mounts: map[string]kataemu.Statfs{recordedPath: func() (unix.Statfs_t, error) { return recordedFS, nil }},
	}))(t)
	t.Cleanup(func() { _ = shim.Stop() })
	return shim, shared
}

// ask sends a raw request. The status is 0 where there is no answer. Open tells that the connection can be used again.
func ask(t *testing.T, socket, request string) (status int, body string, open bool) {
	t.Helper()
	c := check.Value(net.Dial("unix", socket))(t)
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	reader := bufio.NewReader(c)
	if status, body = exchange(t, c, reader, request); status == 0 {
		return 0, "", false
	}
	again, _ := exchange(t, c, reader, "POST http://shim/nothing HTTP/1.1\r\nHost: shim\r\nContent-Length: 0\r\n\r\n")
	return status, body, again != 0
}

func exchange(t *testing.T, w io.Writer, reader *bufio.Reader, request string) (status int, body string) {
	t.Helper()
	if _, err := io.WriteString(w, request); err != nil {
		return 0, ""
	}
	if _, err := reader.Peek(1); err != nil {
		return 0, ""
	}
	response, err := http.ReadResponse(reader, nil)
	check.Must(t, err)
	defer func() { _ = response.Body.Close() }()
	return response.StatusCode, string(check.Value(io.ReadAll(response.Body))(t))
}

// parse reads the recorded answer.
func (e exchanged) parse(t *testing.T) (status int, body string, open bool) {
	t.Helper()
	text, open := strings.CutSuffix(e.Answer, "<open>")
	if text == "<EOF>" {
		return 0, "", false
	}
	head, body, found := strings.Cut(text, "\r\n\r\n")
	_, err := fmt.Sscanf(head, "HTTP/1.1 %d ", &status)
	check.Require(t, err == nil && found, "%q: %v", e.Answer, err)
	return status, body, open
}

// What the handler asks of runtime-rs is what the real shim answered, and the recorded answers are understood.
func TestRequestsToRuntimeRS(t *testing.T) {
	known := readExchanges(t)
	b := newBench(t, kataemu.Rust)
	b.stop() // the listener closes each connection: none may be kept
	v := published(t, b, "a")
	check.Must(t, os.MkdirAll(filepath.Join(b.cfg.SharedSandboxes, "sb1/rw/passthrough", filepath.Base(recordedPath)), 0o700))
	wire := listenRaw(t, filepath.Join(b.cfg.RustSandboxes, "sb1"))
	b.add(v.PodUID, "sb1")
	b.h.SandboxAdded(v.PodUID, "sb1")

	wire.answer(strings.TrimSuffix(known["stats ok"].Answer, "<open>"))
	bytes, inodes := totals(check.Value(b.h.Stats(t.Context(), v))(t))
	check.That(t, bytes == int64(recordedFS.Blocks)*recordedFS.Bsize && inodes == int64(recordedFS.Files), "%d bytes and %d inodes", bytes, inodes)
	check.Same(t, cmp.Diff([]string{known["stats ok"].Request}, wire.take()), "stats (-Kata +handler)")

	wire.answer("") // recorded as <EOF>
	handlers.WantError(t, check.Err(b.h.Resize(t.Context(), v, volume.Range{Required: recordedSize})), volume.Unsupported, v, "sb1", "without an answer")
	got := wire.take()
	check.Require(t, len(got) == 1, "resize: %q", got)
	check.Same(t, cmp.Diff(essence(t, known["resize"].Request), essence(t, got[0])), "resize (-Kata +handler)")
}

// What the handler asks of the Go shim, of which no raw requests are recorded, is
// read as Kata's shim_management.go reads it. The size and the error are recorded.
func TestRequestsToTheGoRuntime(t *testing.T) {
	for _, device := range append(oddDevices, "/dev/loop0") {
		t.Run(filepath.Base(device), func(t *testing.T) {
			b := newBench(t, kataemu.Go)
			b.stop() // the listener closes each connection: none may be kept
			v := b.Volume("a")
			v.Device.Path = device
			b.publish(t, v)
			wire := listenRaw(t, filepath.Join(b.cfg.GoSandboxes, "sb1"))
			check.Must(t, kataemu.WriteID(b.cfg.DirectVolumes, v.Target, "sb1"))
			wire.answer(goAnswer(http.StatusOK, `{"usage":[{"available":1,"total":3,"used":2,"unit":1}]}`))
			b.stats(t, v)
			wantGoStats(t, wire.take(), device)

			wire.answer(goAnswer(http.StatusInternalServerError,
				"rpc error: code = Unimplemented desc = resize_volume is not implemented in kata-agent"))
			_, err := b.h.Resize(t.Context(), v, volume.Range{Required: recordedSize})
			handlers.WantError(t, err, volume.Unsupported, v, "sb1", "resize_volume is not implemented")
			wantGoResize(t, wire.take(), device)
		})
	}
}

func goAnswer(status int, body string) string {
	return fmt.Sprintf("HTTP/1.1 %d x\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body)
}

// wantGoStats reads the device as serveVolumeStats does: it unescapes the decoded value of the query again.
func wantGoStats(t *testing.T, requests []string, device string) {
	t.Helper()
	check.Require(t, len(requests) == 1, "stats: %q", requests)
	got := essence(t, requests[0])
	target := check.Value(url.ParseRequestURI(got.URI))(t)
	query, err := url.ParseQuery(target.RawQuery)
	check.Require(t, err == nil && len(query) == 1 && len(query["path"]) == 1, "the query %q: %v", target.RawQuery, err)
	read, err := url.PathUnescape(query.Get("path"))
	check.That(t, got.Method == http.MethodGet && target.Path == "/direct-volume/stats" && read == device && err == nil && got.Body == nil,
		"%+v is read as %q, %v", got, read, err)
}

// wantGoResize reads the request as serveVolumeResize does.
func wantGoResize(t *testing.T, requests []string, device string) {
	t.Helper()
	check.Require(t, len(requests) == 1, "resize: %q", requests)
	want := essential{
		Method: http.MethodPost, URI: "/direct-volume/resize", Host: "shim",
		Body: map[string]any{"VolumePath": device, "Size": float64(recordedSize)},
	}
	check.Same(t, cmp.Diff(want, essence(t, requests[0])), "resize (-Kata +handler)")
}

// essential is what the shims read of a request.
type essential struct {
	Method, URI, Host string
	Body              map[string]any
}

func essence(t *testing.T, raw string) essential {
	t.Helper()
	request, err := http.ReadRequest(bufio.NewReader(strings.NewReader(raw)))
	check.Require(t, err == nil, "%q: %v", raw, err)
	e := essential{Method: request.Method, URI: request.RequestURI, Host: request.Host}
	body, err := io.ReadAll(request.Body)
	if err == nil && len(body) > 0 {
		err = json.Unmarshal(body, &e.Body)
	}
	check.Require(t, err == nil && int64(len(body)) == request.ContentLength,
		"a body of %d bytes, and the header says %d: %v", len(body), request.ContentLength, err)
	return e
}

// rawShim is a management socket that records each request byte for byte.
type rawShim struct {
	mu       sync.Mutex
	requests []string
	reply    string
}

func listenRaw(t *testing.T, dir string) *rawShim {
	t.Helper()
	check.Must(t, os.MkdirAll(dir, 0o700))
	listener := check.Value(net.Listen("unix", filepath.Join(dir, "shim-monitor.sock")))(t)
	s := &rawShim{}
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			s.serve(c)
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		served.Wait()
	})
	return s
}

// serve answers one request and closes, so that no goroutine waits for another.
func (s *rawShim) serve(c net.Conn) {
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	var raw bytes.Buffer
	request, err := http.ReadRequest(bufio.NewReader(io.TeeReader(c, &raw)))
	if err == nil {
		_, err = io.Copy(io.Discard, request.Body)
	}
	if err != nil {
		return // a connection without a request, by which the handler sees that the shim lives
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.requests = append(s.requests, raw.String())
	_, _ = io.WriteString(c, s.reply)
}

// answer sets what every request is answered with; "" means to hang up.
func (s *rawShim) answer(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reply = text
}

// take returns the requests since it was called last.
func (s *rawShim) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	taken := s.requests
	s.requests = nil
	return taken
}

// TestSocketAtEitherPath: which of the two directories has the socket tells the runtime, whatever an older sandbox of
// the other runtime left in the other one.
func TestSocketAtEitherPath(t *testing.T) {
	for _, flavor := range []kataemu.Flavor{kataemu.Go, kataemu.Rust} {
		for _, left := range []string{"nothing", "a directory", "a dead socket"} {
			b, v := publishedBench(t, flavor)
			other, want := b.cfg.RustSandboxes, goShim
			if flavor == kataemu.Rust {
				other, want = b.cfg.GoSandboxes, rustShim
			}
			if left != "nothing" {
				check.Must(t, os.MkdirAll(filepath.Join(other, "sb1"), 0o700))
			}
			if left == "a dead socket" {
				check.StaleSocket(t, filepath.Join(other, "sb1", "shim-monitor.sock"))
			}
			b.startShim(t, v, "sb1")
			b.stats(t, v)
			got := b.h.bindings.current(v)
			check.That(t, got == (shim{"sb1", want}), "beside %s: asked %+v, want %s", left, got, want)
			lives, err := b.h.bindings.hasShim("sb1")
			check.That(t, lives && err == nil, "beside %s: the shim lives: %t, %v", left, lives, err)
		}
	}
}
