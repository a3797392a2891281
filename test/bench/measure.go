package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// measure takes all figures, or one.
func measure(s settings) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	figures := &sheet{}
	for _, part := range []struct {
		name string
		take func(context.Context, settings, *testbed, *sheet) error
	}{
		{"latency", latency}, {"rate", rates}, {"process", processes}, {"hung", hungSandboxes}, {"passthrough", passthrough},
		{"pods", pods}, {"kube", kubePods}, {"cluster", inCluster}, {"scale", scale}, {"growth", growth}, {"size", size},
	} {
		if s.only != "" && s.only != part.name {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := withRig(s.pprof, func(r *testbed) error { return part.take(ctx, s, r, figures) }); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	if s.quick || s.pprof || s.only != "" {
		return nil
	}
	return figures.write(s.out)
}

// withRig gives each figure a fresh daemon and takes all of it away again.
func withRig(pprof bool, f func(*testbed) error) error {
	r, err := newTestbed(pprof)
	if r != nil {
		defer r.close()
	}
	if err != nil {
		return err
	}
	return f(r)
}

// pair is one connection to the daemon and one to the empty server.
type pair struct {
	ours, empty runtimev1.RuntimeClient
	close       func()
}

func (r *testbed) pair() (*pair, error) {
	ours, closeOurs, err := r.client()
	if err != nil {
		return nil, err
	}
	conn, err := r.dial(r.dir + "/empty.sock")
	if err != nil {
		closeOurs()
		return nil, err
	}
	return &pair{ours, runtimev1.NewRuntimeClient(conn), func() { closeOurs(); _ = conn.Close() }}, nil
}

// volume is a staged volume with a live emulated sandbox.
type volume struct {
	request *runtimev1.RuntimeStageVolumeRequest
	stats   *runtimev1.RuntimeGetVolumeStatsRequest
	socket  string
}

// oneVolume starts daemon, empty server and one shim over one disk.
func (r *testbed) oneVolume(ctx context.Context) (*volume, error) {
	if _, err := r.start(); err != nil {
		return nil, err
	}
	if err := r.spawn(r.dir+"/empty.sock", roleEmpty, r.dir+"/empty.sock"); err != nil {
		return nil, err
	}
	disk, err := r.disk(0)
	if err != nil {
		return nil, err
	}
	ready := r.dir + "/shims-ready"
	if err := r.spawn(ready, roleShims, r.sandboxes, "1", "0", disk, ready); err != nil {
		return nil, err
	}
	return r.bound(ctx, 0, disk)
}

// bound stages a volume and lets its sandbox take it.
func (r *testbed) bound(ctx context.Context, n int, device string) (*volume, error) {
	client, done, err := r.client()
	if err != nil {
		return nil, err
	}
	defer done()
	v := &volume{socket: filepath.Join(r.sandboxes, sandboxID(n), "shim-monitor.sock")}
	if v.request, err = r.request(n, device); err != nil {
		return nil, err
	}
	v.stats = &runtimev1.RuntimeGetVolumeStatsRequest{VolumeTargetPath: v.request.GetVolumeTargetPath()}
	if _, err := client.RuntimeStageVolume(ctx, v.request); err != nil {
		return nil, err
	}
	return v, r.bind(n, v.request.GetVolumeTargetPath())
}

// bind writes the file by which the Go runtime tells its sandbox.
func (r *testbed) bind(n int, target string) error {
	dir := filepath.Join(r.kata, base64.URLEncoding.EncodeToString([]byte(target)))
	return os.WriteFile(filepath.Join(dir, sandboxID(n)), nil, 0o600)
}

func (v *volume) unstage() *runtimev1.RuntimeUnstageVolumeRequest {
	return &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: v.request.GetVolumeTargetPath()}
}

// size is that of the release build.
func size(_ context.Context, _ settings, r *testbed, s *sheet) error {
	info, err := os.Stat(r.program)
	if err != nil {
		return err
	}
	mib := float64(info.Size()) / (1 << 20)
	s.atMost("the daemon's binary", "< 35 MiB", mib, 35, fmt.Sprintf("%.1f MiB", mib))
	return nil
}

var errNoSample = errors.New("nothing was measured")
