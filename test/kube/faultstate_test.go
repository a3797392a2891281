//go:build system

package kube_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/kubelet"
)

// own are the parts of a name that are one volume's or one pod's own.
var own = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{8,}|loop[0-9]+|fault-[a-z0-9-]+`)

// shape is everything that pods and volumes have on the node, without the names: two
// nodes with as many pods of the same kinds have one shape.
func shape(k *cluster.Kube) []string {
	var out []string
	for _, one := range k.Left() {
		// Processes come and go while a pod writes; containers are looked at otherwise.
		if !strings.HasPrefix(one, "process ") {
			out = append(out, own.ReplaceAllString(one, "*"))
		}
	}
	slices.Sort(out)
	return out
}

// admin asks the daemon as crustctl does.
func admin[T any](ask func(adminv1.AdminClient) (T, error)) (T, error) {
	conn, err := rig.Connect(cluster.AdminSocket)
	if err != nil {
		var none T
		return none, err
	}
	defer func() { _ = conn.Close() }()
	return ask(adminv1.NewAdminClient(conn))
}

// volumesOf are the volumes that crust-proxy tells of, by target.
func volumesOf(ctx context.Context) (map[string]*adminv1.Volume, error) {
	reply, err := admin(func(c adminv1.AdminClient) (*adminv1.ListVolumesResponse, error) {
		return c.ListVolumes(ctx, &adminv1.ListVolumesRequest{})
	})
	out := make(map[string]*adminv1.Volume)
	for _, v := range reply.GetVolumes() {
		out[v.GetTargetPath()] = v
	}
	return out, err
}

// allBound wants the volumes of the writers deferred and in their sandboxes, and
// nothing else on record: nothing refused, degraded or on its way out.
func allBound(ctx context.Context, deferred []*writer) error {
	has, err := volumesOf(ctx)
	if err != nil {
		return err
	}
	for _, w := range deferred {
		v := has[w.Target(w.on.Volume)]
		switch {
		case v == nil:
			return fmt.Errorf("crust-proxy does not know the volume of pod %s", w.Name)
		case v.GetState() != adminv1.VolumeState_VOLUME_STATE_BOUND:
			return fmt.Errorf("the volume of pod %s is %s: %s", w.Name, v.GetState(), v.GetLastError())
		case v.GetSandbox().GetId() != w.sandbox:
			return fmt.Errorf("pod %s has the sandbox %s, and its volume is said to be in %s", w.Name, w.sandbox, v.GetSandbox().GetId())
		}
		delete(has, w.Target(w.on.Volume))
	}
	for target, v := range has {
		return fmt.Errorf("there is a volume too many at %s, which is %s: %s", target, v.GetState(), v.GetLastError())
	}
	return nil
}

// statsNow asks the front for a volume's usage, as kubelet does, and compares it with what the pod's own df tells.
func statsNow(ctx context.Context, w *writer) error {
	conn, err := rig.Connect(filepath.Join(cluster.ProxyRunDir, "csi", w.on.Driver+".sock"))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	reply, err := csi.NewNodeClient(conn).NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: w.on.Handle, VolumePath: w.Target(w.on.Volume),
	})
	if err != nil {
		return err
	}
	inside := w.DF("/data")
	for _, usage := range reply.GetUsage() {
		if usage.GetUnit() == csi.VolumeUsage_BYTES && (usage.GetTotal() != inside.Total || usage.GetUsed() != inside.Used) {
			return fmt.Errorf("pod %s: the front tells %v, df tells %+v", w.Name, usage, inside)
		}
	}
	condition, err := kubelet.Condition(reply)
	if err != nil || condition.GetAbnormal() {
		return fmt.Errorf("pod %s: %s", w.Name, condition.GetMessage())
	}
	return nil
}

// hashed is a volume's handle as the driver and kubelet have it in a file's name.
func hashed(v *cluster.Volume) string {
	hash := sha256.Sum256([]byte(v.Handle))
	return hex.EncodeToString(hash[:])
}

// attached tells whether the driver has a volume's image on a loop device.
func attached(k *cluster.Kube, v *cluster.Volume) bool {
	return len(rig.Loops(filepath.Join(k.Dir, "data", v.Driver, "images", hashed(v)))) > 0
}

// mentioned tells whether one of the files of a pattern has some words.
func mentioned(pattern, words string) bool {
	found, _ := filepath.Glob(pattern)
	return slices.ContainsFunc(found, func(path string) bool {
		raw, _ := os.ReadFile(path)
		return bytes.Contains(raw, []byte(words))
	})
}

// stagedFor tells whether the front remembers a stage of a volume, recorded whether
// crust-proxy has one at a target, and guarded whether its guard is there.
func stagedFor(v *cluster.Volume) bool {
	return mentioned(cluster.ProxyRunDir+"/state/csi/*.json", v.Handle)
}

func recorded(target string) bool {
	return mentioned(cluster.ProxyRunDir+"/state/volumes/*.json", target)
}

func guarded(target string) bool {
	return slices.ContainsFunc(rig.Mounts(target), func(m *mountinfo.Info) bool {
		return m.Mountpoint == target && m.FSType == "tmpfs" && strings.HasPrefix(m.Source, "crust:")
	})
}
