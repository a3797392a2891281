package tree_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// notes is a follower that writes down what it is told.
type notes struct {
	mu   sync.Mutex
	said []string
}

func (n *notes) note(s string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.said = append(n.said, s)
}

func (n *notes) Scan()               { n.note("scan") }
func (n *notes) DirAdded(dir string) { n.note("added " + dir) }
func (n *notes) FileWritten(key volume.Key, name string) {
	n.note("written " + string(key) + " " + name)
}
func (n *notes) DirRemoved(key volume.Key) { n.note("removed " + string(key)) }

func (n *notes) count(s string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(slices.DeleteFunc(slices.Clone(n.said), func(one string) bool { return one != s }))
}

// watched is a tree in a fresh directory with a watch that runs.
func watched(t *testing.T) (*tree.Tree, *tree.Watch, *notes) {
	t.Helper()
	dir, told := t.TempDir(), &notes{}
	opened, err := tree.Open(tree.Config{
		Name: "test", Root: filepath.Join(dir, "root"), Temp: filepath.Join(dir, "tmp"), File: "info", Log: zap.NewNop(),
	})
	check.Must(t, err)
	w := tree.NewWatch(opened, told)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() { cancel(); check.Must(t, <-done) })
	check.Eventually(t, "watching", w.Watching)
	return opened, w, told
}

func publish(t *testing.T, opened *tree.Tree, w *tree.Watch, name, content string) *volume.Volume {
	t.Helper()
	v := &volume.Volume{Key: volume.Key(name), Target: "/" + name}
	_, err := opened.Publish(&tree.Projection{
		Volume: v, Dir: name, Raw: []byte(content),
		Built: func(path string) { check.Must(t, w.Add(v.Key, path, tree.OwnedByUs)) },
	})
	check.Must(t, err)
	return v
}

func TestWatchTells(t *testing.T) {
	opened, w, told := watched(t)
	v := publish(t, opened, w, "one", "1")
	check.Must(t, os.WriteFile(opened.Path("one")+"/.temp", nil, 0o600))
	check.Must(t, os.Rename(opened.Path("one")+"/.temp", opened.Path("one")+"/sandbox"))
	check.Eventually(t, "the sandbox shows", func() bool { return told.count("written one sandbox") == 1 })
	check.Must(t, os.Mkdir(opened.Path("foreign"), 0o700))
	check.Eventually(t, "the foreign one shows", func() bool { return told.count("added foreign") == 1 })
	check.Must(t, w.Add("foreign", opened.Path("foreign"), tree.Foreign))
	check.Must(t, os.Rename(opened.Path("foreign"), filepath.Join(opened.Temp, "away")))
	check.Eventually(t, "the foreign one is gone", func() bool { return told.count("removed foreign") == 1 })
	w.Forget(v.Key)
	check.Must(t, opened.Remove(v, "one"))
	if err := w.Add("one", opened.Path("one"), tree.OwnedByUs); !tree.IsGone(err) {
		t.Errorf("a directory that is gone: %v", err)
	}
	check.Eventually(t, "nothing is watched", func() bool { return w.Count() == 0 })
	if told.count("removed one") != 0 {
		t.Error("our own removal was told")
	}
}

// The end of a directory that somebody removed is not that of its successor.
func TestSuccessorIsWatched(t *testing.T) {
	opened, w, told := watched(t)
	for range 50 {
		publish(t, opened, w, "one", "1")
		check.Must(t, os.RemoveAll(opened.Path("one")))
		publish(t, opened, w, "one", "2")
		if !w.Has("one") {
			t.Fatal("the successor is not watched")
		}
		name := "sandbox"
		before := told.count("written one " + name)
		check.Must(t, os.WriteFile(opened.Path("one")+"/"+name, nil, 0o600))
		check.Eventually(t, "its sandbox shows", func() bool { return told.count("written one "+name) == before+1 })
		check.Must(t, os.RemoveAll(opened.Path("one")))
		check.Eventually(t, "it is gone", func() bool { return !w.Has("one") })
	}
}

func TestOverflowAndRootAreReadAgain(t *testing.T) {
	opened, w, told := watched(t)
	scans := told.count("scan")
	w.Event(-1, 0x4000, "") // IN_Q_OVERFLOW
	check.Eventually(t, "the tree is read", func() bool { return told.count("scan") == scans+1 })
	check.Must(t, os.RemoveAll(opened.Root))
	check.Eventually(t, "it is made again, and read", func() bool { return told.count("scan") == scans+2 })
	check.Must(t, os.Mkdir(opened.Path("late"), 0o700))
	check.Eventually(t, "it is watched again", func() bool { return told.count("added late") == 1 })
	check.Must(t, w.Health())
	check.Must(t, opened.Health())
}
