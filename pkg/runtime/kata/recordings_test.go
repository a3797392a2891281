package kata

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
	kataemu "github.com/crust-proxy/crust-proxy/test/rig/kata"
)

// step is one line of a recording: what a real shim of Kata 4.1.0 asked of its VMM
// and of its guest's agent for a container whose volumes the handler had published.
type step struct {
	Step      string            `json:"step"` // plug, refused, unplug, create, remove, killed
	Device    string            `json:"device"`
	Slot      string            `json:"slot"`
	ReadOnly  bool              `json:"readOnly"`
	Container string            `json:"container"`
	Storages  []kataemu.Storage `json:"storages"`
	Mounts    []kataemu.Mount   `json:"mounts"`
	Error     string            `json:"error"`
}

// recorded are the volumes of a recording that were not plain read-write ext4. Of
// runtime-rs's with a group it is known that the group was not passed on.
var recorded = map[string]map[string]volume.Volume{
	"two-containers-restart-fsgroup-resize": {
		"/dev/loop0": {MountFlags: []string{"noatime"}, Group: "2000", GroupPolicy: volume.GroupOnMismatch},
	},
	"go-real-agent-fsgroup-netdev-ro-restart-killed-shim": {
		"/dev/loop0": {MountFlags: []string{"noatime"}, Group: "2000", GroupPolicy: volume.GroupOnMismatch},
		"/dev/loop1": {MountFlags: []string{"_netdev"}},
		"/dev/loop2": {FSType: "xfs", ReadOnly: true},
	},
	"go-real-agent-first-volume-resize-restart": {"/dev/loop0": {MountFlags: []string{"noatime"}}},
	"two-volumes-ext4-xfs":                      {"/dev/loop3": {FSType: "xfs", Group: "1234"}},
	"rs-mount-path-with-space-never-unmounted":  {"/dev/loop2": {FSType: "xfs"}},
	"rs-two-volumes-ext4-xfs-fsgroup-resize-restart": {
		"/dev/loop0": {MountFlags: []string{"noatime", "nodiratime"}, Group: "2000", GroupPolicy: volume.GroupOnMismatch},
		"/dev/loop2": {FSType: "xfs"},
	},
	"option-netdev-refused": {"/dev/loop0": {MountFlags: []string{"_netdev"}}},
	"read-only":             {"/dev/loop0": {ReadOnly: true}},
	"rs-options-netdev-noatime_ro-readonly": {
		"/dev/loop0": {MountFlags: []string{"_netdev"}},
		"/dev/loop1": {MountFlags: []string{"noatime"}},
		"/dev/loop2": {FSType: "xfs", ReadOnly: true},
	},
}

// The emulation of Kata asks its guest, for the volumes that the handler publishes, what the real shims asked.
func TestTheEmulationAsksWhatKataAsked(t *testing.T) {
	files, err := filepath.Glob("testdata/kata-shim/*.jsonl")
	check.Require(t, err == nil && len(files) >= 17, "%d recordings: %v", len(files), err)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".jsonl")
		t.Run(name, func(t *testing.T) { newReplay(t, name).run(readSteps(t, file)) })
	}
}

func readSteps(t *testing.T, file string) []step {
	t.Helper()
	f := check.Value(os.Open(file))(t)
	defer func() { _ = f.Close() }()
	var steps []step
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var s step
		check.Must(t, json.Unmarshal(lines.Bytes(), &s))
		steps = append(steps, s)
	}
	err := lines.Err()
	check.Require(t, err == nil && len(steps) != 0, "%d steps: %v", len(steps), err)
	return steps
}

// replay leads the emulation through a recording.
type replay struct {
	*bench
	t    *testing.T
	name string
	vm   *kataemu.VM

	plugs     []step            // recorded, and not asked for yet
	unplugged []string          // asked for, and not yet seen in the recording
	devices   map[string]string // by slot
	asked     []kataemu.Request
	refusal   string
}

func newReplay(t *testing.T, name string) *replay {
	r := &replay{t: t, name: name, devices: map[string]string{}}
	flavor := kataemu.Go
	if strings.HasPrefix(name, "rs-") {
		flavor = kataemu.Rust
	}
	r.bench = newBench(t, flavor)
	r.vm = &kataemu.VM{
		Flavor: flavor, SandboxID: "sb1", DirectVolumes: r.cfg.DirectVolumes, Shared: r.cfg.SharedSandboxes,
		Plug: r.plug, Unplug: func(device string) { r.unplugged = append(r.unplugged, device) },
		ReadOnly: func(device string) bool { return recorded[name][device].ReadOnly },
		Agent: func(request kataemu.Request) error {
			r.asked = append(r.asked, request)
			if r.refusal != "" {
				return errors.New(r.refusal)
			}
			return nil
		},
	}
	return r
}

// plug compares what the emulation asks of the VMM.
func (r *replay) plug(device string, readOnly bool) (string, error) {
	for i, s := range r.plugs {
		if s.Device == device {
			check.That(r.t, s.ReadOnly == readOnly, "%s is plugged in with read-only %v, and Kata did with %v", device, readOnly, s.ReadOnly)
			r.plugs = slices.Delete(r.plugs, i, i+1)
			if s.Error != "" {
				return "", errors.New(s.Error)
			}
			return s.Slot, nil
		}
	}
	r.t.Errorf("%s is plugged in, and Kata did not", device)
	return "", errors.New("not recorded")
}

