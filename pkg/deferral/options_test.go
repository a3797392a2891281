package deferral

import (
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// able is a handler of which only its abilities are asked.
type able struct {
	Projector
	abilities Abilities
}

func (a able) Abilities() Abilities { return a.abilities }

// Whoever's kernel makes the mount of a handler's sandboxes decides which options
// they can be given.
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
			err := checkOptions(handler, v)
			if (err == nil) != taken {
				t.Errorf("%s on %+v: %v", c.flag, handler, err)
			}
			if err == nil {
				continue
			}
			if volume.KindOf(err) != volume.Unsupported || !strings.Contains(err.Error(), `"`+c.name+`"`) || !strings.Contains(err.Error(), "/target") {
				t.Errorf("%s: %v", c.flag, err)
			}
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
		needs, written := a.needsPreparation(&record{Volume: volume.Volume{ReadOnly: c.readOnly}}), a.mayBeWritten()
		if needs != c.needs || needs && written != c.written {
			t.Errorf("%s: prepared %v, written to %v", name, needs, written)
		}
	}
}

// noPreparer is a preparer that is not asked.
type noPreparer struct{ Preparer }
