package conformance

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// runSub mounts sub-directories of a volume in containers.
func runSub(t *trial, s *suite) {
	f := newFixture(t, s.node, s.node.podUID())
	var main *container
	s.check(t, "sub-bound", func(t *trial) {
		main = plantSubs(t, f)
		shows(t, f, f.vol.bindSub(t, "logs"), "logs")
	}, "mount-inside")
	s.check(t, "sub-names", func(t *trial) { shows(t, f, f.vol.bindSub(t, oddName), oddName) }, "sub-bound")
	s.check(t, "sub-path", func(t *trial) {
		t.must(os.MkdirAll(filepath.Join(f.vol.target, "logs"), 0o750))
		shows(t, f, filepath.Join(f.vol.target, "logs"), "logs")
	}, "sub-bound")
	s.check(t, "sub-made", func(t *trial) { makesSub(t, f, main) }, "sub-bound")
	s.check(t, "sub-link", func(t *trial) {
		f.refusesSub(t, "out")
		f.refusesSub(t, "out/proc")
	}, "sub-bound")
	s.check(t, "sub-file", func(t *trial) { f.refusesSub(t, "plain-file") }, "sub-bound")
	s.check(t, "sub-race", func(t *trial) { racesSub(t, f, main) }, "sub-bound")
	s.check(t, "sub-deleted", func(t *trial) { refusesDeleted(t, f) }, "sub-bound")
}

// oddName has characters that mountinfo escapes.
const oddName = "a b\\c\td"

// plantSubs fills the volume from a container that has all of it.
func plantSubs(t *trial, f *fixture) *container {
	main := f.container(t, "main")
	for _, words := range [][]string{
		{"own", "/data", "0", "0", "0751"},
		{"mkdir", "/data/logs"},
		{"write", "/data/logs/here", "logs"},
		{"mkdir", "/data/" + oddName},
		{"write", "/data/" + oddName + "/here", oddName},
		{"link", "/data/out", "../../../.."},
		{"write", "/data/plain-file", "file"},
	} {
		t.exec(main, words...)
	}
	return main
}

// shows fails unless a container that mounts source sees only the sub-directory.
func shows(t *trial, f *fixture, source, content string) {
	c := t.container(f.pod, "sub", bind{source: source, at: "/data"})
	if found := asked[[]string](t, c, "names", "/data"); !slices.Equal(found, []string{"here"}) {
		t.must(fmt.Errorf("the container sees %q in the sub-directory and should see \"here\" alone", found))
	}
	t.wantText(c, "/data/here", "what is in the sub-directory", content)
}

// makesSub mounts a sub-directory that exists only in the guard.
func makesSub(t *trial, f *fixture, main *container) {
	c := t.container(f.pod, "sub", bind{source: f.vol.bindSub(t, "new/deep"), at: "/data"})
	t.exec(c, "write", "/data/here", "new")
	t.wantText(main, "/data/new/deep/here", "what was written into the new sub-directory", "new")
	for path, is := range asked[map[string]seen](t, main, "look", "/data/new", "/data/new/deep") {
		if is.UID != 0 || is.Mode&0o7777 != 0o751 {
			t.must(fmt.Errorf("%s was made %v and should be root's with mode 751", path, is))
		}
	}
}

// refusesDeleted binds a sub-directory and removes it.
func refusesDeleted(t *trial, f *fixture) {
	place := f.vol.bindSub(t, "short-lived")
	t.must(unix.Rmdir(filepath.Join(f.vol.target, "short-lived")))
	f.pod.refuses(t, bind{source: place, at: "/data"})
}

// racesSub mounts a directory while the workload swaps it for a link.
func racesSub(t *trial, f *fixture, main *container) {
	t.exec(main, "mkdir", "/data/swapped")
	t.exec(main, "write", "/data/swapped/here", "inside")
	place := f.vol.bindSub(t, "swapped")
	swapper := startProbe(t.ctx, main, "swap", "/data/swapped")
	err := try(t.ctx, func(t *trial) {
		for end := time.Now().Add(swapTime); time.Now().Before(end); {
			showsInside(t, f, place)
		}
	})
	t.must(errors.Join(err, swapper.ends(t.ctx, handlerTimeout)))
}

// showsInside fails if a container sees something outside of the volume.
func showsInside(t *trial, f *fixture, place string) {
	c := newContainer(f.pod.n, "race")
	if !c.startsUnlessRefused(t, f.pod.containerSpec("race", []bind{{source: place, at: "/data"}})) {
		return
	}
	if found := asked[[]string](t, c, "names", "/data"); !slices.Equal(found, []string{"here"}) {
		t.must(fmt.Errorf("the container sees %q, which is not in the directory", found))
	}
}
