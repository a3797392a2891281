package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// Order is what the list is sorted by.
type Order uint8

// The orders. Each begins with what needs attention most, ByName is alphabetic.
const (
	ByUsage Order = iota
	ByLatency
	ByAge
	ByState
	ByName
)

// orders say how each order compares rows, and which column it is marked at. Rows for
// which it is not known come last, also in the reverse order.
var orders = [...]struct {
	name    string
	column  int
	compare func(a, b *row) int
	known   func(*row) bool // nil is always
}{
	ByUsage: {"usage", colUsage, func(a, b *row) int {
		return cmp.Or(cmp.Compare(b.bytes.part(), a.bytes.part()), cmp.Compare(b.bytes.used, a.bytes.used))
	}, func(r *row) bool { return r.bytes.known }},
	ByLatency: {"latency", colStats, func(a, b *row) int { return cmp.Compare(b.took, a.took) }, func(r *row) bool { return r.asked }},
	ByAge:     {"age", colAge, func(a, b *row) int { return b.created.Compare(a.created) }, nil},
	ByState:   {"state", colState, func(a, b *row) int { return urgency[a.v.GetState()] - urgency[b.v.GetState()] }, nil},
	ByName:    {"name", colName, byName, nil},
}

func byName(a, b *row) int {
	return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.pod, b.pod), cmp.Compare(a.id(), b.id()))
}

func (o Order) String() string { return orders[o].name }

// OrderNames are the names of the orders.
func OrderNames() (names []string) {
	for _, o := range orders {
		names = append(names, o.name)
	}
	return names
}

// ParseOrder reads an order.
func ParseOrder(text string) (Order, error) {
	i := slices.Index(OrderNames(), text)
	if i < 0 {
		return 0, fmt.Errorf("--sort %q is none of %s", text, strings.Join(OrderNames(), ", "))
	}
	return Order(i), nil //nolint:gosec // one of five
}

func (o Order) next() Order { return (o + 1) % Order(len(orders)) }

// sort sorts rows. Equal rows are sorted by name.
func (o Order) sort(rows []*row, reversed bool) {
	compare, known := orders[o].compare, orders[o].known
	slices.SortFunc(rows, func(a, b *row) int {
		if known != nil && known(a) != known(b) {
			if known(a) {
				return -1
			}
			return 1
		}
		c := compare(a, b)
		if reversed {
			c = -c
		}
		return cmp.Or(c, byName(a, b))
	})
}

// urgency ranks the states, the one that needs attention most first. A degraded
// volume has rank 0, as has a state that only a newer daemon knows.
var urgency = map[adminv1.VolumeState]int{
	adminv1.VolumeState_VOLUME_STATE_REFUSED:   1,
	adminv1.VolumeState_VOLUME_STATE_HELD:      1,
	adminv1.VolumeState_VOLUME_STATE_REMOVING:  2,
	adminv1.VolumeState_VOLUME_STATE_PUBLISHED: 3,
	adminv1.VolumeState_VOLUME_STATE_BOUND:     4,
	adminv1.VolumeState_VOLUME_STATE_ADOPTED:   5,
}
