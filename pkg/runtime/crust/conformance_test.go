package crust

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/runtimetest"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/handlers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformanceBySocket(t *testing.T) {
	runtimetest.Run(t, runtimetest.Fixture{CanResize: true, New: func(t *testing.T) runtimetest.Env { return newBench(t, bySocket) }})
}

func TestConformanceByProgram(t *testing.T) {
	runtimetest.Run(t, runtimetest.Fixture{CanResize: true, New: func(t *testing.T) runtimetest.Env { return newBench(t, byProgram) }})
}

// way is how a bench's sandboxes can be asked.
type way uint8

const (
	bySocket way = 1 << iota
	byProgram
)

// bench is a handler with a node of its own around it: a fake program and a fake
// agent, which share what they know of each volume's sandbox.
type bench struct {
	cfg       Config
	way       way
	dir       string
	sandboxes Sandboxes
	agent     *agent
	h         *Handler
	stop      func()
}

func newBench(t testing.TB, w way) *bench {
	t.Helper()
	dir := check.ShortDir(t)
	b := &bench{way: w, dir: dir, stop: func() {}, cfg: Config{Filesystems: []string{"ext4", "xfs", "btrfs"}}}
	b.cfg.Root, b.cfg.TempDir = filepath.Join(dir, "root"), filepath.Join(dir, "tmp")
	b.cfg.Programs = []string{b.program(t, "runtime", fakeScript(dir))}
	b.cfg.SocketDirs = []string{filepath.Join(dir, "s")}
	b.cfg.Owner = uint32(os.Getuid())
	for _, sub := range []string{"s", "state"} {
		check.Must(t, os.Mkdir(filepath.Join(dir, sub), 0o700))
	}
	b.agent = startAgent(t, filepath.Join(dir, "s", "agent"), filepath.Join(dir, "state"))
	b.start(t)
	t.Cleanup(func() { b.stop() })
	return b
}

func (b *bench) start(t testing.TB) {
	t.Helper()
	h := check.Value(New(b.cfg, b.sandboxes, zap.NewNop()))(t)
	h.expiry.programs = nil // scripts of tests are asked by the tests alone
	h.asker.programs.patience = time.Minute
	b.h, b.stop = h, handlers.Run(t, h)
}

// program writes a shell script that may be run.
func (b *bench) program(t testing.TB, name, script string) string {
	t.Helper()
	path := filepath.Join(b.dir, name)
	check.Must(t, os.WriteFile(path+".new", []byte("#!/bin/sh\n"+script), 0o600))
	check.Must(t, os.Chmod(path+".new", 0o755))
	check.Must(t, os.Rename(path+".new", path))
	return path
}

// fakeScript answers by the volume's mode, which stands in a file named by its pod.
func fakeScript(dir string) string {
	return fmt.Sprintf(`[ "$1" = crust ] || exit 2
pod=${3#*/pods/}; pod=${pod%%%%/*}
mode=$(cat "%s/state/$pod" 2>/dev/null) || { echo "no sandbox has $3" >&2; exit 3; }
case $mode in
hang) sleep 1000; exit 1 ;;
refuse) echo "I had rather not" >&2; exit 1 ;;
babble) echo '{"usage":['; exit 0 ;;
esac
case $2 in
stats) echo '{"usage":[{"available":7,"total":10,"used":3,"unit":"BYTES"},{"available":"90","total":"100","used":"10","unit":2}],"volumeCondition":{"message":"fine","reason":"Fine"},"news":1}' ;;
resize) echo "{\"capacity_bytes\":$4}" ;;
*) echo '{}' ;;
esac
`, dir)
}

func (b *bench) Handler() runtime.Handler { return b.h }

func (b *bench) Restart(t *testing.T) runtime.Handler {
	b.stop()
	b.start(t)
	return b.h
}

