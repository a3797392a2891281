package runc

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/ground/failpoint"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/reference/fsmount"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// ensure makes the volume be mounted in the sandbox. Everything that changes the
// filesystem is done before anybody can see it: a kill on the way leaves no mount,
// and the next attempt does all of it again.
func (p pause) ensure(volume string, info abi.Info, warn func(string)) error {
	lock, err := p.preparePlaces()
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(lock) }()
	if there, err := p.has(volume, info); err != nil || there {
		return err
	}
	device, err := handler.OpenDevice(info)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(device) }()
	if !info.ReadOnly() {
		if err := handler.RefuseMounted(info); err != nil {
			return err
		}
	}
	mount, err := fsmount.Mount(info, device, warn)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(mount) }()
	failpoint.Hit("crust-runc-mounted")
	return attachWithGroup(p, lock, mount, volume, info)
}

// has tells whether the volume is mounted in the sandbox already.
func (p pause) has(volume string, info abi.Info) (bool, error) {
	fd, err := p.open(volume, info)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, unix.Close(fd)
}
