package kata

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Shim is a running emulated sandbox.
type Shim struct {
	opts   Options
	dir    string
	server *http.Server
	stop   context.CancelFunc
	served sync.WaitGroup

	mu     sync.Mutex
	mounts map[string]Statfs
	body   []byte
	fault  Fault
}

// Start listens on the sandbox's management socket. A sandbox that was killed
// can be started again under its id, as a real one cannot.
func Start(opts Options) (*Shim, error) {
	s := &Shim{opts: opts, dir: filepath.Join(opts.Sandboxes, opts.SandboxID), mounts: maps.Clone(opts.Mounts), body: opts.Body}
	if s.mounts == nil {
		s.mounts = make(map[string]Statfs)
	}
	listener, err := s.listen()
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s.stop = stop
	s.server = &http.Server{
		Handler:           s.handler(),
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: time.Minute,
	}
	s.served.Go(func() {
		// It ends by Close alone.
		_ = s.server.Serve(listener)
	})
	return s, nil
}

// Bind starts a sandbox of the Go runtime for the time of the test, and leaves its id with
// the volume of a target, as its shim does when it creates a container.
func Bind(t rig.T, d *rig.Daemon, id, target string, mounts map[string]Statfs) *Shim {
	t.Helper()
	shim := check.Value(Start(Options{Flavor: Go, SandboxID: id, Sandboxes: d.GoSandboxes, Mounts: mounts}))(t)
	t.Cleanup(func() { _ = shim.Stop() })
	check.Must(t, WriteID(d.Kata, target, id))
	return shim
}

func (s *Shim) listen() (net.Listener, error) {
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, err
	}
	if err := os.Remove(s.Socket()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	return net.Listen("unix", s.Socket())
}

// Socket is where the shim listens.
func (s *Shim) Socket() string { return filepath.Join(s.dir, "shim-monitor.sock") }

// Stop ends the sandbox in an orderly way: its socket and its directory are removed.
func (s *Shim) Stop() error { return errors.Join(s.end(), os.RemoveAll(s.dir)) }

func (s *Shim) end() error {
	s.stop()
	err := s.server.Close()
	s.served.Wait()
	return err
}

// Kill ends the sandbox as a kill does: the socket stays and refuses connections.
func (s *Shim) Kill() error {
	moved := s.Socket() + ".kept"
	if err := os.Rename(s.Socket(), moved); err != nil {
		return err
	}
	// It removes the name that it made, which is not there now.
	return errors.Join(s.end(), os.Rename(moved, s.Socket()))
}

func (s *Shim) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// SetFault makes the shim misbehave from the next request on.
func (s *Shim) SetFault(f Fault) { s.locked(func() { s.fault = f }) }

// SetBody makes it answer stats with these bytes; nil ends that.
func (s *Shim) SetBody(body []byte) { s.locked(func() { s.body = body }) }

// Mount adds a filesystem to the guest.
func (s *Shim) Mount(name string, fs Statfs) { s.locked(func() { s.mounts[name] = fs }) }

// UnmountOne takes one filesystem from the guest.
func (s *Shim) UnmountOne(name string) { s.locked(func() { delete(s.mounts, name) }) }

// Unmount takes all filesystems from the guest.
func (s *Shim) Unmount() { s.locked(func() { clear(s.mounts) }) }

// VolumeDir returns the directory in which a shim looks for the volume of a target.
func VolumeDir(directVolumes, target string) string {
	return filepath.Join(directVolumes, base64.URLEncoding.EncodeToString([]byte(target)))
}

// HandedOver reads what a sandbox has to mount: the device, and the filesystem on it.
func HandedOver(directVolumes, target string) (device, fs string, err error) {
	info, err := (&VM{DirectVolumes: directVolumes}).infoOf(target)
	if err == nil && info == nil {
		err = errors.New("kata shim: the volume is not published: " + target)
	}
	if err != nil {
		return "", "", err
	}
	return *info.Device, *info.FSType, nil
}

// WriteID leaves the sandbox's id in a volume's directory, as the Go runtime does when it creates a container.
func WriteID(directVolumes, target, sandboxID string) error {
	dir := VolumeDir(directVolumes, target)
	if _, err := os.Stat(filepath.Join(dir, "mountInfo.json")); err != nil {
		return fmt.Errorf("kata shim: the volume is not published: %w", err)
	}
	return os.WriteFile(filepath.Join(dir, sandboxID), nil, 0o600)
}

// ShareDir makes the directory that runtime-rs makes for a volume, and returns the volume's path in the guest.
func ShareDir(sharedSandboxes, guestShared, sandboxID, device, mountPath string) (string, error) {
	name := device + "-0123abcd-" + mountPath[strings.LastIndexByte(mountPath, '/')+1:]
	return filepath.Join(guestShared, name), os.MkdirAll(filepath.Join(sharedSandboxes, sandboxID, "rw", "passthrough", name), 0o700)
}
