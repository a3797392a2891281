package pods

import "sync"

// notifier wakes all that wait for a change of what is known.
type notifier struct {
	mu   sync.Mutex
	next chan struct{}
}

// wait returns a channel that is closed at the next change. Call it before reading the
// state, so that no change is missed.
func (n *notifier) wait() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.next == nil {
		n.next = make(chan struct{})
	}
	return n.next
}

func (n *notifier) notify() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.next != nil {
		close(n.next)
		n.next = nil
	}
}
