package loopdev

import (
	"errors"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestDeviceThatIsBeingFreed: until the kernel has freed a device, it still names its backing, but does not answer.
func TestDeviceThatIsBeingFreed(t *testing.T) {
	is := &unix.LoopInfo64{}
	for name, c := range map[string]struct {
		errs  []error // one for each look; then the device answers
		named int     // looks after which the backing is still named
		info  *unix.LoopInfo64
		err   error
	}{
		"answers":             {named: 9, info: is},
		"freed at once":       {errs: []error{unix.ENXIO}},
		"freed soon":          {errs: []error{unix.ENXIO, unix.EBUSY, unix.ENXIO}, named: 2},
		"somebody else's":     {errs: []error{unix.EBUSY, unix.EBUSY}, named: 9, info: is},
		"never freed":         {errs: make([]error, freeing), named: freeing, err: unix.ENXIO},
		"another error":       {errs: []error{unix.EIO}, named: 9, err: unix.EIO},
		"hangs, then is gone": {errs: []error{unix.EIO}},
	} {
		synctest.Test(t, func(t *testing.T) {
			looks := 0
			look := func() (*unix.LoopInfo64, error) {
				if looks++; looks > len(c.errs) {
					return is, nil
				}
				if c.errs[looks-1] == nil {
					return nil, unix.ENXIO
				}
				return nil, c.errs[looks-1]
			}
			info, err := bound(look, func() bool { return looks <= c.named })
			check.That(t, info == c.info && errors.Is(err, c.err), "%s: %v, %v", name, info, err)
		})
	}
}
