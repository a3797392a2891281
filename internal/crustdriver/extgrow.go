package crustdriver

import (
	"context"
	"fmt"

	"github.com/crust-proxy/crust-proxy/internal/fsops"
)

// growExt lets an ext4 that is not mounted grow to its device. Once it is mounted
// that takes CAP_SYS_RESOURCE, which root in a container may not have; before, it
// takes none.
func (d *Driver) growExt(ctx context.Context, id, device string) error {
	if err := fsops.GrowUnmounted(ctx, device, "ext4"); err != nil {
		return fmt.Errorf("volume %q: %w", id, err)
	}
	return nil
}
