package conformance

import (
	"errors"
	"fmt"
	"strconv"
)

// runReadOnly makes one mount read-only, and then the whole volume.
func runReadOnly(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var writer, reader, recursive, c *container
	s.check(t, "ro-mount", func(t *trial) {
		writer = f.container(t, "writer")
		reader = t.container(f.pod, "reader", bind{source: f.vol.target, at: "/data", mode: "ro"})
		seesFilesystem(t, writer)
		reads(t, reader, "greeting", "hello")
	}, "mount-inside")
	s.check(t, "ro-recursive", func(t *trial) {
		recursive = t.container(f.pod, "recursive", bind{source: f.vol.target, at: "/data", mode: "rro"})
		reads(t, recursive, "greeting", "hello")
	}, "ro-mount")
	s.check(t, "ro-volume", func(t *trial) {
		f.restartPod(t, writer, reader, recursive)
		t.must(f.disk.setReadOnly(true))
		f.vol.published.ReadOnly, f.vol.published.Group = true, strconv.Itoa(podGroup)
		t.must(f.vol.publish())
		c = f.container(t, "main")
		reads(t, c, "greeting", "hello")
	}, "ro-recursive")
	s.check(t, "ro-group", func(t *trial) {
		for path, is := range asked[map[string]seen](t, c, "look", "/data", "/data/greeting") {
			if is.GID == podGroup {
				t.must(fmt.Errorf("%s of the read-only volume is %v", path, is))
			}
		}
	}, "ro-volume")
	s.check(t, "ro-sub", func(t *trial) { f.refusesSub(t, "missing") }, "ro-volume")
}

// reads fails unless the container can read the file and cannot write to it.
func reads(t *trial, c *container, name, content string) {
	t.wantText(c, "/data/"+name, "what it reads", content)
	if _, err := c.exec(t.ctx, "write", "/data/"+name, "more"); err == nil {
		t.must(errors.New("the container can write where it may only read"))
	}
}
