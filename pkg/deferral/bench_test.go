package deferral

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// bench is a broker between parties that write down what it asks of them, and how far it was by then. Its
// devices are images, because no test without root has another.
type bench struct {
	*testing.T
	b     *Broker
	image string
	key   volume.Key
	// said are the steps, each with what exists of the volume: its claim and its record.
	said []string
	// fail has the error of each step that fails, by its name or all that it says. who is what InUse answers,
	// and standing the volume of a projection without a record.
	fail map[string]error
	who  string
	// counted is the number of publishes that the observer was told of.
	counted int

	standing *volume.Volume
	holders  []openers.Holder // processes that have the image open; those without a number cannot be opened
	ended    []string         // what the observer was told of orphans
	several  bool             // whether the volume had several sandboxes
	timeUp   func()           // the container runtime takes all the time of the caller, if it is set
}

var errStep = errors.New("it failed")

// step is one call of the broker to a party.
func (s *bench) step(name string) error {
	said := strings.TrimSpace(name + " " + s.state())
	s.said = append(s.said, said)
	return cmp.Or(s.fail[said], s.fail[name])
}

func (s *bench) recordIn(dir string) string {
	if _, err := os.Lstat(s.b.store.path(dir, s.key)); err != nil {
		return ""
	}
	return dir
}

// state is what exists of the volume.
func (s *bench) state() string {
	claimed := ""
	if s.b.claims.Has(claim.Request{Volume: &volume.Volume{Key: s.key, Device: claim.Identify(s.image)}}) {
		claimed = "claimed"
	}
	return strings.Join(strings.Fields(claimed+" "+s.recordIn(volumesDir)+" "+s.recordIn(removingDir)), " ")
}

// saw compares the steps since the last call.
func (s *bench) saw(want ...string) {
	s.Helper()
	check.That(s, slices.Equal(s.said, want), "steps:\n  %s\nwant:\n  %s", strings.Join(s.said, "\n  "), strings.Join(want, "\n  "))
	s.said = nil
}

// is compares what exists of the volume at the end.
func (s *bench) is(want string) {
	s.Helper()
	if got := s.state(); got != want || (s.b.table.get(s.key) != nil) != (want != "") {
		s.Errorf("what exists is %q, want %q; in the table: %v", got, want, s.b.table.get(s.key))
	}
}

// projector is the bench's runtime handler.
type projector struct {
	*bench
	name string
}

func (p projector) Name() string               { return p.name }
func (projector) Abilities() Abilities         { return Abilities{} }
func (p projector) Check(*volume.Volume) error { return p.step("check") }
func (p projector) Publish(context.Context, *volume.Volume) (bool, error) {
	return true, p.step("publish")
}
func (p projector) Retract(context.Context, *volume.Volume) error { return p.step("retract") }
func (p projector) Orphans(known func(volume.Key) bool) ([]*volume.Volume, error) {
	if p.standing == nil || p.name == "other" || known(p.standing.Key) {
		return nil, p.fail["orphans"]
	}
	return []*volume.Volume{p.standing}, p.fail["orphans"]
}
func (p projector) InUse(context.Context, *volume.Volume) (string, error) {
	return p.who, p.step("in-use")
}

// tracked is a runtime handler that tracks sandboxes.
type tracked struct{ projector }

func (p tracked) Tracking() Tracking                             { return p }
func (p tracked) Withdraw(context.Context, *volume.Volume) error { return p.step("withdraw") }
func (tracked) Sandboxes(*volume.Volume) []string                { return []string{sandboxID} }
func (p tracked) Disowned(context.Context, *volume.Volume, []string) error {
	if p.timeUp != nil {
		p.timeUp()
	}
	return p.step("disowned")
}
func (p tracked) Several(*volume.Volume) bool { return p.several }
func (p tracked) ForgetEnded(_ *volume.Volume, hasDevice func(string) bool) {
	_ = p.step(fmt.Sprint("forget-ended ", hasDevice(sandboxID)))
}

// finder is the bench's kernel: who has the image open.
type finder struct{ *bench }

