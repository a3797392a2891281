package registry

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	csiv1 "github.com/crust-proxy/crust-proxy/proto/crust/csi/v1"
)

// Driver is a driver as it presented itself.
type Driver struct {
	Name         string
	Version      string
	Endpoint     string
	Versions     []string
	Capabilities []string
	reply        *csi.NodeGetCapabilitiesResponse // the answer that has them
}

const maxName = 63

// What is kept of a driver's and a registrar's answers is bounded: a small answer can have a million empty entries.
const (
	maxAnswer       = 64 << 10
	maxVersions     = 16
	maxCapabilities = 64
)

// refusal is an error that a retry does not fix, so the registrar is notified at once. With
// any other error the registrar or driver may not be up yet.
type refusal struct{ error }

// errTaken refuses a driver whose name another registrar has. The channel is closed when any name is released.
type errTaken struct {
	error
	changed <-chan struct{}
}

func refusef(format string, args ...any) error { return refusal{fmt.Errorf(format, args...)} }

// driverCheck asks registrars and drivers who they are, as kubelet would.
type driverCheck struct {
	sockets      string        // the directory of our own CSI sockets
	timeout      time.Duration // of one exchange
	infoDeadline time.Duration // of NodeGetInfo
}

func (c driverCheck) info(ctx context.Context, socket string) (*registration.PluginInfo, error) {
	conn, err := dial(socket, sys.DialUnix)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	info, err := registration.NewRegistrationClient(conn).GetInfo(ctx, &registration.InfoRequest{}, grpc.MaxCallRecvMsgSize(maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("the registrar at %s does not answer: %s", socket, clip(status.Convert(err).Message()))
	}
	return info, nil
}

// accept validates the answer of a registrar, as kubelet does.
func (c driverCheck) accept(socket string, info *registration.PluginInfo) (*Driver, error) {
	endpoint := cmp.Or(strings.TrimPrefix(info.GetEndpoint(), "unix://"), socket)
	switch {
	case info.GetType() != registration.CSIPlugin:
		return nil, refusef("%s registers a plugin of type %q: only %s is taken here", socket, clip(info.GetType()), registration.CSIPlugin)
	case len(info.GetName()) > maxName:
		return nil, refusef("%s registers a name of %d bytes: a CSI driver's has at most %d", socket, len(info.GetName()), maxName)
	case !sys.IsDriverName(info.GetName()):
		return nil, refusef("%s registers the name %q, which is no CSI driver's name", socket, clip(info.GetName()))
	case !filepath.IsAbs(endpoint):
		return nil, refusef("driver %s: its endpoint %q is not an absolute path", info.GetName(), clip(endpoint))
	case len(endpoint) > sys.MaxSocketPath:
		return nil, refusef("driver %s: its endpoint %q is longer than the %d bytes that a socket's path may have",
			info.GetName(), clip(endpoint), sys.MaxSocketPath)
	case filepath.Dir(filepath.Clean(endpoint)) == filepath.Clean(c.sockets):
		return nil, refusef("driver %s: its endpoint %s is crust-proxy's own socket: let the registrar's "+
			"--kubelet-registration-path be the driver's", info.GetName(), endpoint)
	case len(info.GetSupportedVersions()) > maxVersions:
		return nil, refusef("driver %s: it supports %d CSI versions, and at most %d are taken", info.GetName(), len(info.GetSupportedVersions()), maxVersions)
	case !slices.ContainsFunc(info.GetSupportedVersions(), func(v string) bool { return strings.HasPrefix(strings.TrimPrefix(v, "v")+".", "1.") }):
		return nil, refusef("driver %s: it supports the CSI versions %s, and a version 1 is needed",
			info.GetName(), clip(fmt.Sprintf("%q", info.GetSupportedVersions())))
	}
	return &Driver{Name: info.GetName(), Endpoint: endpoint, Versions: info.GetSupportedVersions()}, nil
}

// claimed returns what can be shown of a driver that is not accepted.
func claimed(info *registration.PluginInfo) *Driver {
	if !sys.IsDriverName(info.GetName()) {
		return &Driver{}
	}
	return &Driver{Name: info.GetName(), Endpoint: clip(info.GetEndpoint())}
}

// nodeInfo asks what kubelet asks at a registration, and for as long as kubelet waits. A driver that
// fails must not be registered: kubelet would not retry.
func (c driverCheck) nodeInfo(ctx context.Context, conn grpc.ClientConnInterface, info *Driver) error {
	ctx, cancel := context.WithTimeout(ctx, c.infoDeadline)
	defer cancel()
	if _, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{}, grpc.MaxCallRecvMsgSize(maxAnswer)); err != nil {
		return info.failed("NodeGetInfo", err)
	}
	return nil
}

// identify asks the driver for its name and capabilities. Then calls can be passed to it.
func (c driverCheck) identify(ctx context.Context, conn grpc.ClientConnInterface, info Driver) (*Driver, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	small := grpc.MaxCallRecvMsgSize(maxAnswer)
	plugin, err := csi.NewIdentityClient(conn).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, small)
	if err != nil {
		return nil, info.failed("GetPluginInfo", err)
	}
	if plugin.GetName() != info.Name {
		return nil, refusef("driver %s: the driver at %s calls itself %q: the registrar's --csi-address or the driver's name is wrong",
			info.Name, info.Endpoint, clip(plugin.GetName()))
	}
	has, err := csi.NewNodeClient(conn).NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{}, small)
	if err != nil {
		return nil, info.failed("NodeGetCapabilities", err)
	}
	if many := len(has.GetCapabilities()); many > maxCapabilities {
		return nil, refusef("driver %s: it reports %d capabilities, and at most %d are taken", info.Name, many, maxCapabilities)
	}
	info.Version = clip(plugin.GetVendorVersion())
	info.Capabilities, info.reply = nil, has
	for _, one := range has.GetCapabilities() {
		kind := one.GetRpc().GetType()
		name := kind.String()
		if known, ok := csiv1.NodeCapability_name[int32(kind)]; ok && kind != 0 {
			name = strings.TrimPrefix(known, "NODE_CAPABILITY_")
		}
		info.Capabilities = append(info.Capabilities, name)
	}
	return &info, nil
}

// failed is the error of a failed call. It is a refusal if the driver does not implement the
// call, and so is no node plugin.
func (d *Driver) failed(call string, err error) error {
	err, code := fmt.Errorf("driver %s: %s on %s fails: %s", d.Name, call, d.Endpoint, clip(status.Convert(err).Message())), status.Code(err)
	if code == codes.Unimplemented {
		return refusal{err}
	}
	return err
}

// clip bounds a text of another program, which could fill the log.
func clip(s string) string { return sys.ClipTo(s, 512) }
