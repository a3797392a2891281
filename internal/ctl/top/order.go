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

// The orders. Each begins with what wants attention; Name is alphabetic.
const (
	ByUsage Order = iota
	ByLatency
	ByAge
	ByState
	ByName
)

var orderNames = [...]string{"usage", "latency", "age", "state", "name"}

func (o Order) String() string { return orderNames[o] }

// OrderNames are the words for the orders.
func OrderNames() []string { return orderNames[:] }

// ParseOrder reads an order.
func ParseOrder(text string) (Order, error) {
	i := slices.Index(orderNames[:], text)
	if i < 0 {
		return 0, fmt.Errorf("--sort %q is none of %s", text, strings.Join(orderNames[:], ", "))
	}
	return Order(i), nil //nolint:gosec // one of five
}

func (o Order) next() Order { return (o + 1) % Order(len(orderNames)) }

// sort orders rows; rows that are equal stay in the order of their names, and
// what is not known comes last either way.
func (o Order) sort(rows []*row, up bool) {
	slices.SortFunc(rows, func(a, b *row) int {
		if ka, kb := o.known(a), o.known(b); ka != kb {
			if ka {
				return -1
			}
			return 1
		}
		c := o.compare(a, b)
		if up {
			c = -c
		}
		return cmp.Or(c, byName(a, b))
	})
}

func byName(a, b *row) int {
	return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.pod, b.pod), cmp.Compare(a.id(), b.id()))
}

func (o Order) known(r *row) bool {
	switch o {
	case ByUsage:
		return r.bytes.known
	case ByLatency:
		return r.asked
	default:
		return true
	}
}

func (o Order) compare(a, b *row) int {
	switch o {
	case ByUsage:
		return cmp.Or(cmp.Compare(b.bytes.part(), a.bytes.part()), cmp.Compare(b.bytes.used, a.bytes.used))
	case ByLatency:
		return cmp.Compare(b.took, a.took)
	case ByAge:
		return b.created.Compare(a.created)
	case ByState:
		return cmp.Compare(urgency(a), urgency(b))
	default:
		return byName(a, b)
	}
}

// urgency is small for the states that want attention.
func urgency(r *row) int {
	switch r.v.GetState() {
	case adminv1.VolumeState_VOLUME_STATE_DEGRADED:
		return 0
	case adminv1.VolumeState_VOLUME_STATE_REMOVING:
		return 2
	case adminv1.VolumeState_VOLUME_STATE_PUBLISHED:
		return 3
	case adminv1.VolumeState_VOLUME_STATE_BOUND:
		return 4
	case adminv1.VolumeState_VOLUME_STATE_ADOPTED:
		return 5
	case adminv1.VolumeState_VOLUME_STATE_REFUSED:
		return 1
	default: // what a newer daemon may have is looked at first
		return 0
	}
}
