package refusal

import (
	"errors"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/internal/ground/openers"
	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestAdvice: each typed error of the core gets its advice once, and keeps its kind and its type.
func TestAdvice(t *testing.T) {
	for cause, want := range map[error]string{
		claim.ErrLost: DeletePod, &claim.HeldError{}: EndVM, &claim.OwnedError{Target: "/t"}: WaitForIt, errors.New("another"): "",
		&claim.HeldError{By: openers.Users{Kernel: true, Names: "loop1 is mounted at /mnt; unmount it"}}: "",
	} {
		err := volume.Errorf(volume.InUse, "volume /v: %w", cause)
		got := WithBrokerParty(WithAdvice(err))
		text := strings.TrimSuffix(got.Error(), "; "+want)
		check.That(t, text == err.Error() && volume.KindOf(got) == volume.InUse && errors.Is(got, cause), "%v: %v", err, got)
	}
}
