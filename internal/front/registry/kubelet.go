package registry

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
)

// register offers the driver to kubelet until ctx ends. kubelet does not retry a driver that it has refused until the
// socket is re-created, so that is done. Where it cannot be, the socket of before stays, and kubelet keeps the driver:
// also one of an earlier process whose driver fails now. Without one it returns the driver's error.
func (s *session) register(ctx context.Context, front *served) error {
	times := s.registry.times
	isNew := idAt(registrationPath(s.registry.cfg.KubeletRegistry, front.name)) == socketID{}
	defer s.withdraw(front)
	var standing *offer // it serves until the next one listens
	defer func() { standing.end() }()
	for wait := times.away; ctx.Err() == nil; isNew = false {
		err := s.ask(ctx, front, true)
		if err != nil && isNew {
			return err
		}
		if err != nil {
			sys.Sleep(ctx, times.rescan)
			continue
		}
		offer, err := s.offer(front)
		if err != nil {
			s.setUnoffered(err)
			sys.Sleep(ctx, times.rescan)
			continue
		}
		standing.end()
		standing = offer
		refused := s.awaitKubelet(ctx, offer, front)
		if refused && ctx.Err() == nil {
			_ = os.Remove(offer.path) // kubelet has not registered it
		}
		if !refused {
			wait = times.away
			sys.Sleep(ctx, wait)
			continue
		}
		standing.end()
		standing = nil
		s.pause(ctx, wait)
		wait = min(2*wait, times.lastRefusal)
	}
	return nil
}

// withdraw removes the registration socket if the registrar has gone. The socket stays when
// the daemon ends, so that kubelet keeps the driver registered.
func (s *session) withdraw(front *served) {
	if s.registry.gone(s) {
		_ = os.Remove(registrationPath(s.registry.cfg.KubeletRegistry, front.name)) // missing where it was refused
		s.registry.cfg.Log.Info("a registrar has gone, or comes anew", zap.String("driver", front.name), zap.String("socket", s.socket))
	}
}

func (s *session) offer(front *served) (*offer, error) {
	path := registrationPath(s.registry.cfg.KubeletRegistry, front.name)
	s.settling.begin(path)
	listener, err := listen(path)
	if err != nil {
		return nil, err
	}
	made := &offer{
		name: front.name, path: path, id: idAt(path), server: grpc.NewServer(), ended: make(chan struct{}), verdict: make(chan *registration.RegistrationStatus, 1),
		info: &registration.PluginInfo{
			Type: registration.CSIPlugin, Name: front.name, Endpoint: front.socket, SupportedVersions: s.state().Versions,
		},
	}
	if !strings.HasPrefix(s.state().Kubelet, refusedBy) { // that lasts until kubelet says another thing
		s.setKubelet("waiting for kubelet")
	}
	registration.RegisterRegistrationServer(made.server, made)
	go func() { defer close(made.ended); _ = made.server.Serve(listener) }()
	return made, nil
}

// awaitKubelet forwards kubelet's verdicts to the registrar, until the socket has been
// removed or must be re-created. It reports whether kubelet refused the driver.
func (s *session) awaitKubelet(ctx context.Context, offer *offer, front *served) (refused bool) {
	following, cancel := context.WithCancel(ctx)
	defer cancel()
	reconnects := follow(following, front.driver.Load().conn)
	silence := time.NewTimer(s.registry.times.silence)
	defer silence.Stop()
	defer s.confirmed.Store(nil)
	var settled, again <-chan time.Time
	for {
		if again == nil && !s.state().Ready {
			again = time.After(s.registry.times.rescan)
		}
		select {
		case <-ctx.Done():
			return false
		case <-silence.C:
			s.setKubelet("waiting for kubelet") // also if it refused the driver before
			return false
		case verdict := <-offer.verdict:
			if !s.forwardVerdict(ctx, offer, verdict) {
				return true
			}
			silence.Stop()
			settled = s.settle(offer, settled)
		case <-settled:
			s.setKubelet(registered)
			if beginRenewal(s.registry, offer.name) {
				return false
			}
		case <-s.renew:
			return false
		case <-s.scanned:
			if idAt(offer.path) != offer.id {
				return false
			}
		case <-reconnects:
			s.watchDriver(ctx, front)
		case <-again:
			again = nil
			s.watchDriver(ctx, front)
		}
	}
}

