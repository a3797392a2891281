package kubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"k8s.io/apimachinery/pkg/util/version"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// patience bounds a call, and the wait for a connection, as in the real kubelet.
const patience = 10 * time.Second

// reconcile deregisters what has gone or came anew, then registers what is new. A
// socket that came anew is registered in the next turn.
func (k *Kubelet) reconcile(ctx context.Context) {
	k.mu.Lock()
	desired, actual := maps.Clone(k.desired), maps.Clone(k.actual)
	k.mu.Unlock()
	for path, was := range actual {
		if since, there := desired[path]; !there || since != was.since {
			k.deregister(path, was)
		}
	}
	for _, path := range slices.Sorted(maps.Keys(desired)) {
		if _, tried := actual[path]; !tried && !k.isBusy(path) {
			k.register(ctx, path, desired[path])
		}
	}
}

// isBusy tells whether an operation for the socket is under way: kubelet runs one at a
// time for each, and those of different sockets side by side.
func (k *Kubelet) isBusy(path string) (is bool) {
	k.locked(func() { is = k.busy[path] })
	return is
}

// deregister goes by the name alone, whoever has registered it last. The CSINode follows later.
func (k *Kubelet) deregister(path string, was plugin) {
	k.mu.Lock()
	delete(k.actual, path)
	delete(k.drivers, was.name)
	if k.slow == 0 {
		delete(k.node, was.name)
	} else {
		k.busy[path] = true
		time.AfterFunc(k.slow, func() {
			k.locked(func() { delete(k.node, was.name); delete(k.busy, path) })
		})
	}
	k.mu.Unlock()
	if was.name != "" {
		k.note(Event{Kind: Deregistered, Driver: was.name, Socket: path})
	}
}

// register marks a socket before it tries: once is all that it gets.
func (k *Kubelet) register(ctx context.Context, path string, since time.Time) {
	k.mark(path, plugin{since: since})
	conn, err := rig.Connect(path)
	if err != nil {
		return // not with a path
	}
	defer func() { _ = conn.Close() }()
	client := registration.NewRegistrationClient(conn)
	event := Event{Kind: Registered, Socket: path}
	info, err := hello(ctx, client)
	if err == nil {
		event.Driver = info.GetName()
		err = k.admit(ctx, path, since, info)
	}
	word := &registration.RegistrationStatus{PluginRegistered: err == nil}
	if err != nil {
		event.Kind, event.Error, word.Error = Refused, err.Error(), err.Error()
	}
	k.note(event)
	if event.Driver != "" {
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		_, _ = client.NotifyRegistrationStatus(ctx, word) // the real one logs it
	}
}

// hello waits for one who has bound the socket and does not listen yet.
func hello(ctx context.Context, client registration.RegistrationClient) (*registration.PluginInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return client.GetInfo(ctx, &registration.InfoRequest{}, grpc.WaitForReady(true))
}

func (k *Kubelet) mark(path string, p plugin) { k.locked(func() { k.actual[path] = p }) }

func (k *Kubelet) validate(info *registration.PluginInfo) (*version.Version, error) {
	if info.GetType() != registration.CSIPlugin {
		return nil, fmt.Errorf("no handler registered for plugin type: %s at socket", info.GetType())
	}
	highest, err := version.HighestSupportedVersion(info.GetSupportedVersions())
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.refuse > 0 {
		k.refuse--
		return nil, errors.New("refused for the test")
	}
	if old, known := k.drivers[info.GetName()]; known && !old.version.LessThan(highest) {
		return nil, fmt.Errorf("another driver with the name %s is registered with an equal or higher version", info.GetName())
	}
	return highest, nil
}

// admit takes the driver for known before NodeGetInfo, and drops it where that fails.
func (k *Kubelet) admit(ctx context.Context, path string, since time.Time, info *registration.PluginInfo) error {
	highest, err := k.validate(info)
	if err != nil {
		return err
	}
	name, driven := info.GetName(), Driven{Endpoint: info.GetEndpoint(), version: highest}
	k.mark(path, plugin{since: since, name: name})
	k.locked(func() { k.drivers[name] = driven })
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	driven.Node, err = nodeID(ctx, driven.Endpoint)
	k.locked(func() {
		if err != nil {
			delete(k.drivers, name)
			return
		}
		k.drivers[name], k.node[name] = driven, true
	})
	return err
}

func nodeID(ctx context.Context, endpoint string) (string, error) {
	conn, err := rig.Connect(endpoint)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	info, err := csi.NewNodeClient(conn).NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	return info.GetNodeId(), err
}
