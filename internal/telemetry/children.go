package telemetry

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
)

// callKind is what tells a call's counter from another's.
type callKind struct {
	method, driver, handler string
	code                    codes.Code
}

// callChildren are the metrics of one kind of call.
type callChildren struct {
	count    prometheus.Counter
	duration prometheus.Observer
}

// children caches them: to find them by label values on each call would cost more
// than the counting. A plain map under a lock, since a sync.Map would allocate
// its key each time.
type children struct {
	mu sync.RWMutex
	of map[callKind]callChildren
}

func (c *children) get(kind callKind) (callChildren, bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	found, ok := c.of[kind]
	return found, ok
}

func (c *children) put(kind callKind, made callChildren) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.of == nil {
		c.of = make(map[callKind]callChildren)
	}
	c.of[kind] = made
}

// childrenOf gives the metrics of a call.
func (m *Metrics) childrenOf(method string, call *Call, code codes.Code) callChildren {
	kind := callKind{method: method, driver: call.Driver, handler: call.Handler, code: code}
	if found, ok := m.children.get(kind); ok {
		return found
	}
	service, short := splitMethod(method)
	driver := m.drivers.label(call.Driver)
	made := callChildren{
		count:    m.calls.WithLabelValues(service, short, driver, call.Handler, code.String()),
		duration: m.durations.WithLabelValues(service, short, driver, call.Handler),
	}
	if driver != otherDriver { // names without bound would make the cache grow
		m.children.put(kind, made)
	}
	return made
}
