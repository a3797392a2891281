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

// sub shows sub-directories of a volume, however they come about.
func (s *suite) sub(ctx context.Context) error {
	st, err := s.set(ctx)
	if err != nil {
		return err
	}
	var main *container
	s.check(ctx, "sub-bound", func(ctx context.Context) (err error) {
		main, err = st.plantSubs(ctx)
		if err == nil {
			err = st.showsBound(ctx, "logs")
		}
		return err
	}, "mount-inside")
	s.check(ctx, "sub-names", func(ctx context.Context) error { return st.showsBound(ctx, oddName) }, "sub-bound")
	s.check(ctx, "sub-path", func(ctx context.Context) error {
		if err := os.MkdirAll(filepath.Join(st.vol.target, "logs"), 0o750); err != nil {
			return err
		}
		return st.shows(ctx, filepath.Join(st.vol.target, "logs"), "logs")
	}, "sub-bound")
	s.check(ctx, "sub-made", func(ctx context.Context) error { return st.makesSub(ctx, main) }, "sub-bound")
	s.check(ctx, "sub-link", func(ctx context.Context) error {
		return errors.Join(st.refusesSub(ctx, "out"), st.refusesSub(ctx, "out/proc"))
	}, "sub-bound")
	s.check(ctx, "sub-file", func(ctx context.Context) error { return st.refusesSub(ctx, "plain-file") }, "sub-bound")
	s.check(ctx, "sub-race", func(ctx context.Context) error { return st.racesSub(ctx, main) }, "sub-bound")
	s.check(ctx, "sub-deleted", func(ctx context.Context) error { return st.refusesDeleted(ctx) }, "sub-bound")
	return nil
}

// oddName has what mountinfo escapes.
const oddName = "a b\\c\td"

// plantSubs fills the volume, by a container that has all of it.
func (st *stage) plantSubs(ctx context.Context) (*container, error) {
	main, err := st.pod.container(ctx, "main", all(st.vol))
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

// shows fails unless a container that mounts source sees the sub-directory.
func (st *stage) shows(ctx context.Context, source, content string) error {
	c, err := st.pod.container(ctx, "sub", bind{source: source, at: "/data"})
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
	text, err := c.exec(ctx, "read", "/data/here")
	if err != nil {
		return err
	}
	return want("what is in the sub-directory", text, content)
}

func (st *stage) showsBound(ctx context.Context, sub string) error {
	place, err := st.vol.bindSub(sub)
	if err != nil {
		return err
	}
	return st.shows(ctx, place, sub)
}

// makesSub shows a sub-directory that is in the guard only.
func (st *stage) makesSub(ctx context.Context, main *container) error {
	place, err := st.vol.bindSub("new/deep")
	if err != nil {
		return err
	}
	c, err := st.pod.container(ctx, "sub", bind{source: place, at: "/data"})
	if err != nil {
		return err
	}
	if _, err := c.exec(ctx, "write", "/data/here", "new"); err != nil {
		return err
	}
	text, err := main.exec(ctx, "read", "/data/new/deep/here")
	if err != nil {
		return err
	}
	if err := want("what was written into the new sub-directory", text, "new"); err != nil {
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

func (st *stage) refusesSub(ctx context.Context, sub string) error {
	place, err := st.vol.bindSub(sub)
	if err != nil {
		return err
	}
	if err := st.pod.refuses(ctx, bind{source: place, at: "/data"}); err != nil {
		return fmt.Errorf("the sub-directory %q: %w", sub, err)
	}
	return nil
}

// refusesDeleted binds a sub-directory that then goes.
func (st *stage) refusesDeleted(ctx context.Context) error {
	place, err := st.vol.bindSub("short-lived")
	if err != nil {
		return err
	}
	if err := unix.Rmdir(filepath.Join(st.vol.target, "short-lived")); err != nil {
		return err
	}
	return st.pod.refuses(ctx, bind{source: place, at: "/data"})
}

// racesSub has the workload swap a directory for a link while it is shown.
func (st *stage) racesSub(ctx context.Context, main *container) error {
	for _, words := range [][]string{{"mkdir", "/data/swapped"}, {"write", "/data/swapped/here", "inside"}} {
		if _, err := main.exec(ctx, words...); err != nil {
			return err
		}
	}
	place, err := st.vol.bindSub("swapped")
	if err != nil {
		return err
	}
	swapper := main.aside(ctx, "swap", "/data/swapped")
	for end := time.Now().Add(swapTime); time.Now().Before(end) && err == nil; {
		err = st.showsInside(ctx, place)
	}
	return errors.Join(err, swapper.ends(ctx, swapTime+lateBy))
}

// showsInside fails where a container sees what lies outside of the volume.
func (st *stage) showsInside(ctx context.Context, place string) error {
	c := &container{n: st.pod.n, id: st.pod.n.id("race")}
	ended, err := c.create(ctx, st.pod.containerSpec("race", []bind{{source: place, at: "/data"}}))
	if err != nil || ended.code != 0 {
		return err
	}
	if _, err := c.n.must(ctx, "start", c.id); err != nil {
		return err
	}
	found, err := ask[[]string](ctx, c, "names", "/data")
	if err == nil && !slices.Equal(found, []string{"here"}) {
		err = fmt.Errorf("the container sees %q, which is not in the directory", found)
	}
	return err
}
