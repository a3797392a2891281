package backup

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"runtime"
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
	p := check.Value(openPartial(name))(t)
	check.Must(t, p.file.Close())
}

// TestOnlyTheDiskCounts: data that a disk has refused stays in the kernel's cache, and is not reported again.
func TestOnlyTheDiskCounts(t *testing.T) {
	name := t.TempDir() + "/file"
	cached := func(file *os.File) error {
		return check.Err(unix.Preadv2(int(file.Fd()), [][]byte{make([]byte, 4096)}, 4*mostData, unix.RWF_NOWAIT))
	}
	file := check.Value(os.Create(name + ".part"))(t)
	defer func() { _ = file.Close() }()
	check.Must(t, check.Err(file.Write(make([]byte, 8*mostData))))
	var fs unix.Statfs_t
	if err := errors.Join(file.Sync(), cached(file), unix.Fstatfs(int(file.Fd()), &fs)); err != nil || fs.Type == unix.TMPFS_MAGIC {
		t.Skip("the cache cannot be observed here:", err)
	}
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

// TestAPartIsMadeAsAnotherUser: an export of NFS makes nobody of root.
func TestAPartIsMadeAsAnotherUser(t *testing.T) {
	t.Chdir(t.TempDir())
	if err := os.Chown(".", 12345, -1); err != nil {
		t.Skip("only root can:", err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	check.Must(t, syscall.Setfsuid(12345))
	p, err := openPartial("file")
	check.Must(t, errors.Join(err, syscall.Setfsuid(0)))
	check.Must(t, p.file.Close())
}

// TestADeviceThatMayBeOpen is refused, unless this process may not see who has it open.
func TestADeviceThatMayBeOpen(t *testing.T) {
	hangs := errors.New("process 7 hangs")
	check.Fails(t, refusal("/dev/x", openers.Users{}, hangs, nil), "not known", "process 7")
	check.Fails(t, refusal("/dev/x", openers.Users{Names: "process 8"}, nil, nil), "is open in process 8")
	check.Must(t, errors.Join(refusal("/dev/x", openers.Users{}, nil, nil), refusal("/dev/x", openers.Users{}, hangs, errors.New("no hostPID")),
		refusal("/dev/x", openers.Users{}, os.NewSyscallError("bpf", unix.EPERM), nil)))
}

// TestNamesWithoutRename is about filesystems that know no rename which spares a name that is taken, as NFS.
func TestNamesWithoutRename(t *testing.T) {
	part, name := t.TempDir()+"/file.part", t.TempDir()+"/file"
	cannot := func(string, string) error { return unix.EINVAL }
	check.Must(t, os.WriteFile(part, []byte("new"), 0o600))
	check.Must(t, os.WriteFile(name, []byte("old"), 0o600))
	check.Is(t, giveName(part, name, cannot), fs.ErrExist)
	is, err := os.ReadFile(name)
	check.That(t, err == nil && string(is) == "old", "the file that was there before has %q, %v", is, err)
	check.Must(t, os.Remove(name))
	check.Must(t, giveName(part, name, cannot))
	is, err = os.ReadFile(name)
	check.That(t, err == nil && string(is) == "new", "the new file has %q, %v", is, err)
	check.Is(t, check.Err(os.Lstat(part)), fs.ErrNotExist) // the old name
}
