//go:build system

package fsops_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const group = 4321

// owned is what a change of group may touch.
type owned struct {
	UID, GID, Mode uint32
}

// files looks at every file of a tree, without following links.
func files(t testing.TB, dir string) map[string]owned {
	t.Helper()
	all := map[string]owned{}
	check.Must(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		all[rel] = owned{st.Uid, st.Gid, st.Mode}
		return err
	}))
	return all
}

// asKubelet tells what kubelet makes of files: the rule, written down a second time.
func asKubelet(before map[string]owned) map[string]owned {
	after := map[string]owned{}
	for path, f := range before {
		f.GID = group
		mask := uint32(0o660)
		switch f.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			mask = 0
		case unix.S_IFDIR:
			mask |= 0o2110
		}
		f.Mode |= mask
		after[path] = f
	}
	return after
}

// plant makes a tree with whatever a workload may have; outside is where links point to that must stay untouched.
func plant(t testing.TB, dir, outside string) {
	t.Helper()
	file := func(path string, mode os.FileMode) {
		check.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, path)), 0o755))
		check.Must(t, os.WriteFile(filepath.Join(dir, path), []byte(path), 0o600))
		check.Must(t, os.Chmod(filepath.Join(dir, path), mode))
	}
	in := func(path string) string { return filepath.Join(dir, path) }
	file("plain", 0o600)
	file("none", 0)
	file("setuid", 0o755|os.ModeSetuid)
	file("setgid", 0o755|os.ModeSetgid)
	file("both", 0o711|os.ModeSetuid|os.ModeSetgid)
	file("sticky", 0o644|os.ModeSticky)
	file("a name\nwith a line", 0o640)
	file(" \x01\xff\xfe", 0o640)
	file(strings.Repeat("n", 255), 0o640)
	file("a/b/c/d/e", 0o444)
	file("mine", 0o640)
	check.Must(t, os.Lchown(in("mine"), 77, 88))
	check.Must(t, os.Link(in("plain"), in("a/hard")))
	check.Must(t, unix.Mkfifo(in("fifo"), 0o600))
	check.Must(t, unix.Mknod(in("null"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	check.Must(t, unix.Mknod(in("socket"), unix.S_IFSOCK|0o600, 0))
	check.Must(t, os.Mkdir(in("closed"), 0))
	file("closed/inside", 0o600)
	check.Must(t, os.Chmod(in("closed"), 0))
	check.Must(t, os.Mkdir(in("tmp"), 0o777|os.ModeSticky))
	check.Must(t, os.Chmod(in("tmp"), 0o777|os.ModeSticky))
	for name, to := range map[string]string{
		"out": outside, "outfile": outside + "/secret", "up": "../../../../../../etc", "dangling": "nowhere",
		"loop": "loop", "inner": "a/b", "proc": "/proc/self/root",
	} {
		check.Must(t, os.Symlink(to, in("a/"+name)))
	}
}

func outside(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	check.Must(t, os.WriteFile(filepath.Join(dir, "secret"), nil, 0o600))
	return dir
}

func TestGroupIsGivenAsKubeletDoes(t *testing.T) {
	for _, kind := range filesystems {
		t.Run(kind, func(t *testing.T) {
			f := newFilesystem(t, kind, size)
			other := outside(t)
			plant(t, f.dir, other)
			if kind == "btrfs" {
				rig.Command(t, "btrfs", "subvolume", "create", f.dir+"/subvolume")
				check.Must(t, os.WriteFile(f.dir+"/subvolume/file", nil, 0o600))
			}
			before, untouched := files(t, f.dir), files(t, other)
			changed := check.Value(fsops.ApplyGroup(t.Context(), f.root, group, volume.GroupOnMismatch))(t)
			// A hard link is one file of two names.
			check.That(t, changed == len(before)-1, "%d of %d files were changed", changed, len(before)-1)
			check.Same(t, cmp.Diff(asKubelet(before), files(t, f.dir)), "not as kubelet does (-want +got)")
			check.Same(t, cmp.Diff(untouched, files(t, other)), "files outside have changed")
			for _, policy := range []volume.GroupPolicy{volume.GroupOnMismatch, volume.GroupAlways} {
				changed, err := fsops.ApplyGroup(t.Context(), f.root, group, policy)
				check.That(t, err == nil && changed == 0, "%s, again: %d changed: %v", policy, changed, err)
			}
		})
	}
}

func TestPoliciesOfAGroup(t *testing.T) {
	f := newFilesystem(t, "ext4", 64*mib)
	file := filepath.Join(f.dir, "file")
	apply := func(policy volume.GroupPolicy) (gid uint32) {
		check.Must(t, os.WriteFile(file, nil, 0o600))
		check.Must(t, os.Lchown(file, 0, 0))
		check.Must(t, check.Err(fsops.ApplyGroup(t.Context(), f.root, group, policy)))
		return files(t, f.dir)["file"].GID
	}
	check.That(t, apply(volume.GroupOnMismatch) == group, "the root does not match, and the file was not changed")
	check.That(t, apply(volume.GroupOnMismatch) != group, "the root matches, and the file was changed")
	check.That(t, apply(volume.GroupAlways) == group, "Always did not change the file")
	for what, spoil := range map[string]func() error{
		"group":       func() error { return os.Lchown(f.dir, 0, group+1) },
		"setgid":      func() error { return unix.Chmod(f.dir, 0o770) },
		"permissions": func() error { return unix.Chmod(f.dir, 0o2750) },
	} {
		check.Must(t, spoil())
		check.That(t, apply(volume.GroupOnMismatch) == group, "the %s of the root did not match, and the file was not changed", what)
	}
}

func TestHugeDirectoryAndDeepTree(t *testing.T) {
	f := newFilesystem(t, "xfs", size)
	deep := openFD(t, f.dir, unix.O_DIRECTORY)
	for range 3000 { // far beyond PATH_MAX
		check.Must(t, unix.Mkdirat(deep, "deeper", 0o700))
		check.Must(t, unix.Mkdirat(deep, "beside", 0o700))
		next := check.Value(unix.Openat(deep, "deeper", unix.O_DIRECTORY|unix.O_CLOEXEC, 0))(t)
		_ = unix.Close(deep)
		deep = next
	}
	defer func() { _ = unix.Close(deep) }()
	check.Must(t, os.Mkdir(filepath.Join(f.dir, "huge"), 0o700))
	for i := range 20000 {
		check.Must(t, unix.Mknod(filepath.Join(f.dir, "huge", "f"+strconv.Itoa(i)), unix.S_IFREG|0o600, 0))
	}
	check.Must(t, limitFiles(t, 200))
	changed, err := fsops.ApplyGroup(t.Context(), f.root, group, volume.GroupAlways)
	check.That(t, err == nil && changed == 2*3000+20000+2, "%d changed: %v", changed, err)
	var st unix.Stat_t
	check.Must(t, unix.Fstat(deep, &st))
	check.That(t, st.Gid == group && st.Mode&0o7777 == 0o2770, "the deepest directory has group %d and mode %o", st.Gid, st.Mode)
}

// limitFiles bounds the open files of this process until the test ends.
func limitFiles(t testing.TB, most uint64) error {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		return err
	}
	t.Cleanup(func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &was) })
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: most, Max: was.Max})
}

