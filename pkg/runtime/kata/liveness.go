package kata

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/projection"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/internal/tree"
)

// maxSandboxes bounds a listing of the node's Kata sandboxes.
const maxSandboxes = 4096

// mayLive tells whether a sandbox is listed by the container runtime or has a shim.
func (b *bindings) mayLive(id string) (bool, error) {
	if b.sandboxes != nil {
		if _, listed := b.sandboxes.PodOf(id); listed {
			return true, nil
		}
	}
	return b.hasShim(id)
}

// ended tells whether a sandbox is proven to have ended.
func (b *bindings) ended(id string) bool {
	if b.sandboxes != nil && !b.sandboxes.Ready() {
		return false
	}
	lives, err := b.mayLive(id)
	return err == nil && !lives
}

func (b *bindings) hasShim(id string) (bool, error) {
	for _, f := range []flavor{goShim, rustShim} {
		if served, err := isServed(b.cfg.socketOf(id, f)); served || err != nil {
			return served, err
		}
	}
	return false, nil
}

func (b *bindings) ofOtherPod(id, podUID string) bool {
	return projection.OfOtherPod(b.sandboxes, id, podUID)
}

// unattributed names a sandbox of the node that has a shim and is not known to be
// another pod's, or gives "".
func (b *bindings) unattributed(podUID string) (string, error) {
	for _, root := range []string{b.cfg.GoSandboxes, b.cfg.RustSandboxes} {
		names, err := tree.ReadNames(root, maxSandboxes+1)
		if errors.Is(err, unix.ENOENT) {
			continue
		}
		if err != nil {
			return "", err
		}
		if len(names) > maxSandboxes {
			return "", fmt.Errorf("%s holds more than %d", root, maxSandboxes)
		}
		for _, id := range names {
			if !abi.IsSandboxID(id) || b.ofOtherPod(id, podUID) {
				continue
			}
			if lives, err := b.hasShim(id); lives || err != nil {
				return id, err
			}
		}
	}
	return "", nil
}

// maxSocketPath is how long a socket's path can be, by sockaddr_un(7).
const maxSocketPath = 107

// isServed tries a socket without waiting: a queue of connections that is full is
// that of a shim that lives.
func isServed(socket string) (bool, error) {
	if len(socket) > maxSocketPath {
		return false, nil // nobody can listen there
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return false, err
	}
	defer func() { _ = unix.Close(fd) }()
	err = unix.Connect(fd, &unix.SockaddrUnix{Name: socket})
	switch {
	case err == nil, errors.Is(err, unix.EAGAIN):
		return true, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ECONNREFUSED):
		return false, nil
	default:
		return false, err
	}
}
