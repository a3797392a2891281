package backup

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestPartOfACompleteFile: a process that was killed in giveName left two names. Nothing is
// written to the file by the old one, wherever it has been moved by the new.
func TestPartOfACompleteFile(t *testing.T) {
	name, moved := t.TempDir()+"/file", t.TempDir()+"/moved"
	check.Must(t, os.WriteFile(moved, []byte("complete"), 0o600))
	check.Must(t, os.Link(moved, name+".part"))
	check.Fails(t, check.Err(openPartial(name)), "also another file")
	check.Must(t, os.Remove(name+".part"))
	check.Must(t, check.Value(openPartial(name))(t).file.Close())
}

// TestNamesInDev: there a file would take the memory of a node, which somebody who names /dev/shm knows.
func TestNamesInDev(t *testing.T) {
	check.Fails(t, check.Err(openPartial("/dev/null")), "no regular file: name another")
	dir, err := os.MkdirTemp("/dev/shm", "")
	check.Needs(t, err == nil, "a directory /dev/shm")
	defer func() { check.Must(t, os.RemoveAll(dir)) }()
	check.Must(t, check.Value(openPartial(dir+"/file"))(t).file.Close())
}

// TestOnlyTheDiskCounts: data that a disk has refused stays in the kernel's cache, and is not reported again.
func TestOnlyTheDiskCounts(t *testing.T) {
	dir := t.TempDir()
	var fs unix.Statfs_t
	if check.Must(t, unix.Statfs(dir, &fs)); fs.Type == unix.TMPFS_MAGIC {
		dir = check.Value(os.MkdirTemp("/var/tmp", ""))(t)
		defer func() { check.Must(t, os.RemoveAll(dir)) }()
	}
	name := dir + "/file"
	cached := func(file *os.File) error {
		return check.Err(unix.Preadv2(int(file.Fd()), [][]byte{make([]byte, 4096)}, 4*mostData, unix.RWF_NOWAIT))
	}
	file := check.Value(os.Create(name + ".part"))(t)
	defer func() { _ = file.Close() }()
	check.Must(t, check.Err(file.Write(make([]byte, 8*mostData))))
	err := errors.Join(file.Sync(), cached(file))
	check.Needs(t, !errors.Is(err, unix.EOPNOTSUPP), "a filesystem whose cache can be observed")
	check.Must(t, err)
	p := check.Value(openPartial(name))(t)
	check.Is(t, cached(file), unix.EAGAIN)
	check.Must(t, p.file.Close())
	check.Must(t, check.Err(io.Copy(io.Discard, io.NewSectionReader(file, 0, 8*mostData))))
	var c chain
	_, _, _ = c.open(file.Name()) // it is no backup
	check.Is(t, cached(file), unix.EAGAIN)
	c.close()
}

// TestPartOfSomebodyElse: in a directory that others can write, they could have made it before.
func TestPartOfSomebodyElse(t *testing.T) {
	for text, place := range map[string]func(part string) error{
		"no regular file":             func(part string) error { return unix.Mkfifo(part, 0o600) },
		"too many levels of symbolic": func(part string) error { return os.Symlink("/dev/null", part) },
		"belongs to user 12345, who":  func(part string) error { return errors.Join(os.WriteFile(part, nil, 0o600), os.Chown(part, 12345, -1)) },
	} {
		name := t.TempDir() + "/file"
		if err := place(name + ".part"); errors.Is(err, unix.EPERM) {
			continue // only root can
		} else if err != nil {
			t.Fatal(err)
		}
		check.Fails(t, check.Err(openPartial(name)), text)
	}
}

// TestAPartIsMadeAsAnotherUser: an export of NFS makes nobody of root. Where that user may not do what comes after the
// rename, the file is complete.
func TestAPartIsMadeAsAnotherUser(t *testing.T) {
	check.NeedsRoot(t)
	t.Chdir(t.TempDir())
	check.Must(t, errors.Join(os.Chown(".", 12345, -1), os.Mkdir("theirs", 0o755), os.WriteFile("theirs/part", nil, 0o600), os.Chown("theirs/part", 12345, -1)))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	check.Must(t, syscall.Setfsuid(12345))
	notRemoved := giveName("theirs/part", "linked", func(string, string) error { return unix.EINVAL })
	p, err := openPartial("file")
	check.Must(t, errors.Join(err, os.Chmod(".", 0o300))) // it cannot be opened, to be synced
	notSynced := p.complete()
	check.Must(t, errors.Join(syscall.Setfsuid(0), p.file.Close()))
	check.Equal(t, incomplete("linked", notRemoved).Error(), "remove theirs/part: permission denied; the file is complete and has its name, linked: remove the other one", "")
	check.Equal(t, incomplete("file", notSynced).Error(), "sync the directory of file: permission denied; the file is complete and has its name, but may lose it in a power failure", "")
}

