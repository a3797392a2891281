package crustrunc

import (
	"fmt"
	"time"

	"github.com/crust-proxy/crust-proxy/internal/fsops"
)

// freeze and thaw are words of the ABI that this handler does not know yet.
func (o ops) freeze(target string, _ time.Duration) error {
	return fmt.Errorf("volume %s: freeze: %w", target, fsops.ErrUnsupported)
}

func (o ops) thaw(target string) error {
	return fmt.Errorf("volume %s: thaw: %w", target, fsops.ErrUnsupported)
}