func TestGroupCrossesNoMount(t *testing.T) {
	f := newFilesystem(t, "ext4", 64*mib)
	other := newFilesystem(t, "ext4", 64*mib)
	check.Must(t, os.WriteFile(filepath.Join(other.dir, "file"), nil, 0o600))
	check.Must(t, os.Mkdir(filepath.Join(f.dir, "mnt"), 0o755))
	check.Must(t, os.WriteFile(filepath.Join(f.dir, "bound"), nil, 0o600))
	check.Must(t, unix.Mount(other.dir, filepath.Join(f.dir, "mnt"), "", unix.MS_BIND, ""))
	check.Must(t, unix.Mount(filepath.Join(other.dir, "file"), filepath.Join(f.dir, "bound"), "", unix.MS_BIND, ""))
	before := files(t, other.dir)
	check.Must(t, check.Err(fsops.ApplyGroup(t.Context(), f.root, group, volume.GroupAlways)))
	check.Same(t, cmp.Diff(before, files(t, other.dir)), "files of another mount have changed")
}

func TestFileThatNobodyMayChange(t *testing.T) {
	f := newFilesystem(t, "ext4", 64*mib)
	fixed := filepath.Join(f.dir, "fixed")
	check.Must(t, os.WriteFile(fixed, nil, 0o600))
	fd := openFD(t, fixed, unix.O_RDONLY)
	check.Must(t, unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, 0x10))
	_, err := fsops.ApplyGroup(t.Context(), f.root, group, volume.GroupAlways)
	check.That(t, err == nil, "%v", err)
	all := files(t, f.dir)
	check.That(t, all["fixed"].GID != group && all["."].GID == group, "%+v", all)
}

func TestGroupOnAReadOnlyFilesystem(t *testing.T) {
	f := newFilesystem(t, "ext4", 64*mib)
	check.Must(t, os.WriteFile(filepath.Join(f.dir, "file"), nil, 0o600))
	check.Must(t, unix.Mount("", f.dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	changed, err := fsops.ApplyGroup(t.Context(), f.root, group, volume.GroupOnMismatch)
	check.That(t, errors.Is(err, unix.EROFS) && changed == 0, "%d changed: %v", changed, err)
}

// TestWorkloadMovesFilesMeanwhile: another pod may have the volume already.
func TestWorkloadMovesFilesMeanwhile(t *testing.T) {
	f := newFilesystem(t, "xfs", size)
	other := outside(t)
	before := files(t, other)
	in := func(path string) string { return filepath.Join(f.dir, path) }
	for i := range 200 {
		check.Must(t, os.MkdirAll(in(fmt.Sprintf("d%d/sub/sub", i)), 0o755))
	}
	var busy sync.WaitGroup
	done := make(chan struct{})
	busy.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
			}
			dir := in(fmt.Sprintf("d%d", i%200))
			_ = os.Rename(dir+"/sub", dir+"/away")
			_ = os.Symlink(other, dir+"/sub")
			_ = os.Remove(dir + "/sub")
			_ = os.Rename(dir+"/away", dir+"/sub")
		}
	})
	for range 50 {
		_, err := fsops.ApplyGroup(t.Context(), f.root, group, volume.GroupAlways)
		check.That(t, err == nil || errors.Is(err, fsops.ErrChanged), "%v", err)
		_, _ = fsops.ApplyGroup(t.Context(), f.root, group+1, volume.GroupAlways)
	}
	close(done)
	busy.Wait()
	check.Same(t, cmp.Diff(before, files(t, other)), "files outside have changed")
}

