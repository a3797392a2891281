package conformance

import (
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// runUsers asks for what a pod with a user namespace needs.
func runUsers(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	s.check(t, "users-mapped", f.mapsOwners, "mount-inside")
}

// mapsOwners fails if a container is created whose mount has other owners than its
// mappings ask for.
func (f *fixture) mapsOwners(t *trial) {
	const root = 200000
	mapped := all(f.vol)
	mapped.owners = []specs.LinuxIDMapping{{ContainerID: 0, HostID: root, Size: 65536}}
	c := newContainer(f.pod.n, "mapped")
	if !c.startsUnlessRefused(t, f.pod.containerSpec("mapped", []bind{mapped})) {
		return
	}
	if is := asked[map[string]seen](t, c, "look", "/data")["/data"]; is.UID != root || is.GID != root {
		t.must(fmt.Errorf("the volume's root is %v, and should belong to %d", is, root))
	}
}
