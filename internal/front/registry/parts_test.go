package registry

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// driver makes a driver whose node is its socket's name.
func (w *world) driver(called, socket string) *kubelet.Driver {
	d := &kubelet.Driver{Name: called, Version: "v7", Node: socket, Socket: filepath.Join(w.dir, socket)}
	w.t.Cleanup(d.Kill)
	return d
}

// registrar makes the registrar of a driver, in our directory.
func (w *world) registrar(d *kubelet.Driver) *kubelet.Registrar {
	check.Must(w.t, os.MkdirAll(w.ours(), 0o750))
	r := &kubelet.Registrar{Dir: w.ours(), Name: d.Name, Endpoint: d.Socket, Restart: 5 * turn}
	w.t.Cleanup(r.Kill)
	return r
}

// pair starts a driver and its registrar.
func (w *world) pair() (*kubelet.Driver, *kubelet.Registrar) {
	d := w.driver(name, "driver.sock")
	r := w.registrar(d)
	check.Must(w.t, d.Start())
	check.Must(w.t, r.Start())
	return d, r
}

// served says that kubelet calls our socket, and gets to the driver.
func (w *world) served(node string) {
	w.t.Helper()
	w.tells()
	check.Eventually(w.t, "kubelet calls ours", func() bool { return w.kubelet.Endpoint(name) == w.csi() })
	check.Eventually(w.t, "the driver answers", func() bool {
		got, err := askNode(w.csi())
		return err == nil && got == node
	})
	check.Eventually(w.t, "the driver is shown as ready", func() bool {
		one, found := w.shown(name)
		return found && one.Ready && one.Kubelet == "registered" && one.Socket == w.csi()
	})
}

// tells has a test that fails say how things stand.
func (w *world) tells() {
	if w.told {
		return
	}
	w.told = true
	w.t.Cleanup(func() {
		if w.t.Failed() {
			w.t.Logf("kubelet did %+v\nlisted are %+v", w.kubelet.Events(), w.registry.List())
		}
	})
}

// steady says that kubelet becomes content, and stays so without a new
// registration.
func (w *world) steady() {
	w.t.Helper()
	check.Eventually(w.t, "it holds", func() bool {
		before := len(w.kubelet.Events())
		time.Sleep(quiet)
		return len(w.kubelet.Events()) == before && w.kubelet.Endpoint(name) == w.csi()
	})
}

func (w *world) neverRefused() {
	w.t.Helper()
	if w.kubelet.Count(kubelet.Refused) > 0 {
		w.t.Errorf("kubelet refused: %+v", w.kubelet.Events())
	}
}

func (w *world) shown(driver string) (State, bool) {
	for _, one := range w.registry.List() {
		if one.Name == driver {
			return one, true
		}
	}
	return State{}, false
}

// refusedWith says that a registrar was told no, with a text that has all parts.
func refusedWith(t *testing.T, r *kubelet.Registrar, parts ...string) {
	t.Helper()
	check.Eventually(t, "the registrar is refused", func() bool { return len(r.Verdicts()) > 0 })
	got := r.Verdicts()[0]
	for _, part := range parts {
		if got.Registered || !strings.Contains(got.Error, part) {
			t.Errorf("the verdict is %+v, without %q", got, part)
		}
	}
}

func askNode(socket string) (string, error) {
	conn, err := connect(socket)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	info, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	return info.GetNodeId(), err
}

func connect(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
