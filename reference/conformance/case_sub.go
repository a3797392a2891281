package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// subCase mounts sub-directories of a volume in containers.
type subCase struct{ f *fixture }

func runSub(ctx context.Context, s *suite) error {
	f, err := newFixture(ctx, s.node, s.node.podUID())
	if err != nil {
		return err
	}
	t := &subCase{f: f}
	var main *container
	s.check(ctx, "sub-bound", func(ctx context.Context) (err error) {
		main, err = t.plantSubs(ctx)
		if err == nil {
			err = t.showsBound(ctx, "logs")
		}
		return err
	}, "mount-inside")
	s.check(ctx, "sub-names", func(ctx context.Context) error { return t.showsBound(ctx, oddName) }, "sub-bound")
	s.check(ctx, "sub-path", func(ctx context.Context) error {
		if err := os.MkdirAll(filepath.Join(t.f.vol.target, "logs"), 0o750); err != nil {
			return err
		}
		return t.shows(ctx, filepath.Join(t.f.vol.target, "logs"), "logs")
	}, "sub-bound")
	s.check(ctx, "sub-made", func(ctx context.Context) error { return t.makesSub(ctx, main) }, "sub-bound")
	s.check(ctx, "sub-link", func(ctx context.Context) error {
		return errors.Join(t.f.refusesSub(ctx, "out"), t.f.refusesSub(ctx, "out/proc"))
	}, "sub-bound")
	s.check(ctx, "sub-file", func(ctx context.Context) error { return t.f.refusesSub(ctx, "plain-file") }, "sub-bound")
	s.check(ctx, "sub-race", func(ctx context.Context) error { return t.racesSub(ctx, main) }, "sub-bound")
	s.check(ctx, "sub-deleted", func(ctx context.Context) error { return t.refusesDeleted(ctx) }, "sub-bound")
	return nil
}

// oddName has characters that mountinfo escapes.
const oddName = "a b\\c\td"

// plantSubs fills the volume from a container that has all of it.
func (t *subCase) plantSubs(ctx context.Context) (*container, error) {
	main, err := t.f.container(ctx, "main")
	if err != nil {
		return nil, err
	}
	for _, words := range [][]string{
		{"own", "/data", "0", "0", "0751"},
		{"mkdir", "/data/logs"},
		{"write", "/data/logs/here", "logs"},
		{"mkdir", "/data/" + oddName},
		{"write", "/data/" + oddName + "/here", oddName},
		{"link", "/data/out", "../../../.."},
		{"write", "/data/plain-file", "file"},
	} {
		if _, err := main.exec(ctx, words...); err != nil {
			return nil, err
		}
	}
	return main, nil
}

// shows fails unless a container that mounts source sees only the sub-directory.
func (t *subCase) shows(ctx context.Context, source, content string) error {
	c, err := t.f.pod.container(ctx, "sub", bind{source: source, at: "/data"})
	if err != nil {
		return err
	}
	found, err := ask[[]string](ctx, c, "names", "/data")
	if err != nil {
		return err
	}
	if !slices.Equal(found, []string{"here"}) {
		return fmt.Errorf("the container sees %q in the sub-directory and should see \"here\" alone", found)
	}
	return c.wantText(ctx, "/data/here", "what is in the sub-directory", content)
}

func (t *subCase) showsBound(ctx context.Context, sub string) error {
	place, err := t.f.vol.bindSub(sub)
	if err != nil {
		return err
	}
	return t.shows(ctx, place, sub)
}

// makesSub mounts a sub-directory that exists only in the guard.
func (t *subCase) makesSub(ctx context.Context, main *container) error {
	place, err := t.f.vol.bindSub("new/deep")
	if err != nil {
		return err
	}
	c, err := t.f.pod.container(ctx, "sub", bind{source: place, at: "/data"})
	if err != nil {
		return err
	}
	if _, err := c.exec(ctx, "write", "/data/here", "new"); err != nil {
		return err
	}
	if err := main.wantText(ctx, "/data/new/deep/here", "what was written into the new sub-directory", "new"); err != nil {
		return err
	}
	found, err := ask[map[string]seen](ctx, main, "look", "/data/new", "/data/new/deep")
	if err != nil {
		return err
	}
	for path, is := range found {
		if is.UID != 0 || is.Mode&0o7777 != 0o751 {
			return fmt.Errorf("%s was made %v and should be root's with mode 751", path, is)
		}
	}
	return nil
}

// refusesDeleted binds a sub-directory and removes it.
func (t *subCase) refusesDeleted(ctx context.Context) error {
	place, err := t.f.vol.bindSub("short-lived")
	if err != nil {
		return err
	}
	if err := unix.Rmdir(filepath.Join(t.f.vol.target, "short-lived")); err != nil {
		return err
	}
	return t.f.pod.refuses(ctx, bind{source: place, at: "/data"})
}

// racesSub mounts a directory while the workload swaps it for a link.
func (t *subCase) racesSub(ctx context.Context, main *container) error {
	if err := main.execAll(ctx, []string{"mkdir", "/data/swapped"}, []string{"write", "/data/swapped/here", "inside"}); err != nil {
		return err
	}
	place, err := t.f.vol.bindSub("swapped")
	if err != nil {
		return err
	}
	swapper := startProbe(ctx, main, "swap", "/data/swapped")
	for end := time.Now().Add(swapTime); time.Now().Before(end) && err == nil; {
		err = t.showsInside(ctx, place)
	}
	return errors.Join(err, swapper.ends(ctx, swapTime+lateBy))
}

// showsInside fails if a container sees something outside of the volume.
func (t *subCase) showsInside(ctx context.Context, place string) error {
	c := newContainer(t.f.pod.n, "race")
	ended, err := c.create(ctx, t.f.pod.containerSpec("race", []bind{{source: place, at: "/data"}}))
	if err != nil || ended.code != 0 {
		return err
	}
	if _, err := c.n.handler.must(ctx, "start", c.id); err != nil {
		return err
	}
	found, err := ask[[]string](ctx, c, "names", "/data")
	if err == nil && !slices.Equal(found, []string{"here"}) {
		err = fmt.Errorf("the container sees %q, which is not in the directory", found)
	}
	return err
}
