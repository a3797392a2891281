package doctor

import (
	"cmp"
	"context"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func checkKubelet(_ context.Context, n Node, _ Daemon) []Finding {
	root := n.Config.KubeletRoot
	info, err := os.Stat(n.at(root))
	if err != nil || !info.IsDir() {
		return []Finding{warning("where kubelet's --root-dir is another one, set kubeletRoot in crust-proxy's configuration",
			"the kubelet root %s is not a directory that can be seen", root)}
	}
	m, problem := n.mountOf(root)
	if m == nil {
		return []Finding{problem}
	}
	if sharedGroup(m) != "" {
		return []Finding{okay("%s lies on %s, whose mounts are shared", root, m.Mountpoint)}
	}
	return []Finding{failure("mount --make-rshared "+quoted(m.Mountpoint),
		"%s lies on %s, whose mounts are not shared: a guard made by crust-proxy is not seen by kubelet and the container runtime where they have mount namespaces of their own",
		root, m.Mountpoint)}
}

// checkNamespaces checks that the programs see each other's mounts. A unit with PrivateTmp= or
// ProtectSystem= prevents that, and so does a container without bidirectional mount propagation.
func checkNamespaces(ctx context.Context, n Node, _ Daemon) (found []Finding) {
	running := mountViews(ctx, n, "crust-proxy", "kubelet", "containerd", "crio")
	ours := running["crust-proxy"]
	delete(running, "crust-proxy")
	if len(ours) == 0 || len(running) == 0 {
		return []Finding{skipped("not compared: %s can be looked at", show.Either(len(ours) == 0, "no crust-proxy process", "no process of kubelet, containerd or crio"))}
	}
	sharing := "mount " + quoted(n.Config.KubeletRoot) + " with mountPropagation: Bidirectional"
	do := show.Either(n.Service.InPod, "let the DaemonSet ",
		"systemctl cat crust-proxy: no directive may give it a mount namespace of its own (ProtectSystem=, PrivateTmp=, ...); in a container, ") + sharing
	others := slices.Sorted(maps.Keys(running))
	for _, other := range others {
		if !slices.ContainsFunc(running[other], func(view string) bool { return slices.Contains(ours, view) }) {
			found = append(found, failure(do, "crust-proxy and %s are in different mount namespaces: its guards may not be seen there", other))
		}
	}
	return orOK(found, "crust-proxy shares its mounts with %s", strings.Join(others, " and "))
}

// mountViews returns how the processes with these names see mounts, except those that we may not inspect: the
// namespace of each, and the peer group of the mount that holds kubelet's root, if there is one. Mounts of one process
// reach another if they have one of them in common.
func mountViews(ctx context.Context, n Node, names ...string) map[string][]string {
	views := map[string][]string{}
	root, groups := n.resolve(n.Config.KubeletRoot), map[string]string{} // of each namespace, also of our own
	if m, _ := n.mountOf(root); m != nil {
		own, _ := os.Readlink(n.at("/proc/self/ns/mnt"))
		groups[own] = sharedGroup(m)
	}
	comms, _ := filepath.Glob(n.at("/proc/[0-9]*/comm")) // the pattern is constant and well formed
	for _, comm := range comms {
		data, err := os.ReadFile(comm) // #nosec G304 -- a name that the kernel listed
		name, dir := strings.TrimSpace(string(data)), filepath.Dir(comm)
		if err != nil || !slices.Contains(names, name) {
			continue
		}
		link, err := os.Readlink(filepath.Join(dir, "ns/mnt"))
		if err != nil {
			continue
		}
		group, known := groups[link]
		if !known {
			table, err := mountTable(ctx, filepath.Join(dir, "mountinfo"))
			if m := mountOf(table, root); m != nil {
				group = sharedGroup(m)
			}
			if err == nil {
				groups[link] = group
			}
		}
		views[name] = append(views[name], link)
		if group != "" {
			views[name] = append(views[name], group)
		}
	}
	return views
}

// sharedGroup is the field of a mount that names the peer group with which it shares mounts; "" if there is none.
func sharedGroup(m *mountinfo.Info) string {
	for field := range strings.FieldsSeq(m.Optional) {
		if strings.HasPrefix(field, "shared:") {
			return field
		}
	}
	return ""
}

type guardMounts struct {
	// target is where the guard itself is mounted, empty where only binds of it are left.
	target string
	binds  []string
	// over is what is mounted over the target, on top of the guard.
	over *mountinfo.Info
}

func checkGuards(ctx context.Context, n Node, d Daemon) []Finding {
	table, err := n.table()
	if err != nil {
		return []Finding{noTable(err)}
	}
	guards := guardsIn(table)
	found := guardFindings(guards, d)
	if !d.up() {
		return append(found, skipped("%d guards are mounted; they cannot be compared with the records, for the daemon could not be asked", len(guards)))
	}
	if len(found) > 0 && d.Again != nil { // pods may have started and ended since the volumes were listed
		if d.Volumes, err = d.Again(ctx); err == nil {
			still := guardFindings(guards, d)
			found = slices.DeleteFunc(found, func(f Finding) bool { return !slices.Contains(still, f) })
		}
	}
	return orOK(found, "each of %d guards has its record, and each record its guard", len(guards))
}

func guardFindings(guards map[string]*guardMounts, d Daemon) (found []Finding) {
	recorded := map[string]bool{}
	for _, v := range d.Volumes {
		recorded[v.GetId()] = true
	}
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
	return found
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
