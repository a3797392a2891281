package registry

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
)

// session follows one registrar from the appearance of its socket to its end.
type session struct {
	registry *Registry
	socket   string
	id       socketID
	cancel   context.CancelFunc
	verdicts chan verdict // kubelet's, the latest

	mu      sync.Mutex
	info    Driver
	problem string
	ready   bool
	since   time.Time // of ready or problem
	kubelet string
}

// Driver is a driver as it presented itself.
type Driver struct {
	Name         string
	Version      string
	Endpoint     string
	Versions     []string
	Capabilities []string
}

// errTaken refuses a second driver of one name.
type errTaken struct {
	error
	changed <-chan struct{}
}

const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// run tries until the driver is registered, and stays until the socket has gone.
func (s *session) run(ctx context.Context) {
	wait := firstRetry
	for ctx.Err() == nil {
		err := s.attempt(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.setProblem(err)
			s.tellRegistrar(ctx, false, err.Error())
		}
		var taken errTaken
		errors.As(err, &taken)
		select {
		case <-ctx.Done():
		case <-taken.changed:
		case <-time.After(wait):
		}
		wait = min(2*wait, lastRetry)
	}
}

// attempt looks at the driver, serves it and registers it with kubelet. It
// returns with an error, or when ctx ends.
func (s *session) attempt(ctx context.Context) error {
	info, err := s.ask(ctx)
	if err != nil {
		return err
	}
	if other, changed := s.registry.take(info.Name, s); other != nil {
		return errTaken{changed: changed, error: fmt.Errorf("the driver %s is registered by %s already, with the endpoint %s: "+
			"%s is not taken until that one has gone", info.Name, other.socket, other.driver().Endpoint, s.socket)}
	}
	defer s.registry.release(info.Name, s)
	if len(registrationPath(s.registry.cfg.KubeletRegistry, info.Name)) > maxSocketPath {
		return fmt.Errorf("the driver's name %s is too long for a socket in %s", info.Name, s.registry.cfg.KubeletRegistry)
	}
	front, err := s.registry.serve(info)
	if err != nil {
		return err
	}
	if err := s.meet(ctx, front, info); err != nil {
		return err
	}
	s.setReady()
	return s.register(ctx, front)
}

// ask plays kubelet's part: who is the registrar's driver?
func (s *session) ask(ctx context.Context) (*Driver, error) {
	conn, err := dial(s.socket)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	info, err := registration.NewRegistrationClient(conn).GetInfo(ctx, &registration.InfoRequest{})
	if err != nil {
		return nil, fmt.Errorf("the registrar at %s does not answer: %w", s.socket, err)
	}
	endpoint := strings.TrimPrefix(info.GetEndpoint(), "unix://")
	switch {
	case info.GetType() != registration.CSIPlugin:
		return nil, fmt.Errorf("%s registers a plugin of type %q: only %s is taken here", s.socket, clip(info.GetType()), registration.CSIPlugin)
	case !nameForm.MatchString(info.GetName()):
		return nil, fmt.Errorf("%s registers the name %q, which is no CSI driver's name", s.socket, clip(info.GetName()))
	case !filepath.IsAbs(endpoint):
		return nil, fmt.Errorf("driver %s: its endpoint %q is not an absolute path", info.GetName(), clip(endpoint))
	case !slices.ContainsFunc(info.GetSupportedVersions(), isVersion1):
		return nil, fmt.Errorf("driver %s: it supports the CSI versions %q, and a version 1 is needed", info.GetName(), info.GetSupportedVersions())
	}
	return &Driver{Name: info.GetName(), Endpoint: endpoint, Versions: info.GetSupportedVersions()}, nil
}

func isVersion1(version string) bool {
	version = strings.TrimPrefix(version, "v")
	return version == "1" || strings.HasPrefix(version, "1.")
}

// meet asks the driver itself. kubelet must not hear of one whose NodeGetInfo
// fails: it would not try a second time.
func (s *session) meet(ctx context.Context, front *served, info *Driver) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	conn := front.driverConn()
	plugin, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return info.silent("GetPluginInfo", err)
	}
	if plugin.GetName() != info.Name {
		return fmt.Errorf("driver %s: the driver at %s calls itself %q: the registrar's --csi-address or the driver's name is wrong",
			info.Name, info.Endpoint, clip(plugin.GetName()))
	}
	node := csi.NewNodeClient(conn)
	if _, err := node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}); err != nil {
		return info.silent("NodeGetInfo", err)
	}
	has, err := node.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return info.silent("NodeGetCapabilities", err)
	}
	info.Version = clip(plugin.GetVendorVersion())
	for _, one := range has.GetCapabilities() {
		info.Capabilities = append(info.Capabilities, capabilityName(one.GetRpc().GetType()))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.info = *info
	return nil
}

func (d *Driver) silent(call string, err error) error {
	return fmt.Errorf("driver %s: %s on %s fails: %s", d.Name, call, d.Endpoint, clip(status.Convert(err).Message()))
}

func capabilityName(kind csi.NodeServiceCapability_RPC_Type) string {
	if name, ok := csiv1.NodeCapability_name[int32(kind)]; ok && kind != 0 {
		return strings.TrimPrefix(name, "NODE_CAPABILITY_")
	}
	return kind.String()
}

// tellRegistrar passes a verdict on: a registrar exits on false, and its
// container is started again.
func (s *session) tellRegistrar(ctx context.Context, registered bool, problem string) {
	conn, err := dial(s.socket)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	word := &registration.RegistrationStatus{PluginRegistered: registered, Error: problem}
	if _, err := registration.NewRegistrationClient(conn).NotifyRegistrationStatus(ctx, word); err != nil && ctx.Err() == nil {
		s.registry.cfg.Log.Warn("a registrar could not be told how it went", zap.String("socket", s.socket), zap.Error(err))
	}
}

func (s *session) driver() Driver {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.info
}

func (s *session) setProblem(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text := err.Error(); s.ready || s.problem != text {
		s.ready, s.problem, s.since = false, text, time.Now()
		s.registry.cfg.Log.Warn("a driver is not registered", zap.String("socket", s.socket), zap.Error(err))
	}
}

func (s *session) setReady() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready, s.problem, s.since = true, "", time.Now()
}

// dial connects when the first call is made. A driver that was restarted is found
// again at once.
func dial(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithIdleTimeout(0), grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 2, Jitter: 0.2, MaxDelay: 500 * time.Millisecond},
			MinConnectTimeout: 5 * time.Second,
		}))
}
