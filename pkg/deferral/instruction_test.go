package deferral

import (
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/guard"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/pkg/volume/mountopt"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func good() volume.Instruction {
	return volume.Instruction{
		Type: volume.Block, Target: "/var/lib/kubelet/pods/u/volumes/kubernetes.io~csi/pv/mount",
		Backing: "/dev/vdb", FSType: "ext4", MountFlags: []string{"noatime"},
	}
}

func TestValidate(t *testing.T) {
	x := strings.Repeat("x", 1024)
	longest := []string{x, x, x, x[:1017]} // with commas and ro, 4095 bytes
	for name, test := range map[string]struct {
		change func(*volume.Instruction)
		want   string // part of the error; empty means valid
	}{
		"good":                     {func(*volume.Instruction) {}, ""},
		"utf-8 target":             {func(in *volume.Instruction) { in.Target = "/var/lib/kubelet/ü" }, ""},
		"group and policy":         {func(in *volume.Instruction) { in.Group, in.GroupPolicy = "1000", volume.GroupAlways }, ""},
		"no type":                  {func(in *volume.Instruction) { in.Type = "" }, "volume_type"},
		"network":                  {func(in *volume.Instruction) { in.Type = volume.Network }, "network volumes"},
		"no target":                {func(in *volume.Instruction) { in.Target = "" }, "volume_target_path is empty"},
		"no device":                {func(in *volume.Instruction) { in.Backing = "" }, "volume_backing_path is empty"},
		"no filesystem":            {func(in *volume.Instruction) { in.FSType = "" }, "fs_type is empty"},
		"filesystem with a path":   {func(in *volume.Instruction) { in.FSType = "../ext4" }, "fs_type"},
		"filesystem with a comma":  {func(in *volume.Instruction) { in.FSType = "ext4,suid" }, "fs_type"},
		"both ro and rw":           {func(in *volume.Instruction) { in.MountFlags = []string{"ro", "rw"} }, "both ro and rw"},
		"ro and rw in one flag":    {func(in *volume.Instruction) { in.MountFlags = []string{"rw,ro"} }, "both ro and rw"},
		"empty flag":               {func(in *volume.Instruction) { in.MountFlags = []string{""} }, "mount flag 1"},
		"flag with newline":        {func(in *volume.Instruction) { in.MountFlags = []string{"a\nb"} }, "mount flag 1"},
		"flag too long":            {func(in *volume.Instruction) { in.MountFlags = []string{strings.Repeat("x", 1025)} }, "mount flag 1"},
		"as many flags as can be":  {func(in *volume.Instruction) { in.MountFlags = slices.Repeat([]string{"noatime"}, 64) }, ""},
		"as long as they can be":   {func(in *volume.Instruction) { in.MountFlags = longest }, ""},
		"too many flags":           {func(in *volume.Instruction) { in.MountFlags = make([]string, 65) }, "65 mount flags"},
		"4 KiB of flags":           {func(in *volume.Instruction) { in.MountFlags = slices.Repeat([]string{strings.Repeat("<", 1023)}, 4) }, "mount(2)"},
		"4 KiB for the kernel":     {func(in *volume.Instruction) { in.MountFlags = slices.Repeat([]string{strings.Repeat("user,", 100)}, 4) }, "mount(2)"},
		"policy without group":     {func(in *volume.Instruction) { in.GroupPolicy = volume.GroupAlways }, "needs a supplemental group"},
		"unknown policy":           {func(in *volume.Instruction) { in.Group, in.GroupPolicy = "1", "Sometimes" }, "unknown supplemental group change policy"},
		"group by name":            {func(in *volume.Instruction) { in.Group = "staff" }, "not a decimal"},
		"negative group":           {func(in *volume.Instruction) { in.Group = "-1" }, "not a decimal"},
		"group with leading zero":  {func(in *volume.Instruction) { in.Group = "010" }, "not a decimal"},
		"the group that means all": {func(in *volume.Instruction) { in.Group = "4294967295" }, "not a decimal"},
		"NUL":                      {func(in *volume.Instruction) { in.Target += "\x00" }, "control characters"},
		"newline":                  {func(in *volume.Instruction) { in.Backing += "\n" }, "control characters"},
		"not UTF-8":                {func(in *volume.Instruction) { in.Target += "\xff" }, "not valid UTF-8"},
		"climbing":                 {func(in *volume.Instruction) { in.Target = "/var/lib/kubelet/../x" }, "climbs"},
		"a path of 4 KiB":          {func(in *volume.Instruction) { in.Target = strings.Repeat("/abc", 1024) }, "4096 bytes long"},
	} {
		t.Run(name, func(t *testing.T) {
			in := good()
			test.change(&in)
			err := Validate(&in)
			switch {
			case test.want == "" && err != nil:
				t.Fatalf("refused: %v", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Fatalf("got %v; want an error with %q", err, test.want)
			}
		})
	}
}

func recordOf(in *volume.Instruction) *record {
	a := attempt{b: &Broker{targets: &targets{describe: func(*volume.Volume, string, int) {}}}, in: in, handler: able{}, target: &guard.Target{}, dev: &claim.OpenedDevice{}}
	return a.record(sys.NoFD)
}

// A StorageClass may write all its mount options as one.
func TestReadOnlyIsFoundInAnyFlag(t *testing.T) {
	for _, flags := range [][]string{{"ro"}, {"noatime,ro"}, {"ro,noatime"}, {"defaults,ro"}, {"discard", "noatime, ro ,nodev"}} {
		in := good()
		in.MountFlags = flags
		v := recordOf(&in).Volume
		options := mountopt.Options(&v)
		check.That(t, v.ReadOnly && options[len(options)-1] == "ro", "%q: read-only %v, options %q", flags, v.ReadOnly, options)
	}
	for _, flags := range [][]string{nil, {"rw"}, {"noatime,rw"}, {"errors=remount-ro"}, {`context="a,ro"`}} {
		in := good()
		in.MountFlags = flags
		check.That(t, !recordOf(&in).ReadOnly, "%q is taken for read-only", flags)
	}
}

// A record of before keeps the flags as they were given.
func TestTheSameOptionsInOtherFlags(t *testing.T) {
	in := good()
	in.MountFlags, in.Handler = []string{"noatime,discard"}, "kata"
	dev := volume.Device{Kind: volume.BlockDevice, Path: "/dev/vdb", Major: 7}
	for _, on := range [][]string{{"noatime,discard"}, {"noatime", "discard"}} {
		rec := &record{Volume: volume.Volume{Device: dev, FSType: "ext4", MountFlags: on, Handler: "kata"}}
		check.That(t, rec.same(&in, dev), "%q on record: the repeated call asks for something else", on)
	}
}

func TestSecretLikeFlagsAreRefusedAndNeverRepeated(t *testing.T) {
	for _, flag := range []string{
		"password=hunter2", "pass=hunter2", "PASSWD=hunter2", "secret=hunter2", "secretfile=/hunter2", "credentials=/hunter2",
		"cred=hunter2", "user=bob%hunter2", "username=hunter2", "key=hunter2", "api_key=hunter2", "access-key=hunter2",
		"token=hunter2", "noatime,password=hunter2", "bearer_token=hunter2", "password:hunter2", "passphrase_hunter2=",
		"encryption.key=hunter2", "keyring=hunter2", "auth=hunter2",
	} {
		in := good()
		in.MountFlags = []string{"noatime", flag}
		err := Validate(&in)
		check.That(t, err != nil && volume.KindOf(err) == volume.Invalid && (!strings.Contains(err.Error(), "hunter2") || flag == "passphrase_hunter2="),
			"%s: %v", flag, err)
	}
	for _, flag := range []string{"noatime", "data=ordered", "sec=krb5", "errors=remount-ro", "compress=zstd", "journal_checksum", "discard", "usrquota", "uid=1000"} {
		in := good()
		in.MountFlags = []string{flag}
		check.NoError(t, Validate(&in), "%s was refused", flag)
	}
}

// able is a handler of which only its abilities are asked.
type able struct {
	Projector
	abilities Abilities
}

func (a able) Abilities() Abilities     { return a.abilities }
func (able) Name() string               { return "able" }
func (able) Check(*volume.Volume) error { return nil }

// Whoever's kernel makes the mount of a handler's sandboxes decides which options they can be given.
func TestOptionsOfAHandlersSandboxes(t *testing.T) {
	host, guest := able{abilities: Abilities{HostMounts: true}}, able{}
	for _, c := range []struct {
		fsType, flag, name string // name of the option that is refused, or ""
		host, guest        bool   // whether it is taken
	}{
		{"ext4", "noatime,discard,_netdev,x-systemd.automount,commit=30", "", true, true},
		{"ext4", "noatime,ro", "", true, true},
		{"ext4", "noatime, rbind", "rbind", false, false},
		{"ext4", "noatime,journal_path=/dev/sdb", "journal_path", false, false},
		{"xfs", "logdev=/dev/sdb", "logdev", false, false},
		{"ext4", "errors=panic", "errors", false, false},
		{"ext4", `commit="5,journal_path=/dev/vdc`, "commit", false, false},
		{"ext4", "read_ahead_kb=128", "read_ahead_kb", false, false},
		{"ext4", "no-such-option", "no-such-option", false, true},
	} {
		v := &volume.Volume{Target: "/target", FSType: c.fsType, MountFlags: []string{c.flag}}
		for handler, taken := range map[Projector]bool{host: c.host, guest: c.guest} {
			err := (&attempt{handler: handler}).check(v)
			check.That(t, (err == nil) == taken, "%s on %+v: %v", c.flag, handler, err)
			if err == nil {
				continue
			}
			check.That(t, volume.KindOf(err) == volume.Unsupported && strings.Contains(err.Error(), `"`+c.name+`"`) && strings.Contains(err.Error(), "/target"),
				"%s: %v", c.flag, err)
		}
	}
}

// TestWhatIsPrepared: a device that is only looked at stays claimed meanwhile.
func TestWhatIsPrepared(t *testing.T) {
	block, image := volume.Device{Kind: volume.BlockDevice}, volume.Device{Kind: volume.ImageFile}
	keeps, grows := volume.Instruction{KeepSize: true, Format: volume.FormatDriver}, Abilities{GrowsAtMount: true}
	for name, c := range map[string]struct {
		in             volume.Instruction
		readOnly       bool
		device         volume.Device
		of             Abilities
		needs, written bool
	}{
		"the caller's":           {volume.Instruction{}, false, block, Abilities{}, false, false},
		"a reader's":             {volume.Instruction{}, true, block, Abilities{}, true, false},
		"a reader's image":       {volume.Instruction{}, true, image, Abilities{}, false, false},
		"the driver's":           {volume.Instruction{Format: volume.FormatDriver}, false, block, Abilities{}, true, true},
		"the driver's image":     {volume.Instruction{Format: volume.FormatDriver}, false, image, grows, false, false},
		"that keeps its size":    {keeps, false, block, Abilities{}, true, false},
		"that the sandbox grows": {volume.Instruction{Format: volume.FormatDriver}, false, block, grows, true, false},
		"formatted here":         {volume.Instruction{Format: volume.FormatHost}, false, block, grows, true, true},
	} {
		a := attempt{
			b: &Broker{cfg: Config{Preparer: noPreparer{}}}, in: &c.in, handler: able{abilities: c.of}, dev: &claim.OpenedDevice{Device: c.device},
		}
		needs, written := a.preparation(&record{Volume: volume.Volume{ReadOnly: c.readOnly}})
		check.That(t, needs == c.needs && (!needs || written == c.written), "%s: prepared %v, written to %v", name, needs, written)
	}
}

type noPreparer struct{ Preparer }