func (f finder) Await(context.Context, openers.Query, time.Duration) (openers.Users, error) {
	err := f.step("free")
	if errors.Is(err, errOpen) {
		return openers.Users{Names: err.Error()}, nil
	}
	return openers.Users{}, err
}
func (f finder) Holders(ctx context.Context, _ openers.Query) ([]openers.Holder, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return f.holders, f.fail["holders"]
}
func (finder) OpenProcess(of openers.Holder) (*openers.Process, error) {
	if of.PID == 0 {
		return nil, errStep
	}
	return (&openers.Finder{}).OpenProcess(of)
}
func (finder) Mark(int) openers.Mark                                         { return openers.Mark{} }
func (finder) AwaitClosed(context.Context, openers.Mark, time.Duration) bool { return true }
func (finder) Layers(file openers.File, _ int) ([]openers.File, error) {
	return []openers.File{file, {Inode: 1}}, nil // if it is a loop device, it has an image under it
}

// leaving is the bench's observer.
type leaving struct {
	NoObserver
	bench *bench
}

func (l leaving) Leaving(*volume.Volume)   { _ = l.bench.step("leaving") }
func (l leaving) Published(*volume.Volume) { l.bench.counted++ }
func (l leaving) OrphanEnded(_ *volume.Volume, one Orphan, by string, err error) {
	l.bench.ended = append(l.bench.ended, fmt.Sprint(one.PID, " by ", by, ": ", err))
}

var sandboxID = strings.Repeat("5a", 32)

// errOpen is the answer that somebody has the image open.
var errOpen = errors.New("process 4711")

func newBench(t *testing.T, handler func(*bench) Projector) *bench {
	t.Helper()
	images, root := t.TempDir(), t.TempDir()
	s := &bench{T: t, image: filepath.Join(images, "image"), key: volume.KeyOf(root + "/mount"), fail: map[string]error{}}
	for _, name := range []string{"image", "other"} {
		check.Must(t, os.WriteFile(filepath.Join(images, name), nil, 0o600))
	}
	s.start(Config{
		StateDir: t.TempDir(), Root: root, Devices: claim.DevicePolicy{Images: []string{images}}, Openers: finder{s},
		Handlers: []Projector{handler(s), projector{s, "other"}}, DefaultHandler: "kata",
		Observer: leaving{bench: s},
	})
	return s
}

// publishedBench is a bench whose volume is deferred.
func publishedBench(t *testing.T, handler func(*bench) Projector) *bench {
	t.Helper()
	s := newBench(t, handler)
	s.published()
	return s
}

// restart starts the broker again with the records that there are.
func (s *bench) restart() {
	s.Helper()
	s.start(s.b.cfg)
	check.Must(s, s.b.Load(s.Context()))
}

// start starts a broker, or starts it again.
func (s *bench) start(cfg Config) {
	s.Helper()
	s.b = check.Value(NewBroker(cfg))(s)
	s.Cleanup(s.b.Close)
	s.b.targets.mount = func(*guard.Target, int, bool) (bool, error) { return true, s.step("guard") }
	s.b.targets.restore = func(*guard.Target) (bool, error) { return true, s.step("guard") }
	s.b.targets.remove = func(t *guard.Target, _ bool) error { return cmp.Or(s.step("unguard"), s.fail[t.Given]) }
}

func plain(s *bench) Projector    { return projector{s, "kata"} }
func tracking(s *bench) Projector { return tracked{projector{s, "kata"}} }

func (s *bench) asked() volume.Instruction {
	return volume.Instruction{
		Type: volume.Block, Target: s.b.cfg.Root + "/mount", Backing: s.image, FSType: "ext4", MountFlags: []string{"noatime", "discard"},
		Group: "1000", GroupPolicy: volume.GroupAlways, Driver: "driver", Origin: &volume.Origin{VolumeID: "volume"},
	}
}

// published defers the volume, and forgets the steps.
func (s *bench) published() {
	s.Helper()
	check.Must(s, check.Err(s.b.Defer(s.Context(), s.asked())))
	s.said = nil
}

func (s *bench) wants(err error, kind volume.Kind, words ...string) {
	s.Helper()
	check.Kind(s, err, kind, words...)
}
