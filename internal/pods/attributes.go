package pods

import "sync"

// attributes caches one string per object of a kind, by the object's name: the handler
// of a RuntimeClass, the fsGroupPolicy of a CSIDriver.
type attributes struct {
	changed func()
	mu      sync.Mutex
	synced  bool
	values  map[string]string
}

// get gives the attribute of an object, and whether the object exists.
func (a *attributes) get(name string) (value string, there bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	value, there = a.values[name]
	return value, there
}

// ready tells whether all objects are known.
func (a *attributes) ready() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.synced
}

func (a *attributes) set(name, value string) {
	a.mu.Lock()
	if a.values == nil {
		a.values = make(map[string]string)
	}
	a.values[name] = value
	a.mu.Unlock()
	a.changed()
}

func (a *attributes) remove(name string) {
	a.mu.Lock()
	delete(a.values, name)
	a.mu.Unlock()
	a.changed()
}

func (a *attributes) replace(values map[string]string) {
	a.mu.Lock()
	a.values, a.synced = values, true
	a.mu.Unlock()
	a.changed()
}
