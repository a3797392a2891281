package kubelet

import (
	"cmp"
	"context"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// Registrar stands beside a driver as node-driver-registrar does. Told that the registration failed it exits, its
// socket stays, and after Restart its container is started again. Fill it in, then start it.
type Registrar struct {
	registration.UnimplementedRegistrationServer
	// Dir is where it makes its socket: kubelet's directory, or crust-proxy's.
	Dir string
	// File is its name there; NAME-reg.sock unless set.
	File string
	// Name and Endpoint are the driver's.
	Name, Endpoint string
	// Type and Versions are CSIPlugin and 1.0.0 unless set.
	Type     string
	Versions []string
	// Restart is how long its container stays down after it has exited; never started again where it is zero.
	Restart time.Duration
	// Hang has it answer no call before that is closed.
	Hang chan struct{}

	mu       sync.Mutex
	process  *rig.Server
	again    *time.Timer
	exits    sync.WaitGroup
	verdicts []Verdict
}

// Verdict is what it was told.
type Verdict struct {
	Registered bool
	Error      string
}

// Socket is its registration socket.
func (r *Registrar) Socket() string {
	return filepath.Join(r.Dir, cmp.Or(r.File, r.Name+"-reg.sock"))
}

// Start makes the socket anew and serves it.
func (r *Registrar) Start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.start()
}

func (r *Registrar) start() error {
	process, err := rig.Serve(r.Socket(), func(s *grpc.Server) { registration.RegisterRegistrationServer(s, r) })
	if err == nil {
		r.process = process
	}
	return err
}

// Kill ends it and leaves its socket behind.
func (r *Registrar) Kill() {
	r.mu.Lock()
	process := r.process
	r.process = nil
	if r.again != nil && r.again.Stop() {
		r.exits.Done()
	}
	r.again = nil
	r.mu.Unlock()
	if process != nil {
		process.Kill()
	}
	r.exits.Wait()
}

// Stop ends it, and it takes its socket away.
func (r *Registrar) Stop() error {
	r.mu.Lock()
	process := r.process
	r.mu.Unlock()
	r.Kill()
	if process == nil {
		return nil
	}
	return process.End()
}

// SetRestart changes Restart while it runs.
func (r *Registrar) SetRestart(after time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Restart = after
}

// Verdicts are what it was told, in order.
func (r *Registrar) Verdicts() []Verdict {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.verdicts)
}

// GetInfo tells who the driver is.
func (r *Registrar) GetInfo(ctx context.Context, _ *registration.InfoRequest) (*registration.PluginInfo, error) {
	if err := r.hang(ctx); err != nil {
		return nil, err
	}
	info := &registration.PluginInfo{Type: r.Type, Name: r.Name, Endpoint: r.Endpoint, SupportedVersions: r.Versions}
	if info.Type == "" {
		info.Type = registration.CSIPlugin
	}
	if info.SupportedVersions == nil {
		info.SupportedVersions = []string{"1.0.0"}
	}
	return info, nil
}

// NotifyRegistrationStatus takes the verdict; a bad one makes it exit.
func (r *Registrar) NotifyRegistrationStatus(ctx context.Context, word *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if err := r.hang(ctx); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.verdicts = append(r.verdicts, Verdict{Registered: word.GetPluginRegistered(), Error: word.GetError()})
	if !word.GetPluginRegistered() && r.process != nil {
		r.exit()
	}
	return &registration.RegistrationStatusResponse{}, nil
}

func (r *Registrar) hang(ctx context.Context) error {
	if r.Hang == nil {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-r.Hang:
		return nil
	}
}

// exit ends the process once it has answered, and has it started again.
func (r *Registrar) exit() {
	process := r.process
	r.process = nil
	r.exits.Go(func() { process.GracefulStop(); process.Wait() })
	if r.Restart == 0 {
		return
	}
	r.exits.Add(1)
	r.again = time.AfterFunc(r.Restart, func() {
		defer r.exits.Done()
		r.mu.Lock()
		defer r.mu.Unlock()
		_ = r.start() // where its directory has gone, its socket is missed
	})
}