func (b *bench) Volume(name string) *volume.Volume {
	return handlers.Volume(Name, name, volume.Device{Kind: volume.BlockDevice, Path: "/dev/disk-" + name, Major: 240, Minor: 1})
}

func published(t testing.TB, b *bench, name string) *volume.Volume {
	t.Helper()
	v := b.Volume(name)
	check.Value(b.h.Publish(t.Context(), v))(t)
	return v
}

// sized gives a volume a file of this size as its device.
func (b *bench) sized(t testing.TB, v *volume.Volume, size int64) {
	t.Helper()
	handlers.Sized(t, v, filepath.Join(b.dir, "device"), size)
}

func (b *bench) stats(t testing.TB, v *volume.Volume) {
	t.Helper()
	check.Value(b.h.Stats(t.Context(), v))(t)
}

func (b *bench) path(v *volume.Volume, name string) string {
	return filepath.Join(b.cfg.Root, string(v.Key), name)
}

func (b *bench) Projection(t *testing.T, v *volume.Volume) (string, bool) {
	t.Helper()
	raw, err := os.ReadFile(b.path(v, abi.InfoName))
	check.Require(t, err == nil || os.IsNotExist(err), "%v", err)
	return string(raw), err == nil
}

func (b *bench) PublishForeign(t *testing.T, v *volume.Volume) {
	t.Helper()
	raw := check.Value(abi.Encode(v))(t)
	check.Must(t, os.MkdirAll(b.path(v, ""), 0o700))
	check.Must(t, os.WriteFile(b.path(v, abi.InfoName), raw, 0o600))
}

func (b *bench) LeaveHalfPublished(t *testing.T, v *volume.Volume) {
	t.Helper()
	check.Value(b.h.store.Tree.Build(v.Key, []byte("{")))(t)
	check.Must(t, os.WriteFile(filepath.Join(b.cfg.TempDir, "half"), nil, 0o600))
}

func (b *bench) CountLeftovers(t *testing.T) int {
	t.Helper()
	return handlers.CountFiles(t, b.cfg.TempDir)
}

func (b *bench) Start(t *testing.T, v *volume.Volume, id string) runtimetest.Sandbox {
	t.Helper()
	return b.startSandbox(t, v, id)
}

// startSandbox leaves what a handler leaves that has mounted the volume.
func (b *bench) startSandbox(t testing.TB, v *volume.Volume, id string) *sandbox {
	t.Helper()
	s := &sandbox{state: filepath.Join(b.dir, "state", v.PodUID), t: t}
	s.set("well")
	b.leave(t, v, id, b.cfg.Programs[0], b.agent.path)
	return s
}

func (b *bench) leave(t testing.TB, v *volume.Volume, id, program, socket string) {
	t.Helper()
	dir := check.Value(abi.Open(b.cfg.Root, string(v.Key)))(t)
	defer func() { check.Must(t, dir.Close()) }()
	check.Must(t, dir.Lock(time.Second))
	if b.way&byProgram != 0 {
		check.Must(t, dir.Put(abi.CLIName, []byte(program+"\n")))
	}
	if b.way&bySocket != 0 {
		check.Must(t, dir.Put(abi.SocketName, []byte(socket+"\n")))
	}
	check.Must(t, dir.Put(id, []byte("{}")))
}

// sandbox is what the fakes know of one, in a file that both read.
type sandbox struct {
	t     testing.TB
	state string
}

func (s *sandbox) set(mode string) {
	s.t.Helper()
	check.Must(s.t, os.WriteFile(s.state+".new", []byte(mode), 0o600))
	check.Must(s.t, os.Rename(s.state+".new", s.state))
}

func (s *sandbox) Hang()   { s.set("hang") }
func (s *sandbox) Refuse() { s.set("refuse") }
func (s *sandbox) Babble() { s.set("babble") }
func (s *sandbox) Resume() { s.set("well") }

func (s *sandbox) Kill(t *testing.T) {
	t.Helper()
	check.Must(t, os.Remove(s.state))
}
