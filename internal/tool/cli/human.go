package cli

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
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
	command.Complete(cmd, "state", stateNames()...)
}

// parseSize reads a quantity as Kubernetes writes it: 20Gi, 1.5Ti, 10G, 4096.
func parseSize(text string) (int64, error) {
	digits := strings.TrimRight(text, "BEGKMPTik")
	size, err := resource.ParseQuantity(strings.TrimSuffix(text, "B"))
	if err != nil || strings.Trim(digits, "0123456789.") != "" {
		return 0, fmt.Errorf("%q is no size; write it as 20Gi, 500Mi or in bytes", text)
	}
	// A quantity that is too large becomes the largest number.
	if n := size.Value(); n > 0 && n < math.MaxInt64 {
		return n, nil
	}
	return 0, errors.New(text + " is out of range: a size is more than 0 and less than 8Ei")
}
