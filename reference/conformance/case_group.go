package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// podGroup is the fsGroup.
const podGroup = 4242

// groupCase publishes a volume with an fsGroup, by both policies.
type groupCase struct{ f *fixture }

func runGroup(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	t := &groupCase{f: f}
	canary := s.node.path("canary")
	if err := os.WriteFile(canary, nil, 0o600); err != nil {
		return err
	}
	var c *container
	s.check(ctx, "group-always", func(ctx context.Context) (err error) {
		if c, err = t.f.container(ctx, "main"); err != nil {
			return err
		}
		if err := c.execAll(ctx, []string{"tree", "/data"}, []string{"link", "/data/" + linkFile, canary}, []string{"fix", "/data/" + fixedFile}); err != nil {
			return err
		}
		if c, err = t.inGroup(ctx, volume.GroupAlways, c); err != nil {
			return err
		}
		return t.looks(ctx, c, map[string]seen{
			"": {Mode: unix.S_IFDIR | 0o2775, GID: podGroup}, plainFile: {Mode: unix.S_IFREG | 0o660, GID: podGroup},
			directory: {Mode: unix.S_IFDIR | 0o2770, GID: podGroup}, innerFile: {Mode: unix.S_IFREG | 0o664, GID: podGroup},
		})
	}, "mount-inside")
	s.check(ctx, "group-setid", func(ctx context.Context) error {
		return t.looks(ctx, c, map[string]seen{setIDFile: {Mode: unix.S_IFREG | 0o4775, GID: podGroup}})
	}, "group-always")
	s.check(ctx, "group-link", func(ctx context.Context) error {
		return errors.Join(notGiven(canary), t.looks(ctx, c, map[string]seen{linkFile: {Mode: unix.S_IFLNK | 0o777, GID: podGroup}}))
	}, "group-always")
	s.check(ctx, "group-fixed", func(ctx context.Context) error {
		return t.looks(ctx, c, map[string]seen{fixedFile: {Mode: unix.S_IFREG | 0o600}})
	}, "group-always")
	odd := map[string]seen{plainFile: {Mode: unix.S_IFREG | 0o600, UID: 7, GID: 8}}
	s.check(ctx, "group-match", func(ctx context.Context) (err error) {
		if _, err := c.exec(ctx, "own", "/data/"+plainFile, "7", "8", "600"); err != nil {
			return err
		}
		if c, err = t.inGroup(ctx, volume.GroupOnMismatch, c); err != nil {
			return err
		}
		return t.looks(ctx, c, odd)
	}, "group-always")
	s.check(ctx, "group-mismatch", func(ctx context.Context) (err error) {
		if _, err := c.exec(ctx, "own", "/data", "0", strconv.Itoa(podGroup), "0755"); err != nil {
			return err
		}
		if c, err = t.inGroup(ctx, volume.GroupOnMismatch, c); err != nil {
			return err
		}
		return t.looks(ctx, c, map[string]seen{
			"": {Mode: unix.S_IFDIR | 0o2775, GID: podGroup}, plainFile: {Mode: unix.S_IFREG | 0o660, UID: 7, GID: podGroup},
		})
	}, "group-match")
	return nil
}

// inGroup publishes the volume with a group, for a new sandbox.
func (t *groupCase) inGroup(ctx context.Context, policy volume.GroupPolicy, before *container) (*container, error) {
	if err := t.f.restartPod(ctx, before); err != nil {
		return nil, err
	}
	t.f.vol.published.Group, t.f.vol.published.GroupPolicy = strconv.Itoa(podGroup), policy
	if err := t.f.vol.publish(); err != nil {
		return nil, err
	}
	return t.f.container(ctx, "main")
}

// looks compares files of the volume.
func (t *groupCase) looks(ctx context.Context, c *container, wanted map[string]seen) error {
	for name, file := range wanted {
		path := "/data"
		if name != "" {
			path += "/" + name
		}
		found, err := ask[map[string]seen](ctx, c, "look", path)
		if err != nil {
			return err
		}
		is := found[path]
		is.Dev, is.Ino = 0, 0
		if err := want(path, is, file); err != nil {
			return err
		}
	}
	return nil
}

// notGiven fails if a file of the host got the group through a link.
func notGiven(path string) error {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return err
	}
	if st.Gid == podGroup {
		return fmt.Errorf("the handler followed a link in the volume to %s of the host, and changed its group", path)
	}
	return nil
}
