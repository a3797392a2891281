package conformance

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// podGroup is the fsGroup.
const podGroup = 4242

// runGroup publishes a volume with an fsGroup, under both policies.
func runGroup(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	canary := s.node.path("canary")
	t.must(os.WriteFile(canary, nil, 0o600))
	var c *container
	s.check(t, "group-always", func(t *trial) {
		c = f.container(t, "main")
		t.exec(c, "tree", "/data")
		t.exec(c, "link", "/data/"+linkFile, canary)
		t.exec(c, "fix", "/data/"+fixedFile)
		c = inGroup(t, f, volume.GroupAlways, c)
		looks(t, c, map[string]seen{
			"": {Mode: unix.S_IFDIR | 0o2775, GID: podGroup}, plainFile: {Mode: unix.S_IFREG | 0o660, GID: podGroup},
			directory: {Mode: unix.S_IFDIR | 0o2770, GID: podGroup}, innerFile: {Mode: unix.S_IFREG | 0o664, GID: podGroup},
		})
	}, "mount-inside")
	s.check(t, "group-setid", func(t *trial) {
		looks(t, c, map[string]seen{setIDFile: {Mode: unix.S_IFREG | 0o4775, GID: podGroup}})
	}, "group-always")
	s.check(t, "group-link", func(t *trial) {
		notGiven(t, canary)
		looks(t, c, map[string]seen{linkFile: {Mode: unix.S_IFLNK | 0o777, GID: podGroup}})
	}, "group-always")
	s.check(t, "group-fixed", func(t *trial) {
		looks(t, c, map[string]seen{fixedFile: {Mode: unix.S_IFREG | 0o600}})
	}, "group-always")
	s.check(t, "group-match", func(t *trial) {
		t.exec(c, "own", "/data/"+plainFile, "7", "8", "600")
		c = inGroup(t, f, volume.GroupOnMismatch, c)
		looks(t, c, map[string]seen{plainFile: {Mode: unix.S_IFREG | 0o600, UID: 7, GID: 8}})
	}, "group-always")
	s.check(t, "group-mismatch", func(t *trial) {
		t.exec(c, "own", "/data", "0", strconv.Itoa(podGroup), "0755")
		c = inGroup(t, f, volume.GroupOnMismatch, c)
		looks(t, c, map[string]seen{
			"": {Mode: unix.S_IFDIR | 0o2775, GID: podGroup}, plainFile: {Mode: unix.S_IFREG | 0o660, UID: 7, GID: podGroup},
		})
	}, "group-match")
}

// inGroup publishes the volume with a group, for a new sandbox.
func inGroup(t *trial, f *fixture, policy volume.GroupPolicy, before *container) *container {
	f.restartPod(t, before)
	f.vol.published.Group, f.vol.published.GroupPolicy = strconv.Itoa(podGroup), policy
	t.must(f.vol.publish())
	return f.container(t, "main")
}

// looks fails unless the files of the volume are as wanted.
func looks(t *trial, c *container, wanted map[string]seen) {
	for name, file := range wanted {
		path := "/data"
		if name != "" {
			path += "/" + name
		}
		is := asked[map[string]seen](t, c, "look", path)[path]
		is.Dev, is.Ino = 0, 0
		t.must(want(path, is, file))
	}
}

// notGiven fails if a file of the host got the group through a link.
func notGiven(t *trial, path string) {
	var st unix.Stat_t
	t.must(unix.Stat(path, &st))
	if st.Gid == podGroup {
		t.must(fmt.Errorf("the handler followed a link in the volume to %s of the host, and changed its group", path))
	}
}
