package show

import (
	"fmt"
	"math"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"
)

// Size shows bytes with a binary unit: 1.5GiB.
func Size(n int64) string {
	if n < 1024 {
		return fmt.Sprintf("%dB", n)
	}
	value, unit := float64(n), -1
	// 1023.95 and more would be shown as 1024.0 of a unit.
	for value >= 1023.95 && unit < 5 {
		value, unit = value/1024, unit+1
	}
	return strings.Replace(fmt.Sprintf("%.1f%ciB", value, "KMGTPE"[unit]), ".0", "", 1)
}

// ShortIDLength is how much of an id is shown to people.
const ShortIDLength = 12

// ShortID is the part of an id that is shown to people.
func ShortID(id string) string { return id[:min(len(id), ShortIDLength)] }

// Percent is the used part of a total, rounded up, so that only nothing is 0%. Without
// a total it is empty.
func Percent(used, total int64) string {
	if total <= 0 {
		return ""
	}
	return fmt.Sprintf("%.0f%%", math.Ceil(100*float64(used)/float64(total)))
}

// Duration shows how long ago something was, as kubectl does: coarser as it grows. A
// clock that is behind the daemon's gives 0s.
func Duration(d time.Duration) string { return duration.HumanDuration(max(0, d)) }
