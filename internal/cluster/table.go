package cluster

import "sync"

// table is a word for each of the cluster's objects of one kind, by name.
type table struct {
	changed func()
	mu      sync.Mutex
	synced  bool
	words   map[string]string
}

// get gives the word of an object, and whether there is one.
func (t *table) get(name string) (word string, there bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	word, there = t.words[name]
	return word, there
}

// ready tells whether all objects are known.
func (t *table) ready() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.synced
}

func (t *table) set(name, word string) {
	t.mu.Lock()
	if t.words == nil {
		t.words = make(map[string]string)
	}
	t.words[name] = word
	t.mu.Unlock()
	t.changed()
}

func (t *table) remove(name string) {
	t.mu.Lock()
	delete(t.words, name)
	t.mu.Unlock()
	t.changed()
}

func (t *table) replace(words map[string]string) {
	t.mu.Lock()
	t.words, t.synced = words, true
	t.mu.Unlock()
	t.changed()
}
