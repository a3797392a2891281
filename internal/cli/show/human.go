package show

import (
	"fmt"
	"math"
	"strings"
	"time"
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

// Duration shows how long ago something was, as kubectl does: coarser as it grows.
func Duration(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < 0:
		return "0s"
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 10*time.Minute:
		return pair(d, time.Minute, "m", time.Second, "s")
	case d < 3*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 8*time.Hour:
		return pair(d, time.Hour, "h", time.Minute, "m")
	case d < 2*day:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d < 8*day:
		return pair(d, day, "d", time.Hour, "h")
	case d < 2*365*day:
		return fmt.Sprintf("%dd", d/day)
	}
	return pair(d, 365*day, "y", day, "d")
}

func pair(d, big time.Duration, bigName string, small time.Duration, smallName string) string {
	text := fmt.Sprintf("%d%s", d/big, bigName)
	if rest := d % big / small; rest > 0 {
		text += fmt.Sprintf("%d%s", rest, smallName)
	}
	return text
}
