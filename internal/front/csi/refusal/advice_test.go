package refusal

import (
	"errors"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestAdvice: each typed error of the core gets its advice once, and keeps its kind and its type.
func TestAdvice(t *testing.T) {
	for want, cause := range map[string]error{
		DeletePod: claim.ErrLost, EndVM: &claim.HeldError{}, WaitForIt: &claim.OwnedError{Target: "/t"}, "": errors.New("another"),
	} {
		err := volume.Errorf(volume.InUse, "volume /v: %w", cause)
		got := WithBrokerParty(WithAdvice(err))
		text := strings.TrimSuffix(got.Error(), "; "+want)
		check.That(t, text == err.Error() && volume.KindOf(got) == volume.InUse && errors.Is(got, cause), "%v: %v", err, got)
	}
}
