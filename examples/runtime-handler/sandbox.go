package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/reference/process"
)

// sandbox is the pod's first process. The mounts of the pod's volumes live in its mount namespace, in its /dev,
// which is a tmpfs of its own, and end with it.
type sandbox struct{ process.Process }

const place = "dev/volumes"

// open opens the volume's mount in the sandbox. A process of the pod may have put a link or another filesystem
// there (15).
func (s sandbox) open(volume string, info abi.Info) (int, error) {
	dir, err := s.Open()
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(dir) }()
	top, err := unix.Openat(dir, "root", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	defer func() { _ = unix.Close(top) }()
	fd, err := unix.Openat2(top, place+"/"+volume, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	})
	if err != nil {
		return -1, err
	}
	var device unix.Stat_t
	err = unix.Stat(info.Device, &device)
	if err == nil {
		err = fsops.LiesOn(fd, device.Rdev)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// mount mounts a volume in the sandbox, unless it is mounted there already (7).
func (s sandbox) mount(m *oci.Mount) error {
	volume, info := m.Volume, m.Info
	lock, err := os.OpenFile("/run/"+name+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err == nil {
		defer func() { _ = lock.Close() }()
		// Containers of the pod share one mount. A byte of the file is a volume's: a disk that hangs stops no other's pod.
		hash := fnv.New64a()
		_, _ = hash.Write([]byte(volume))
		own := unix.Flock_t{Type: unix.F_WRLCK, Whence: unix.SEEK_SET, Start: int64(hash.Sum64() >> 1), Len: 1}
		err = unix.FcntlFlock(lock.Fd(), unix.F_OFD_SETLKW, &own)
	}
	if err != nil {
		return err
	}
	if fd, err := s.open(volume, info); !errors.Is(err, unix.ENOENT) && !errors.Is(err, fsops.ErrElsewhere) {
		return errors.Join(err, unix.Close(fd))
	}
	device, err := handler.OpenPublished(m.Dir(), info, handler.OpenDevice)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(device) }()
	if !info.ReadOnly() {
		if err := handler.RefuseMounted(info); err != nil { // ClaimDevice is for virtual machines: it would keep our own mount out
			return err
		}
	}
	warn := func(text string) { fmt.Fprintln(os.Stderr, text) }
	mount, err := fsmount.Ready(context.Background(), info, device, warn) // grown, and with its group
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(mount) }()
	return s.Inside(func() error {
		dir := "/" + place + "/" + volume
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
		if err := unix.Mount("", "/dev", "", unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		point, err := unix.Openat2(unix.AT_FDCWD, dir, &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_NO_SYMLINKS})
		if err != nil {
			return err
		}
		return errors.Join(fsmount.Move(mount, point), unix.Close(point))
	})
}

// show mounts the volume, or the container's sub-directory of it (9), over the guard.
func (s sandbox) show(m *oci.Mount) error {
	volume, err := s.open(m.Volume, m.Info)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(volume) }()
	var mount int
	if err := s.Inside(func() error {
		dir, err := fsmount.Descend(volume, m.Sub)
		if err != nil {
			return err
		}
		mount, err = fsmount.Clone(dir, m.Info)
		return errors.Join(err, unix.Close(dir))
	}); err != nil {
		return err
	}
	return errors.Join(fsmount.Move(mount, m.Source), unix.Close(mount))
}

// volumes answers the broker's questions (12).
type volumes config

func (v volumes) ask(target string, f func(root int, info abi.Info) error) error {
	dir, err := abi.Open(v.Root, abi.DirName(target))
	if errors.Is(err, os.ErrNotExist) {
		return handler.ErrNoSandbox
	}
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	info, err := dir.Info()
	if err != nil {
		return err
	}
	ids, err := dir.Sandboxes() // the newest first
	for _, id := range ids {
		var s sandbox
		note, err := dir.Read(id, 4096)
		if err != nil || json.Unmarshal(note, &s.Process) != nil {
			continue
		}
		if fd, err := s.open(dir.Name(), info); err == nil {
			return errors.Join(f(fd, info), unix.Close(fd))
		}
	}
	return errors.Join(handler.ErrNoSandbox, err)
}

func (v volumes) Stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	err = v.ask(target, func(root int, info abi.Info) error {
		reply, err = fsops.Stat(root, info.ReadOnly())
		return err
	})
	return reply, "", err
}

func (v volumes) Resize(target string, least, most int64) (size int64, err error) {
	err = v.ask(target, func(root int, info abi.Info) error {
		device, err := handler.OpenDevice(info)
		if err != nil {
			return err
		}
		size, err = fsops.Grow(root, device, least, most)
		return errors.Join(err, unix.Close(device))
	})
	return size, err
}

// Freeze is optional (14): without a watchdog that outlives this process it would not be safe.
func (volumes) Freeze(string, time.Duration) error { return fsops.ErrUnsupported }
func (volumes) Thaw(string) error                  { return fsops.ErrUnsupported }
func (volumes) ThawExpired() abi.ThawExpiredReply  { return abi.ThawExpiredReply{} }
