package decision

import (
	"slices"
	"strings"
	"testing"
)

func TestDroppedParameters(t *testing.T) {
	got := IgnoredParameters(map[string]string{
		"blockSize": "4096", "mkfsOptions": "-m0", "numberOfInodes": "", "type": "gp3", "fsType": "xfs", "ext4BigAlloc": "true",
		"fsFormatOptions": "-O quota", "inodeSize": "512",
	})
	if want := []string{"blockSize", "ext4BigAlloc", "fsFormatOptions", "inodeSize", "mkfsOptions"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := IgnoredParameters(nil); len(got) != 0 {
		t.Errorf("got %q of nothing", got)
	}
}

// TestHazards: what runtime-rs does wrong, where the pod's runtime is or may be runtime-rs.
func TestHazards(t *testing.T) {
	const twice, paths, space = "attached a second time", "at several paths", "has a space"
	two := func(a, b PodVolume) []PodVolume {
		a.Driver, a.VolumeID, b.Driver, b.VolumeID = driver, volumeID, driver, volumeID
		return []PodVolume{a, b}
	}
	shared := PodVolume{Together: []string{"app", "sidecar"}}
	for name, c := range map[string]struct {
		runtime    string
		volumes    []PodVolume
		says       string
		containers []string
	}{
		"two containers":          {runtime: "kata-qemu-runtime-rs", volumes: two(shared, PodVolume{}), says: twice, containers: []string{"app", "sidecar"}},
		"by two names":            {runtime: "kata", volumes: two(PodVolume{Together: []string{"b"}}, PodVolume{Together: []string{"a"}}), says: twice, containers: []string{"a", "b"}},
		"the default runtime":     {volumes: two(shared, PodVolume{}), says: twice, containers: []string{"app", "sidecar"}},
		"a container's two paths": {runtime: "kata-qemu-runtime-rs", volumes: two(PodVolume{Mounts: []string{"setup", "app", "setup"}}, PodVolume{}), says: paths, containers: []string{"setup"}},
		"two paths by two names":  {runtime: "kata", volumes: two(PodVolume{Mounts: []string{"a"}}, PodVolume{Mounts: []string{"b", "a"}}), says: paths, containers: []string{"a"}},
		"a space":                 {runtime: "kata-dragonball", volumes: two(PodVolume{Spaced: []string{"app"}}, PodVolume{}), says: space, containers: []string{"app"}},
		"the Go runtime":          {runtime: "kata-qemu", volumes: two(shared, PodVolume{})},
		"one container":           {runtime: "kata", volumes: two(PodVolume{Together: []string{"app"}, Mounts: []string{"setup", "app"}}, PodVolume{})},
		"another volume's two":    {runtime: "kata", volumes: append(two(PodVolume{}, PodVolume{}), PodVolume{Driver: "other", VolumeID: "o", Together: []string{"a", "b"}})},
	} {
		t.Run(name, func(t *testing.T) {
			pod := contextOf(t, Pod{RuntimeHandler: c.runtime, Volumes: c.volumes})
			if other := Hazards("crust", pod); len(other) != 0 {
				t.Errorf("of another handler: %+v", other)
			}
			got := Hazards("kata", pod)
			if c.says == "" && len(got) == 0 {
				return
			}
			if len(got) != 1 || !strings.Contains(got[0].Text, c.says) || !slices.Equal(got[0].Containers, c.containers) {
				t.Errorf("got %+v", got)
			}
		})
	}
}
