package registry

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestDirectoryThatCannotBeRead is a node without free descriptors for a moment: no driver
// has gone, and none is taken from kubelet.
func TestDirectoryThatCannotBeRead(t *testing.T) {
	dir, err := os.MkdirTemp("", "reg") // t.TempDir is too long for a socket
	check.Must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	none := func(string) []string { return nil }
	r := New(Config{Registry: dir + "/ours", KubeletRegistry: dir + "/kubelet", Sockets: dir, Log: zap.NewNop(), Deferred: none})
	gone := 0
	for _, of := range []string{r.cfg.Registry, r.cfg.KubeletRegistry} {
		check.Must(t, os.Mkdir(of, 0o750))
		path := filepath.Join(of, "disk.sock")
		listener, err := net.Listen("unix", path)
		check.Must(t, err)
		defer func() { _ = listener.Close() }()
		if of == r.cfg.Registry {
			r.sessions[path] = &session{registry: r, socket: path, id: idAt(path), cancel: func() { gone++ }}
		} else {
			r.direct[path] = &bypass{id: idAt(path), cancel: func() { gone++ }}
		}
	}
	check.WithoutDescriptors(t, func() { r.look(t.Context()) })
	if gone > 0 {
		t.Errorf("%d sockets count as gone", gone)
	}
	for _, of := range []string{r.cfg.Registry, r.cfg.KubeletRegistry} {
		check.Must(t, os.RemoveAll(of))
	}
	r.look(t.Context())
	if gone != 2 {
		t.Errorf("%d sockets are gone, want 2", gone)
	}
}
