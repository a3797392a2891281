package daemon

import (
	"context"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/crust-proxy/crust-proxy/internal/ground/pace"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
)

// hostMountsTime bounds one scan of the mount table. With 10,000 volumes it takes a
// fraction of a second.
const hostMountsTime = 5 * time.Second

// hostMounts finds volumes whose device is mounted on the host. Concurrent callers share
// one scan.
type hostMounts struct {
	volumes func() []deferral.Status
	scans   singleflight.Group
}

// findings names the volumes, each with the remedy. It ends when ctx ends.
func (h *hostMounts) findings(ctx context.Context) []string {
	shared := h.scans.DoChan("", func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), hostMountsTime)
		defer cancel()
		return h.scan(ctx)
	})
	select {
	case done := <-shared:
		if done.Err != nil {
			return []string{fmt.Sprintf("it is not known whether devices of volumes are mounted on the host: %v", done.Err)}
		}
		found, _ := done.Val.([]string)
		return found
	case <-ctx.Done():
		return nil
	}
}

func (h *hostMounts) scan(ctx context.Context) ([]string, error) {
	volumes := h.volumes()
	points, err := deferral.HostMounts(ctx, volumes)
	if err != nil {
		return nil, err
	}
	var out []string
	var loop pace.Loop
	for _, v := range volumes {
		loop.Step()
		if at := points[v.Key]; len(at) > 0 {
			out = append(out, fmt.Sprintf("volume %s: its device %s is mounted on the host at %s: unmount it",
				v.Target, v.Device.Path, strings.Join(at, ", ")))
		}
	}
	return out, nil
}
