package crustrunc

import (
	"errors"
	"fmt"
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// inside runs f in the sandbox's mount namespace. It takes a thread of its own,
// which ends with it: a thread that has left the others' namespace must not run
// anything else.
func (p pause) inside(f func() error) error {
	ns, err := p.openIn("ns/mnt", unix.O_RDONLY)
	if err != nil {
		return fmt.Errorf("the sandbox's mount namespace cannot be opened: %w", err)
	}
	defer func() { _ = unix.Close(ns) }()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- enter(ns, f)
	}()
	return <-done
}

func enter(ns int, f func() error) error {
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("a thread cannot be set apart: %w", err)
	}
	if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("the sandbox's mount namespace cannot be entered: %w", err)
	}
	return f()
}

// preparePlaces makes the directory for volumes in the sandbox and locks it: one
// container at a time mounts what is missing. The lock goes with the descriptor.
func (p pause) preparePlaces() (lock int, err error) {
	if err := p.inside(makePlaces); err != nil {
		return -1, err
	}
	lock, err = p.openIn(inSandbox(places), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return -1, err
	}
	for {
		err := unix.Flock(lock, unix.LOCK_EX)
		if err == nil && !p.lives() {
			err = errGone
		}
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			_ = unix.Close(lock)
			return -1, err
		}
		return lock, nil
	}
}

// makePlaces runs in the sandbox's namespace.
func makePlaces() error {
	var st unix.Statfs_t
	if err := unix.Statfs("/dev", &st); err != nil {
		return fmt.Errorf("the sandbox's /dev cannot be looked at: %w", err)
	}
	if st.Type != unix.TMPFS_MAGIC {
		return errors.New("the sandbox's /dev is not a tmpfs of its own, so that there is no place for volumes in it")
	}
	// Nothing that is mounted below may be seen anywhere else.
	if err := unix.MountSetattr(unix.AT_FDCWD, "/dev", 0, &unix.MountAttr{Propagation: unix.MS_PRIVATE}); err != nil {
		return fmt.Errorf("the sandbox's /dev cannot be made private: %w", err)
	}
	if err := os.Mkdir(places, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("no place for volumes can be made in the sandbox: %w", err)
	}
	return nil
}

// attach puts a detached mount in its place in the sandbox.
func (p pause) attach(mount int, volume string) error {
	return p.inside(func() error {
		point := places + "/" + volume
		if err := os.Mkdir(point, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("no place for the volume can be made in the sandbox: %w", err)
		}
		if err := unix.MoveMount(mount, "", unix.AT_FDCWD, point, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
			return fmt.Errorf("the volume cannot be mounted in the sandbox: %w", err)
		}
		return nil
	})
}

// clone gives a detached copy of the sandbox's mount of a volume, or of a
// sub-directory of it, which is made where it is missing.
func (p pause) clone(volume, sub string) (mount int, err error) {
	mount = -1
	err = p.inside(func() error {
		root, err := unix.Open(places+"/"+volume, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("the volume is not mounted in the sandbox: %w", err)
		}
		dir, err := descend(root, sub)
		_ = unix.Close(root)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(dir) }()
		mount, err = unix.OpenTree(dir, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return fmt.Errorf("the sandbox's mount of the volume cannot be shared: %w", err)
		}
		return nil
	})
	return mount, err
}
