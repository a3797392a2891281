package doctor

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

func checkKubelet(_ context.Context, n Node, _ Daemon) []Finding {
	info, err := os.Stat(n.at(n.KubeletRoot))
	if err != nil || !info.IsDir() {
		return []Finding{warning("where kubelet's --root-dir is another one, set it in crust-proxy's configuration and give crustctl doctor --kubelet-root",
			"the kubelet root %s is not a directory that can be seen", n.KubeletRoot)}
	}
	m, problem := n.mountOf(n.KubeletRoot)
	if m == nil {
		return []Finding{problem}
	}
	if sharedGroup(m) != "" {
		return []Finding{okay("%s lies on %s, whose mounts are shared", n.KubeletRoot, m.Mountpoint)}
	}
	return []Finding{failure("mount --make-rshared "+quoted(m.Mountpoint),
		"%s lies on %s, whose mounts are not shared: a guard made by crust-proxy is not seen by kubelet and the container runtime where they have mount namespaces of their own",
		n.KubeletRoot, m.Mountpoint)}
}

// checkNamespaces checks that the programs see each other's mounts. A unit with PrivateTmp= or
// ProtectSystem= prevents that, and so does a container without bidirectional mount propagation.
func checkNamespaces(ctx context.Context, n Node, _ Daemon) []Finding {
	running := mountViews(ctx, n, "crust-proxy", "kubelet", "containerd", "crio")
	ours := running["crust-proxy"]
	if len(ours) == 0 {
		return []Finding{okay("not compared: no crust-proxy process can be looked at")}
	}
	sharing := "mount " + quoted(n.KubeletRoot) + " with mountPropagation: Bidirectional"
	do := "systemctl cat crust-proxy: no directive may give it a mount namespace of its own (ProtectSystem=, PrivateTmp=, ...); in a container, " + sharing
	if n.Service.InPod {
		do = "let the DaemonSet " + sharing
	}
	var found []Finding
	for _, other := range []string{"kubelet", "containerd", "crio"} {
		if theirs := running[other]; len(theirs) > 0 && !shareMounts(ours, theirs) {
			found = append(found, failure(do,
				"crust-proxy and %s are in different mount namespaces: its guards may not be seen there", other))
		}
	}
	return orOK(found, "crust-proxy shares its mounts with kubelet and the container runtime where they run")
}

// mountView is how a process sees mounts: its namespace, and the peer group of the mount
// that holds kubelet's root, "" if there is none.
type mountView struct{ namespace, group string }

// mountViews returns the views of the processes with these names, except those that we may not
// inspect.
func mountViews(ctx context.Context, n Node, names ...string) map[string][]mountView {
	views := map[string][]mountView{}
	root := n.resolve(n.KubeletRoot)
	comms, _ := filepath.Glob(n.at("/proc/[0-9]*/comm")) // the pattern is constant and well formed
	for _, comm := range comms {
		data, err := os.ReadFile(comm) // #nosec G304 -- a name that the kernel listed
		name, dir := strings.TrimSpace(string(data)), filepath.Dir(comm)
		if err != nil || !slices.Contains(names, name) {
			continue
		}
		if link, err := os.Readlink(filepath.Join(dir, "ns/mnt")); err == nil {
			view := mountView{namespace: link}
			table, _ := mountTable(ctx, filepath.Join(dir, "mountinfo"))
			if m := mountOf(table, root); m != nil {
				view.group = sharedGroup(m)
			}
			views[name] = append(views[name], view)
		}
	}
	return views
}

// shareMounts reports whether one of ours and one of theirs are in one mount namespace, or
// mounts propagate between them.
func shareMounts(ours, theirs []mountView) bool {
	return slices.ContainsFunc(ours, func(a mountView) bool {
		return slices.ContainsFunc(theirs, func(b mountView) bool {
			return a.namespace == b.namespace || a.group != "" && a.group == b.group
		})
	})
}

// sharedGroup is the field of a mount that names the peer group with which it shares
// mounts; "" if there is none.
func sharedGroup(m *mountinfo.Info) string {
	for field := range strings.FieldsSeq(m.Optional) {
		if strings.HasPrefix(field, "shared:") {
			return field
		}
	}
	return ""
}
