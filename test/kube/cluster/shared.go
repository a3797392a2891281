//go:build system

package cluster

import (
	"fmt"
	"sync"
	"testing"
)

// shared is the one cluster of a test binary.
var shared struct {
	sync.Mutex
	started bool
	cluster *Cluster
	err     error
}

// Shared gives the cluster that all tests of this binary share; the first one
// starts it. All components run, and crust-proxy has its default settings.
func Shared(t testing.TB) *Cluster {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	if !shared.started {
		shared.started = true
		shared.cluster, shared.err = newCluster(t)
		if shared.err != nil && shared.cluster != nil {
			t.Log(shared.cluster.Logs())
		}
	}
	if shared.err != nil {
		t.Fatal("the cluster cannot be used:", shared.err)
	}
	return shared.cluster
}

// giveUp has the tests that follow fail at once. Each of them would otherwise wait for
// what does not come back, and all together for longer than a run may take.
func giveUp(err error) {
	shared.Lock()
	defer shared.Unlock()
	shared.err = fmt.Errorf("an earlier test left it broken: %w", err)
}

// closeShared ends it, where there is one.
func closeShared() error {
	shared.Lock()
	defer shared.Unlock()
	if shared.cluster == nil {
		return nil
	}
	return shared.cluster.close()
}
