package cuts

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// MarkSpace is the end of a disk, where no filesystem is. A machine writes there, past its own cache, which call it makes
// and which was acknowledged. So the log itself orders that among all other writes, and no clock is asked.
const MarkSpace = 1 << 20

// Mark is that of a call.
type Mark struct {
	// Sets is what there is after the call: a value for each fact that it changes; "" is nothing.
	Sets map[string]string `json:"sets"`
	// Loose: until it is done, they may also have any other value.
	Loose bool `json:"loose,omitempty"`
	// Done: it was acknowledged.
	Done bool `json:"done,omitempty"`
}

// Marker writes marks.
type Marker struct {
	disk *os.File
	next int64
	buf  []byte // aligned, as direct I/O wants it
}

// NewMarker makes one for a disk of a size.
func NewMarker(device string, size int64) (*Marker, error) {
	disk, err := os.OpenFile(device, os.O_WRONLY|unix.O_DIRECT, 0) //nolint:gosec // a test's own
	if err != nil {
		return nil, err
	}
	buf, err := unix.Mmap(-1, 0, BlockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	return &Marker{disk: disk, next: size - MarkSpace, buf: buf}, err
}

// Put writes a mark. It is complete when it returns.
func (m *Marker) Put(mark Mark) error {
	raw, err := json.Marshal(mark)
	if err != nil {
		return err
	}
	if len(raw) > len(m.buf) {
		return fmt.Errorf("a mark has %d bytes, and %d are the most", len(raw), len(m.buf))
	}
	clear(m.buf[copy(m.buf, raw):])
	_, err = m.disk.WriteAt(m.buf, m.next)
	m.next += BlockSize
	return err
}

// Marks gives the marks in a log by the numbers of their entries.
func Marks(l *Log, diskSize int64) (map[int]Mark, error) {
	all := make(map[int]Mark)
	for i, e := range l.Entries {
		if e.Flush || e.Offset < diskSize-MarkSpace {
			continue
		}
		raw, err := l.Data(e)
		if err != nil {
			return nil, err
		}
		var mark Mark
		if err := json.Unmarshal(bytes.TrimRight(raw, "\x00"), &mark); err != nil {
			return nil, fmt.Errorf("entry %d is no mark: %w", i, err)
		}
		all[i] = mark
	}
	return all, nil
}

// Points are where the power is cut, as numbers of entries that are not completed: before each flush, after each
// acknowledgement, and at some random ones.
func Points(l *Log, marks map[int]Mark, random int, r *rand.Rand) (points []int) {
	for i, e := range l.Entries {
		if e.Flush {
			points = append(points, i)
		} else if marks[i].Done {
			points = append(points, i+1)
		}
	}
	for range random {
		points = append(points, r.IntN(len(l.Entries)+1))
	}
	slices.Sort(points)
	return points
}

// Expected is what there may be, by the marks so far.
type Expected struct {
	values map[string][]string
	loose  map[string]bool
}

// Add takes the next mark.
func (e *Expected) Add(m Mark) {
	if e.values == nil {
		e.values, e.loose = make(map[string][]string), make(map[string]bool)
	}
	for fact, value := range m.Sets {
		if m.Done {
			e.values[fact] = []string{value}
		} else {
			e.values[fact] = append(e.allowed(fact), value)
		}
		e.loose[fact] = m.Loose && !m.Done
	}
}

func (e *Expected) allowed(fact string) []string {
	if values, known := e.values[fact]; known {
		return values
	}
	return []string{""}
}

// Named gives the names of facts of a kind, of "size vol-1" of the kind "size" this is "vol-1".
func (e *Expected) Named(kind string) (names []string) {
	for fact := range e.values {
		if name, is := strings.CutPrefix(fact, kind+" "); is {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Compare says where what was found is not what may be.
func (e *Expected) Compare(found map[string]string) (faults []string) {
	facts := maps.Clone(found)
	if facts == nil {
		facts = make(map[string]string)
	}
	for fact := range e.values {
		facts[fact] = found[fact]
	}
	for _, fact := range slices.Sorted(maps.Keys(facts)) {
		if allowed := e.allowed(fact); !e.loose[fact] && !slices.Contains(allowed, facts[fact]) {
			faults = append(faults, fmt.Sprintf("%s is %q, and may be one of %q", fact, facts[fact], allowed))
		}
	}
	return faults
}
