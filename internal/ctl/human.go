package ctl

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

const (
	statePrefix = "VOLUME_STATE_"
	// nothing stands in a table where there is nothing to show.
	nothing = "-"
)

// stateName is empty for no state: a volume that has gone has none.
func stateName(s adminv1.VolumeState) string {
	if s == adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED {
		return ""
	}
	return strings.TrimPrefix(s.String(), statePrefix)
}

func stateNames() []string {
	var names []string
	for n := int32(1); adminv1.VolumeState_name[n] != ""; n++ {
		names = append(names, strings.ToLower(stateName(adminv1.VolumeState(n))))
	}
	return names
}

// size shows bytes with a binary unit: 1.5GiB.
func size(n int64) string {
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

// count shows a number as it is, as inodes are shown.
func count(n int64, unit adminv1.VolumeUsage_Unit) string {
	if unit == adminv1.VolumeUsage_UNIT_BYTES {
		return size(n)
	}
	return fmt.Sprint(n)
}

func percent(u *adminv1.VolumeUsage) string {
	if u.GetTotal() <= 0 {
		return nothing
	}
	return fmt.Sprintf("%.0f%%", math.Ceil(100*float64(u.GetUsed())/float64(u.GetTotal())))
}

// age shows how long ago something was, as kubectl does: coarser as it grows.
func (a *app) age(at *timestamppb.Timestamp) string {
	if at == nil {
		return nothing
	}
	return humanDuration(a.world.Now().Sub(at.AsTime()))
}

func humanDuration(d time.Duration) string {
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

var multipliers = map[string]int64{
	"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
	"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60,
}

// parseSize reads a quantity as Kubernetes writes it: 20Gi, 1.5Ti, 10G, 4096.
func parseSize(text string) (int64, error) {
	digits := strings.TrimRight(text, "BEGKMPTik")
	unit, known := multipliers[strings.TrimSuffix(text[len(digits):], "B")]
	value, ok := new(big.Rat).SetString(digits)
	if !known || !ok || strings.Trim(digits, "0123456789.") != "" {
		return 0, fmt.Errorf("%q is no size; write it as 20Gi, 500Mi or in bytes", text)
	}
	value.Mul(value, new(big.Rat).SetInt64(unit))
	whole := new(big.Int).Quo(new(big.Int).Add(value.Num(), new(big.Int).Sub(value.Denom(), big.NewInt(1))), value.Denom())
	if !whole.IsInt64() || whole.Sign() <= 0 {
		return 0, errors.New(text + " is out of range: a size is more than 0 and less than 8Ei")
	}
	return whole.Int64(), nil
}
