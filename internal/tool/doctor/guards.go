package doctor

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
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
	recorded := map[string]bool{}
	for _, v := range d.Volumes {
		recorded[v.GetId()] = true
	}
	var found []Finding
	for _, key := range slices.Sorted(maps.Keys(guards)) {
		g := guards[key]
		if g.over != nil { // a filesystem on the host, which must never be
			found = append(found, failure("find out who mounted it; it must not be written from two sides: umount "+quoted(g.target),
				"%s (%s) is mounted on the host over the guarded target %s", g.over.Source, g.over.FSType, g.target))
		}
		if d.up() && !recorded[key] {
			found = append(found, warning("crustctl reconcile; where it stays, it may belong to another crust-proxy on this node",
				"the guard of volume %s on %s has no record in this daemon: it is stale", show.ShortID(key), cmp.Or(g.target, strings.Join(g.binds, ", "))))
		}
	}
	if !d.up() {
		return append(found, okay("%d guards are mounted; they cannot be compared with the records while the daemon is down", len(guards)))
	}
	guarded := []adminv1.VolumeState{
		adminv1.VolumeState_VOLUME_STATE_PUBLISHED, adminv1.VolumeState_VOLUME_STATE_BOUND, adminv1.VolumeState_VOLUME_STATE_DEGRADED,
	}
	for _, v := range d.Volumes {
		if g := guards[v.GetId()]; slices.Contains(guarded, v.GetState()) && (g == nil || g.target == "") {
			found = append(found, failure("crustctl reconcile",
				"volume %s has a record and no guard on its target: a runtime that ignores the volume would write to the node's disk (or crustctl runs in another mount namespace)",
				v.GetTargetPath()))
		}
	}
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
