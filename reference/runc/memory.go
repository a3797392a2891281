package runc

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
)

// memory remembers where a volume was found, for a process that is asked again and
// again: the sandbox's process, by the kernel's directory of it, which no other
// process ever gets. Nothing is answered from it: each time the filesystem is
// opened anew, and whatever changed in the volume's directory has it looked for
// anew.
type memory struct {
	mu sync.RWMutex
	of map[string]*finding
}

// finding is one volume that was found.
type finding struct {
	dir     dirState
	info    abi.Info
	sandbox string
	proc    int
}

// dirState tells a directory, as it is, from itself after a change.
type dirState struct {
	dev, ino     uint64
	sec, nanosec int64
}

// settled is how long a directory must have been as it is: the kernel's clock for
// files ticks slowly, and two changes within a tick look like one.
const settled = 100 * time.Millisecond

func stateOf(path string) (dirState, bool) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return dirState{}, false
	}
	changed := st.Ctim
	return dirState{dev: st.Dev, ino: st.Ino, sec: changed.Sec, nanosec: changed.Nsec}, true
}

// isOld tells whether the state can be told from a later one.
func (d dirState) isOld() bool { return time.Since(time.Unix(d.sec, d.nanosec)) > settled }

// find opens the filesystem of a volume where it was last. It is false where that
// cannot be relied on any more.
func (m *memory) find(root, volume string) (holder, abi.Info, bool) {
	if m == nil {
		return holder{}, abi.Info{}, false
	}
	m.mu.RLock()
	defer m.mu.RUnlock()
	f := m.of[volume]
	if f == nil {
		return holder{}, abi.Info{}, false
	}
	if now, there := stateOf(root + "/" + volume); !there || now != f.dir {
		return holder{}, abi.Info{}, false
	}
	fd, err := openIn(f.proc, volume, f.info)
	if err != nil {
		return holder{}, abi.Info{}, false
	}
	return holder{sandbox: f.sandbox, root: fd}, f.info, true
}

// keep remembers where a volume was found while its directory was in this state.
func (m *memory) keep(volume string, dir dirState, info abi.Info, at holder) {
	if m == nil || !dir.isOld() {
		return
	}
	proc, err := at.pause.proc()
	if err != nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.drop(volume)
	m.of[volume] = &finding{dir: dir, info: info, sandbox: at.sandbox, proc: proc}
}

// drop is called with the lock held.
func (m *memory) drop(volume string) {
	if f := m.of[volume]; f != nil {
		_ = unix.Close(f.proc)
		delete(m.of, volume)
	}
}

// prune forgets volumes that are not as they were.
func (m *memory) prune(root string) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for volume, f := range m.of {
		if now, there := stateOf(root + "/" + volume); !there || now != f.dir {
			m.drop(volume)
		}
	}
}
