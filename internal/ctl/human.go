package ctl

import (
	"errors"
	"fmt"
	"math/big"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/crust-proxy/crust-proxy/internal/ctl/show"
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

func size(n int64) string { return show.Size(n) }

// count shows a number as it is, as inodes are shown.
func count(n int64, unit adminv1.VolumeUsage_Unit) string {
	if unit == adminv1.VolumeUsage_UNIT_BYTES {
		return size(n)
	}
	return fmt.Sprint(n)
}

func percent(u *adminv1.VolumeUsage) string {
	if text := show.Percent(u.GetUsed(), u.GetTotal()); text != "" {
		return text
	}
	return nothing
}

// age shows how long ago something was, as kubectl does: coarser as it grows.
func (a *app) age(at *timestamppb.Timestamp) string {
	if at == nil {
		return nothing
	}
	return humanDuration(a.world.Now().Sub(at.AsTime()))
}

func humanDuration(d time.Duration) string { return show.Duration(d) }

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