func (r *replay) run(steps []step) {
	for _, s := range steps {
		switch s.Step {
		case "plug":
			r.wantUnplugged()
			r.plugs = append(r.plugs, s)
			r.devices[s.Slot] = s.Device
		case "refused":
			r.wantUnplugged()
			r.wantRefused(s)
		case "unplug":
			i := slices.Index(r.unplugged, s.Device)
			check.Require(r.t, i >= 0, "Kata unplugged %s, and the emulation did not", s.Device)
			r.unplugged = slices.Delete(r.unplugged, i, i+1)
		case "create":
			r.wantUnplugged()
			r.create(s)
		case "remove":
			r.vm.RemoveContainer(s.Container)
		case "killed":
			// The shim. What its clean-up asks of the agent then reaches no VMM.
			r.wantUnplugged()
			return
		default:
			r.t.Fatalf("an unknown step %q", s.Step)
		}
	}
	r.wantUnplugged()
}

// wantRefused creates a container whose disk the VMM does not attach. The agent is
// not asked, and what other containers have is not touched.
func (r *replay) wantRefused(s step) {
	r.t.Helper()
	r.plugs, r.asked = append(r.plugs, s), nil
	err := r.vm.CreateContainer(s.Container, []kataemu.Mount{{Destination: "/data", Source: r.volume(s.Device).Target}})
	check.Require(r.t, err != nil && strings.Contains(err.Error(), s.Error) && len(r.asked) == 0 && len(r.plugs) == 0,
		"%s: %v, and Kata: %q; the agent was asked %v; not plugged in: %v", s.Container, err, s.Error, r.asked, r.plugs)
}

func (r *replay) wantUnplugged() {
	if len(r.unplugged) > 0 {
		r.t.Errorf("%v are unplugged, and Kata did not", r.unplugged)
		r.unplugged = nil
	}
}

func (r *replay) create(s step) {
	r.t.Helper()
	var mounts []kataemu.Mount
	for i, storage := range s.Storages {
		v := r.volume(r.devices[storage.Source])
		r.publish(v)
		mode := "rw"
		if !slices.Contains(s.Mounts[i].Options, mode) {
			mode = "ro" // the container's own wish
		}
		mounts = append(mounts, kataemu.Mount{
			Destination: s.Mounts[i].Destination, Source: v.Target, Type: "bind", Options: []string{"rbind", "rprivate", mode},
		})
	}
	r.asked, r.refusal = nil, s.Error
	err := r.vm.CreateContainer(s.Container, mounts)
	check.Require(r.t, (err != nil) == (s.Error != ""), "%s: %v, and Kata: %q", s.Container, err, s.Error)
	check.Require(r.t, len(r.plugs) == 0 && len(r.asked) == 1,
		"%s: the agent was asked %d times; not plugged in: %v", s.Container, len(r.asked), r.plugs)
	strip := func(options []string) []string {
		return slices.DeleteFunc(options, func(option string) bool { return option == noUUID })
	}
	for i, storage := range r.asked[0].Storages { // the handler adds nouuid since Kata was recorded
		r.asked[0].Storages[i].Options, r.asked[0].Mounts[i].Options = strip(storage.Options), strip(r.asked[0].Mounts[i].Options)
	}
	want := kataemu.Request{Container: s.Container, Storages: s.Storages, Mounts: s.Mounts}
	check.Same(r.t, cmp.Diff(plain(r.t, want), plain(r.t, r.asked[0])), "%s (-Kata +emulation)", s.Container)
}

// publish publishes a volume. One with an option that the handler would leave out is
// published by another program, and Kata's own emptyDirs are by Kata.
func (r *replay) publish(v *volume.Volume) {
	r.t.Helper()
	if ownEmptyDir(v.Device.Path) {
		r.publishAs(v, "blk")
		return
	}
	r.bench.publish(r.t, v)
	if slices.Contains(v.MountFlags, "_netdev") {
		r.publishAs(v, "directvol")
	}
}

func (r *replay) publishAs(v *volume.Volume, volumeType string) {
	r.t.Helper()
	raw := check.Value(json.Marshal(map[string]any{
		"volume-type": volumeType, "device": v.Device.Path, "fstype": v.FSType, "options": v.MountFlags,
	}))(r.t)
	check.Must(r.t, os.MkdirAll(r.dir(v), 0o700))
	check.Must(r.t, os.WriteFile(filepath.Join(r.dir(v), infoName), raw, 0o600))
}

func ownEmptyDir(device string) bool { return filepath.Base(device) == "disk.img" }

// volume is what was published for a device.
func (r *replay) volume(device string) *volume.Volume {
	v := r.Volume(filepath.Base(device))
	given := recorded[r.name][device]
	v.Device.Path, v.ReadOnly = device, given.ReadOnly
	v.MountFlags, v.Group, v.GroupPolicy = given.MountFlags, given.Group, given.GroupPolicy
	if given.FSType != "" {
		v.FSType = given.FSType
	}
	if ownEmptyDir(device) {
		v.Target, v.MountFlags = filepath.Dir(device), []string{"discard"}
	}
	return v
}

// rustName is what runtime-rs draws by chance.
var rustName = regexp.MustCompile(`passthrough/[0-9a-f]{10}-[0-9a-f]{8}-`)

// plain is a request as text, without names drawn by chance.
func plain(t *testing.T, request kataemu.Request) string {
	t.Helper()
	raw := check.Value(json.MarshalIndent(request, "", " "))(t)
	return rustName.ReplaceAllString(string(raw), "passthrough/ID-RANDOM-")
}
