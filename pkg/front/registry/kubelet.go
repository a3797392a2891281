package registry

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// verdict is what kubelet said of a registration.
type verdict struct {
	registered bool
	problem    string
}

const (
	// seen is how long a registration socket stays away, so that kubelet, whose
	// loop takes a second, forgets the old one before the new one comes: it
	// refuses an equal version under one name.
	seen = 1500 * time.Millisecond
	// lastRefusal bounds the wait after kubelet refused again and again.
	lastRefusal = 30 * time.Second
)

func registrationPath(dir, name string) string { return filepath.Join(dir, name+Suffix) }

// register offers the driver to kubelet until ctx ends. A refusal is final for
// kubelet until the socket is made anew, so that is done.
func (s *session) register(ctx context.Context, front *served) error {
	wait := seen
	for ctx.Err() == nil {
		offer, err := s.offer(front)
		if errors.Is(err, fs.ErrNotExist) {
			s.setKubelet("kubelet's registry " + s.registry.cfg.KubeletRegistry + " is not there yet")
			sleep(ctx, rescan)
			continue
		}
		if err != nil {
			return err
		}
		refused := s.hear(ctx, offer)
		offer.end()
		if ctx.Err() != nil {
			break
		}
		if refused {
			sleep(ctx, wait)
			wait = min(2*wait, lastRefusal)
			continue
		}
		sleep(ctx, seen)
	}
	s.withdraw(front)
	return nil
}

// withdraw takes the registration from kubelet when the registrar has gone. It
// stays when the daemon ends: then nobody has gone but us.
func (s *session) withdraw(front *served) {
	s.registry.mu.Lock()
	gone := s.registry.sessions[s.socket] != s
	s.registry.mu.Unlock()
	if gone {
		_ = os.Remove(registrationPath(s.registry.cfg.KubeletRegistry, front.name))
	}
}

// hear waits for kubelet's verdicts and passes them on. It tells whether kubelet
// refused; else the socket was taken away by somebody.
func (s *session) hear(ctx context.Context, offer *offer) (refused bool) {
	tick := time.NewTicker(rescan)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case word := <-s.verdicts:
			s.tellRegistrar(ctx, word.registered, word.problem)
			if !word.registered {
				s.setKubelet("refused: " + word.problem)
				s.registry.cfg.Log.Error("kubelet refused a driver", zap.String("driver", offer.name), zap.String("problem", clip(word.problem)))
				_ = os.Remove(offer.path)
				return true
			}
			s.setKubelet("registered")
		case <-tick.C:
			if !offer.stands() {
				return false
			}
		}
	}
}

func (s *session) setKubelet(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kubelet = clip(text)
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// offer is a registration socket in kubelet's directory.
type offer struct {
	registration.UnimplementedRegistrationServer
	name   string
	path   string
	id     socketID
	info   *registration.PluginInfo
	server *grpc.Server
	ended  chan struct{}
	heard  chan verdict
}

// offer makes the socket. It is bound at its final place: kubelet looks into
// every directory that appears beside it.
func (s *session) offer(front *served) (*offer, error) {
	path := registrationPath(s.registry.cfg.KubeletRegistry, front.name)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the registration of an earlier life at %s cannot be removed: %w", path, err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("driver %s cannot be registered with kubelet: %w", front.name, err)
	}
	listener.SetUnlinkOnClose(false)
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	made := &offer{
		name: front.name, path: path, id: idOf(path), server: grpc.NewServer(), ended: make(chan struct{}), heard: s.verdicts,
		info: &registration.PluginInfo{
			Type: registration.CSIPlugin, Name: front.name, Endpoint: front.socket, SupportedVersions: s.driver().Versions,
		},
	}
	s.setKubelet("waiting for kubelet")
	registration.RegisterRegistrationServer(made.server, made)
	go func() { defer close(made.ended); _ = made.server.Serve(listener) }()
	return made, nil
}

// GetInfo tells kubelet who the driver is.
func (o *offer) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return o.info, nil
}

// NotifyRegistrationStatus takes kubelet's verdict; the latest counts.
func (o *offer) NotifyRegistrationStatus(_ context.Context, word *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	select {
	case <-o.heard:
	default:
	}
	o.heard <- verdict{registered: word.GetPluginRegistered(), problem: word.GetError()}
	return &registration.RegistrationStatusResponse{}, nil
}

func (o *offer) stands() bool { return idOf(o.path) == o.id }

func (o *offer) end() {
	o.server.Stop()
	<-o.ended
}

func idOf(path string) socketID {
	info, err := os.Lstat(path)
	if err != nil {
		return socketID{}
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return socketID{}
	}
	return socketID{inode: st.Ino, made: st.Ctim}
}
