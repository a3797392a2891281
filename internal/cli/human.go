package cli

import (
	"errors"
	"fmt"
	"math/big"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/cli/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func stateNames() []string {
	var names []string
	for n := int32(1); adminv1.VolumeState_name[n] != ""; n++ {
		names = append(names, strings.ToLower(show.StateName(adminv1.VolumeState(n))))
	}
	return names
}

func parseState(text string) (adminv1.VolumeState, error) {
	if text == "" {
		return adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED, nil
	}
	n, ok := adminv1.VolumeState_value[show.StatePrefix+strings.ToUpper(text)]
	if !ok || n == 0 {
		return 0, fmt.Errorf("--state %q is none of %s", text, strings.Join(stateNames(), ", "))
	}
	return adminv1.VolumeState(n), nil
}

func stateFlag(cmd *cobra.Command, state *string) {
	cmd.Flags().StringVar(state, "state", "", "only volumes in this state: "+strings.Join(stateNames(), ", "))
	complete(cmd, "state", stateNames()...)
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