// TestTheSizeIsKnown of an unfinished increment: nothing is read for it.
func TestTheSizeIsKnown(t *testing.T) {
	c := &copier{backup: &Backup{Base: &Base{size: 1}}, from: io.NewSectionReader(nil, 0, 0), has: 2, begun: true, size: 1}
	check.Must(t, c.unnamed(t.Context(), 0))
}

// TestADeviceThatMayBeOpen is refused, unless this process may not see who has it open.
func TestADeviceThatMayBeOpen(t *testing.T) {
	hangs := errors.New("process 7 hangs")
	check.Fails(t, refusal("/dev/x", openers.Users{}, hangs, nil), "not known", "process 7")
	check.Fails(t, refusal("/dev/x", openers.Users{Names: "process 8"}, nil, nil), "is open in process 8")
	check.Must(t, errors.Join(refusal("/dev/x", openers.Users{}, nil, nil), refusal("/dev/x", openers.Users{}, hangs, errors.New("no hostPID")),
		refusal("/dev/x", openers.Users{}, os.NewSyscallError("bpf", unix.EPERM), nil)))
}

// TestUsersOfADisk are asked for again while they are not known.
func TestUsersOfADisk(t *testing.T) {
	hangs, one, asked := errors.New("process 7 hangs"), []openers.Holder{{PID: 8}}, 0
	no := func() bool { return false }
	names, err := awaitNone(func() ([]openers.Holder, error) { asked++; return nil, map[int]error{1: hangs}[asked] }, no)
	check.That(t, names == "" && err == nil && asked == 2, "in the second try none: %q, %v", names, err)
	always := func() ([]openers.Holder, error) { return nil, hangs }
	check.Is(t, check.Err(awaitNone(always, no)), hangs)
	check.Must(t, check.Err(awaitNone(always, func() bool { return true })))
	names, err = awaitNone(func() ([]openers.Holder, error) { return one, hangs }, no)
	check.That(t, strings.Contains(names, "process 8") && err == nil, "one of them: %q, %v", names, err)
	disk := t.TempDir()
	check.Must(t, errors.Join(os.MkdirAll(disk+"/p1/partition", 0o700), os.WriteFile(disk+"/dev", []byte("4095:7\n"), 0o600)))
	check.Fails(t, check.Err(diskOf(disk+"/p1")), "4095:7, has no node in /dev")
	check.Equal(t, check.Value(diskOf(disk))(t), "", "the disk of a disk")
}

// TestNamesWithoutRename is about filesystems that know no rename which spares a name that is taken, as NFS.
func TestNamesWithoutRename(t *testing.T) {
	part, name := t.TempDir()+"/file.part", t.TempDir()+"/file"
	cannot := func(string, string) error { return unix.EINVAL }
	check.Must(t, os.WriteFile(part, []byte("new"), 0o600))
	check.Must(t, os.WriteFile(name, []byte("old"), 0o600))
	check.Is(t, giveName(part, name, cannot), fs.ErrExist)
	check.Equal(t, string(check.Value(os.ReadFile(name))(t)), "old", "the file that was there before")
	check.Must(t, os.Remove(name))
	check.Must(t, giveName(part, name, cannot))
	check.Equal(t, string(check.Value(os.ReadFile(name))(t)), "new", "the new file")
	check.Is(t, check.Err(os.Lstat(part)), fs.ErrNotExist) // the old name
	p := check.Value(openPartial(part))(t)
	p.name = t.TempDir() + "/nowhere/file"
	err := incomplete(p.name, p.complete())
	check.Must(t, p.file.Close())
	check.That(t, errors.Is(err, fs.ErrNotExist) && strings.Contains(err.Error(), "is complete") && !strings.Contains(err.Error(), "incomplete"), "%v", err)
	check.Fails(t, p.lock(true), "lock "+part+".part", "bad file") // which no other process is to blame for
}
