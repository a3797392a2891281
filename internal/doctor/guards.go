package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/internal/cli/show"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

type guardMounts struct {
	// target is where the guard itself is mounted, empty where only binds of it
	// are left.
	target string
	binds  []string
	// over is what is mounted over the target, on top of the guard.
	over *mountinfo.Info
}

func checkGuards(_ context.Context, n Node, d Daemon) []Finding {
	table, err := n.table()
	if err != nil {
		return []Finding{noTable(err)}
	}
	guards := guardsIn(table)
	found := covered(guards)
	if !d.up() {
		return append(found, okay("%d guards are mounted; they cannot be compared with the records while the daemon is down", len(guards)))
	}
	found = append(found, staleGuards(guards, d.Volumes)...)
	found = append(found, missingGuards(guards, d.Volumes)...)
	return orOK(found, "each of %d guards has its record, and each record its guard", len(guards))
}

// guardsIn gathers the guards. A guard's key is made of its own mount point, so
// the guard itself can be told from its binds.
func guardsIn(table []*mountinfo.Info) map[string]*guardMounts {
	guards := map[string]*guardMounts{}
	byTarget := map[string]*guardMounts{}
	for _, m := range table {
		key, isGuard := strings.CutPrefix(m.Source, abi.GuardPrefix)
		if g := byTarget[m.Mountpoint]; g != nil && !isGuard {
			g.over = m
		}
		if !isGuard {
			continue
		}
		g := guards[key]
		if g == nil {
			g = &guardMounts{}
			guards[key] = g
		}
		if string(volume.KeyOf(m.Mountpoint)) == key {
			g.target = m.Mountpoint
			byTarget[m.Mountpoint] = g
		} else {
			g.binds = append(g.binds, m.Mountpoint)
		}
	}
	return guards
}

// covered finds targets with a filesystem on the host, which must never be.
func covered(guards map[string]*guardMounts) []Finding {
	var found []Finding
	for _, key := range slices.Sorted(maps.Keys(guards)) {
		if g := guards[key]; g.over != nil {
			found = append(found, failure(fmt.Sprintf("find out who mounted it; it must not be written from two sides: umount %s", quoted(g.target)),
				"%s (%s) is mounted on the host over the guarded target %s", g.over.Source, g.over.FSType, g.target))
		}
	}
	return found
}

func staleGuards(guards map[string]*guardMounts, volumes []*adminv1.Volume) []Finding {
	known := map[string]bool{}
	for _, v := range volumes {
		known[v.GetId()] = true
	}
	var found []Finding
	for _, key := range slices.Sorted(maps.Keys(guards)) {
		if known[key] {
			continue
		}
		where := cmp.Or(guards[key].target, strings.Join(guards[key].binds, ", "))
		found = append(found, warning("crustctl reconcile; where it stays, it may belong to another crust-proxy on this node",
			"the guard of volume %s on %s has no record in this daemon: it is stale", show.ShortID(key), where))
	}
	return found
}

func missingGuards(guards map[string]*guardMounts, volumes []*adminv1.Volume) []Finding {
	var found []Finding
	for _, v := range volumes {
		if !wantsGuard(v) {
			continue
		}
		if g := guards[v.GetId()]; g == nil || g.target == "" {
			found = append(found, failure("crustctl reconcile",
				"volume %s has a record and no guard on its target: a runtime that ignores the volume would write to the node's disk (or crustctl runs in another mount namespace)",
				v.GetTargetPath()))
		}
	}
	return found
}

func wantsGuard(v *adminv1.Volume) bool {
	switch v.GetState() {
	case adminv1.VolumeState_VOLUME_STATE_PUBLISHED, adminv1.VolumeState_VOLUME_STATE_BOUND,
		adminv1.VolumeState_VOLUME_STATE_DEGRADED:
		return true
	default:
		return false
	}
}
