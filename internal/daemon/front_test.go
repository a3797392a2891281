package daemon

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/disk/mkfs"
	"github.com/crust-proxy/crust-proxy/internal/front/pods"
	"github.com/crust-proxy/crust-proxy/internal/front/registry"
)

// TestRootOfANewFilesystem: what kubelet would do for fsGroup is done at mkfs.
func TestRootOfANewFilesystem(t *testing.T) {
	for _, c := range []struct {
		group string
		mode  uint32
		want  mkfs.Root
	}{
		{"", 0, mkfs.Root{}},
		{"", 0o777, mkfs.Root{Mode: 0o777}},
		{"2000", 0, mkfs.Root{Group: 2000, Mode: 0o2775}},
		{"2000", 0o700, mkfs.Root{Group: 2000, Mode: 0o2770}},
		{"0", 0, mkfs.Root{}},
		{"4294967294", 0, mkfs.Root{Group: 4294967294, Mode: 0o2775}},
	} {
		if got := rootOf(c.group, c.mode); got != c.want {
			t.Errorf("group %q, mode %o: got %+v, want %+v", c.group, c.mode, got, c.want)
		}
	}
}

// TestWhatTheCSINodeShows: a driver that is missing there, and that it cannot be read.
func TestWhatTheCSINodeShows(t *testing.T) {
	lost := registry.State{Driver: registry.Driver{Name: "lost.example.com"}, Missing: true}
	well := registry.State{Driver: registry.Driver{Name: "well.example.com"}}
	forbidden := errors.New("the CSINode node-a may not be read")
	for _, c := range []struct {
		name    string
		drivers []registry.State
		look    pods.State
		want    []string
	}{
		{"all is well", []registry.State{well}, pods.State{}, nil},
		{"missing", []registry.State{well, lost}, pods.State{}, []string{"driver lost.example.com is registered with kubelet and not in the node's CSINode"}},
		{"forbidden", []registry.State{well}, pods.State{CSINode: forbidden}, []string{forbidden.Error()}},
		{"away", []registry.State{well}, pods.State{CSINode: forbidden, Problems: []string{"which is a finding of its own"}}, nil},
	} {
		got := csiNodeFindings(c.drivers, c.look)
		if !slices.EqualFunc(got, c.want, strings.Contains) {
			t.Errorf("%s: got %q", c.name, got)
		}
	}
}