// TestKilledInTheMiddle: OnRootMismatch does again what was cut off. On a busy machine a
// kill can come too early, and the next one too late.
func TestKilledInTheMiddle(t *testing.T) {
	f := newFilesystem(t, "ext4", 256*mib)
	cuts := 0
	for try := 0; cuts == 0 && try < 10; try++ {
		cuts = f.killInTheMiddle(fmt.Sprintf("%s/try-%d", f.dir, try))
	}
	check.That(t, cuts != 0, "no kill hit the middle")
}

// TestKilledOnTheWayToAnotherGroup: OnRootMismatch of the group that the files had before
// does not take a tree for its own that is half another group's.
func TestKilledOnTheWayToAnotherGroup(t *testing.T) {
	f := newFilesystem(t, "ext4", 64*mib)
	file := filepath.Join(f.dir, "file")
	check.Must(t, os.WriteFile(file, nil, 0o600))
	apply := func(gid uint32) error {
		_, err := fsops.ApplyGroup(t.Context(), f.root, gid, volume.GroupOnMismatch)
		return err
	}
	check.Must(t, apply(group))
	// Whatever ends the walk leaves the root directory for the end.
	check.Must(t, limitFiles(t, uint64(len(rig.FDs(t, os.Getpid()))+1)))
	err := apply(group + 1)
	check.Require(t, errors.Is(err, unix.EMFILE), "not cut off: %v", err)
	check.Must(t, limitFiles(t, 1000))
	check.Must(t, os.Lchown(file, 0, group+1)) // as far as it got
	check.Must(t, apply(group))
	all := files(t, f.dir)
	check.That(t, all["file"].GID == group && all["."] == (owned{0, group, unix.S_IFDIR | 0o2775}), "after the way back: %+v", all)
}

// TestReadOnlySubvolume: a workload can make one, and nobody can change what is in it.
func TestReadOnlySubvolume(t *testing.T) {
	f := newFilesystem(t, "btrfs", size)
	rig.Command(t, "btrfs", "subvolume", "create", f.dir+"/sub")
	check.Must(t, os.WriteFile(f.dir+"/sub/file", nil, 0o600))
	rig.Command(t, "btrfs", "subvolume", "snapshot", "-r", f.dir+"/sub", f.dir+"/snapshot")
	check.Must(t, check.Err(fsops.ApplyGroup(t.Context(), f.root, group, volume.GroupAlways)))
	all := files(t, f.dir)
	check.That(t, all["sub/file"].GID == group && all["snapshot/file"].GID != group && all["."].GID == group, "%+v", all)
	check.Must(t, unix.Mount("", f.dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	check.Is(t, check.Err(fsops.ApplyGroup(t.Context(), f.root, group+1, volume.GroupAlways)), unix.EROFS) // a btrfs that is read-only
}

// killInTheMiddle kills what gives a new directory to the group, and counts how often it was in the middle of it.
func (f *filesystem) killInTheMiddle(dir string) (cuts int) {
	t := f.t
	t.Helper()
	check.Must(t, os.Mkdir(dir, 0o755))
	for i := range 5000 {
		check.Must(t, unix.Mknod(filepath.Join(dir, "f"+strconv.Itoa(i)), unix.S_IFREG|0o600, 0))
	}
	before := files(t, dir)
	for wait := 2 * time.Millisecond; cuts < 5; wait += 2 * time.Millisecond {
		worker := again(t, "group", dir)
		time.Sleep(wait)
		_ = worker.Process.Kill()
		err := worker.Wait()
		status, ok := worker.ProcessState.Sys().(syscall.WaitStatus)
		check.Require(t, err == nil || ok && status.Signaled(), "it failed: %v", err)
		now := files(t, dir)
		if now["."].GID == group {
			break // it had ended
		}
		if !cmp.Equal(before, now) {
			cuts++
		}
	}
	check.Must(t, check.Err(fsops.ApplyGroup(t.Context(), openFD(t, dir, unix.O_PATH), group, volume.GroupOnMismatch)))
	check.Same(t, cmp.Diff(asKubelet(before), files(t, dir)), "not as kubelet does (-want +got)")
	return cuts
}
