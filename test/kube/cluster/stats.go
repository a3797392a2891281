//go:build system

package cluster

import (
	"context"
	"encoding/json"
	"fmt"
)

// summary is what of kubelet's /stats/summary is read here.
type summary struct {
	Pods []struct {
		PodRef struct {
			UID string `json:"uid"`
		} `json:"podRef"`
		Volume []struct {
			Name           string `json:"name"`
			CapacityBytes  int64  `json:"capacityBytes"`
			UsedBytes      int64  `json:"usedBytes"`
			AvailableBytes int64  `json:"availableBytes"`
			Inodes         int64  `json:"inodes"`
			InodesUsed     int64  `json:"inodesUsed"`
			InodesFree     int64  `json:"inodesFree"`
		} `json:"volume"`
	} `json:"pods"`
}

// Stats is what kubelet's /stats/summary says of one of the pod's volumes, by the
// name that it has in the pod. Kubelet asks every ten seconds.
func (p *Pod) Stats(ctx context.Context, volume string) (Usage, error) {
	raw, err := p.k.Client.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes/" + NodeName + "/proxy/stats/summary").DoRaw(ctx)
	if err != nil {
		return Usage{}, err
	}
	var all summary
	if err := json.Unmarshal(raw, &all); err != nil {
		return Usage{}, err
	}
	for _, pod := range all.Pods {
		for _, one := range pod.Volume {
			if pod.PodRef.UID == string(p.UID) && one.Name == volume {
				return Usage{
					Total: one.CapacityBytes, Used: one.UsedBytes, Available: one.AvailableBytes,
					TotalInodes: one.Inodes, UsedInodes: one.InodesUsed, AvailableInodes: one.InodesFree,
				}, nil
			}
		}
	}
	return Usage{}, fmt.Errorf("kubelet has no stats of volume %s of pod %s", volume, p.Name)
}

// WaitStats waits until kubelet tells what df tells inside, and gives it.
func (p *Pod) WaitStats(v *Volume, path string) Usage {
	p.k.T.Helper()
	var inside Usage
	p.k.Eventually("stats of volume "+v.Name+" are what df tells", func(ctx context.Context) error {
		stats, err := p.Stats(ctx, v.Name)
		if err != nil {
			return err
		}
		if inside = p.DF(path); stats != inside {
			return fmt.Errorf("kubelet tells %+v, df tells %+v", stats, inside)
		}
		return nil
	})
	return inside
}
