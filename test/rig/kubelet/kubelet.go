// Package kubelet has stand-ins, for tests, of the parties around crust-proxy's driver registry: kubelet's plugin
// manager, a CSI driver's node plugin, and the registrar that brings both together. They speak over real unix sockets,
// and keep to what the real ones were seen to do.
package kubelet

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"k8s.io/apimachinery/pkg/util/version"
)

// Kubelet watches a directory and its sub-directories for plugins.
type Kubelet struct {
	dir      string
	interval time.Duration
	cancel   context.CancelFunc
	ended    chan struct{}

	mu      sync.Mutex
	desired map[string]time.Time // the sockets that are there, and since when
	actual  map[string]plugin    // those that were tried, also in vain
	drivers map[string]Driven    // by name
	node    map[string]bool      // the drivers in the CSINode
	busy    map[string]bool      // the sockets whose removal from the CSINode is under way
	slow    time.Duration        // how long that takes
	refuse  int
	events  []Event
}

// plugin is a socket that kubelet has tried once. It is not tried again while it stays, whatever came of it.
type plugin struct {
	since time.Time
	name  string
}

// Driven is a driver that kubelet would call.
type Driven struct {
	Endpoint, Node string
	version        *version.Version
}

// Event is something that kubelet did.
type Event struct {
	Kind   Kind
	Driver string
	Socket string
	Error  string
}

// Kind is the kind of an event.
type Kind string

// What kubelet does.
const (
	Registered   Kind = "registered"
	Refused      Kind = "refused"
	Deregistered Kind = "deregistered"
	Lost         Kind = "lost" // events of the file system
)

// Start starts a kubelet over a directory that exists. Its loop takes a second in the real one.
func Start(dir string, interval time.Duration) (*Kubelet, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	k := &Kubelet{
		dir: dir, interval: interval, cancel: cancel, ended: make(chan struct{}),
		desired: make(map[string]time.Time), actual: make(map[string]plugin), drivers: make(map[string]Driven),
		node: make(map[string]bool), busy: make(map[string]bool),
	}
	k.watch(watcher, dir)
	go func() {
		defer close(k.ended)
		defer func() { _ = watcher.Close() }()
		k.run(ctx, watcher)
	}()
	return k, nil
}

// Stop ends it, as a restart of kubelet does: nobody is deregistered.
func (k *Kubelet) Stop() {
	k.cancel()
	<-k.ended
}

func (k *Kubelet) locked(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

// RefuseNext has it refuse the next n registrations.
func (k *Kubelet) RefuseNext(n int) { k.locked(func() { k.refuse = n }) }

// UninstallTakes has each removal of a driver from the CSINode take some time, as with a slow API server.
func (k *Kubelet) UninstallTakes(d time.Duration) { k.locked(func() { k.slow = d }) }

// InNode tells whether the CSINode has a driver.
func (k *Kubelet) InNode(driver string) (is bool) {
	k.locked(func() { is = k.node[driver] })
	return is
}

// LoseFromNode removes a driver from the CSINode, as a late removal does. Kubelet does not notice.
func (k *Kubelet) LoseFromNode(driver string) { k.locked(func() { delete(k.node, driver) }) }

// Drivers are those that it would call now, by name.
func (k *Kubelet) Drivers() (all map[string]Driven) {
	k.locked(func() { all = maps.Clone(k.drivers) })
	return all
}

// Endpoint is where it calls a driver; "" where it knows none of that name.
func (k *Kubelet) Endpoint(driver string) string { return k.Drivers()[driver].Endpoint }

// Events lists what it did so far.
func (k *Kubelet) Events() (all []Event) {
	k.locked(func() { all = slices.Clone(k.events) })
	return all
}

// Count counts the events of a kind.
func (k *Kubelet) Count(kind Kind) (n int) {
	for _, one := range k.Events() {
		if one.Kind == kind {
			n++
		}
	}
	return n
}

func (k *Kubelet) note(event Event) { k.locked(func() { k.events = append(k.events, event) }) }
