package vm

import (
	"errors"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestOnlyTheGuestSeesWhatIsShared: the directory above propagates its mounts to others, as /run does.
func TestOnlyTheGuestSeesWhatIsShared(t *testing.T) {
	check.NeedsRoot(t)
	dir, done := t.TempDir(), make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the mount namespace ends with the thread
		done <- shareBesideAPeer(dir)
	}()
	check.Must(t, <-done)
}

func shareBesideAPeer(dir string) error {
	run, peer, image := dir+"/run", dir+"/peer", dir+"/image"
	err := errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		os.Mkdir(run, 0o700), os.Mkdir(peer, 0o700), os.Mkdir(image, 0o700), os.WriteFile(image+"/file", nil, 0o600),
		unix.Mount("tmpfs", run, "tmpfs", 0, ""), unix.Mount("", run, "", unix.MS_SHARED, ""), unix.Mount(run, peer, "", unix.MS_BIND, ""))
	s := share{tree: run + "/tree", mount: run + "/shared"}
	if err = errors.Join(err, s.open(), s.add(bind{name: "c/root", source: image})); err != nil {
		return err
	}
	guest := dir + "/guest" // a later mount of it, as virtiofsd's is
	if err := errors.Join(os.Mkdir(guest, 0o700), unix.Mount(s.mount, guest, "", unix.MS_BIND, ""), s.add(bind{name: "c/late", source: image})); err != nil {
		return err
	}
	if _, err := os.Stat(guest + "/c/late/file"); err != nil {
		return err
	}
	for _, name := range []string{"/shared/c/root/file", "/shared/c/late/file"} {
		if _, err := os.Stat(peer + name); !errors.Is(err, os.ErrNotExist) {
			return errors.Join(errors.New("others see "+name), err)
		}
	}
	if err := s.close(); err != nil {
		return err
	}
	left, err := os.ReadDir(peer)
	if len(left) > 0 {
		err = errors.New("a directory is left")
	}
	return err
}