// settle returns when a registration is to be renewed because kubelet may lose it.
func (s *session) settle(offer *offer, settled <-chan time.Time) <-chan time.Time {
	if !s.settling.needed(offer.name) {
		return settled
	}
	s.setKubelet(registered + ", and to be renewed once: the driver may have had another registration until now")
	return time.After(s.registry.times.settle)
}

// follow reports each change of a connection's state until ctx ends, and one at first: the driver may
// have gone just now.
func follow(ctx context.Context, conn *grpc.ClientConn) <-chan struct{} {
	changed := make(chan struct{}, 1)
	sys.Wake(changed)
	go func() {
		for state := conn.GetState(); conn.WaitForStateChange(ctx, state); state = conn.GetState() {
			sys.Wake(changed)
		}
	}()
	return changed
}

// forwardVerdict forwards kubelet's verdict to the registrar, and reports whether the driver is registered.
func (s *session) forwardVerdict(ctx context.Context, offer *offer, verdict *registration.RegistrationStatus) bool {
	log := s.registry.cfg.Log.With(zap.String("driver", offer.name))
	if verdict.GetPluginRegistered() {
		s.setKubelet(registered)
		s.confirmed.Store(new(time.Now()))
		sys.Wake(s.registry.node.soon)
		log.Info("kubelet has registered a driver")
	} else if text := refusedBy + verdict.GetError(); s.state().Kubelet != clip(text) {
		s.setKubelet(text)
		log.Error("kubelet refused a driver", zap.String("problem", clip(verdict.GetError())))
	}
	s.notify(ctx, verdict)
	return verdict.GetPluginRegistered()
}

// watchDriver notices that the driver's process has gone, and that it is back, perhaps as another version. Meanwhile
// the driver stays registered with kubelet, as it would without us.
func (s *session) watchDriver(ctx context.Context, front *served) {
	switch conn := front.driver.Load().conn; conn.GetState() {
	case connectivity.Idle:
		conn.Connect()
	case connectivity.TransientFailure:
		info := s.state().Driver
		s.setProblem(info.failed("the connection", errors.New("nobody listens there: is the driver's container running?")))
	case connectivity.Ready:
		if !s.state().Ready {
			_ = s.ask(ctx, front, false)
		}
	default: // connecting, or closed
	}
}

// ask asks whether the driver is up, and notes it. kubelet calls the driver as soon as it is registered.
func (s *session) ask(ctx context.Context, front *served, toRegister bool) error {
	known, err := s.registry.check.identify(ctx, front.driver.Load().conn, s.state().Driver)
	if err == nil && toRegister {
		err = s.registry.check.nodeInfo(ctx, front.driver.Load().conn, known)
	}
	if err == nil {
		s.setReady(known)
	} else if ctx.Err() == nil {
		s.setProblem(err)
	}
	return err
}

// pause waits after a refusal, or until a socket of others has gone that may have been the reason for it.
func (s *session) pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-s.renew:
		sys.Sleep(ctx, s.registry.times.away)
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

	mu      sync.Mutex                            // of the senders
	verdict chan *registration.RegistrationStatus // holds the latest one
}

// GetInfo returns the driver's name and CSI socket.
func (o *offer) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return o.info, nil
}

// NotifyRegistrationStatus receives kubelet's verdict; the latest one counts. It does not
// wait for the registrar, which may hang.
func (o *offer) NotifyRegistrationStatus(_ context.Context, verdict *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case <-o.verdict:
	default:
	}
	o.verdict <- verdict
	return &registration.RegistrationStatusResponse{}, nil
}

// end may be called of none.
func (o *offer) end() {
	if o == nil {
		return
	}
	o.server.Stop()
	<-o.ended
}
