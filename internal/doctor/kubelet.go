package doctor

import (
	"context"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

func checkKubelet(_ context.Context, n Node, _ Daemon) []Finding {
	info, err := os.Stat(n.at(n.KubeletRoot))
	if err != nil || !info.IsDir() {
		return []Finding{warning("where kubelet's --root-dir is another one, set it in crust-proxy's configuration and give crustctl doctor --kubelet-root",
			"the kubelet root %s is not a directory that can be seen", n.KubeletRoot)}
	}
	table, err := n.mounts()
	if err != nil {
		return []Finding{warning("", "the mount table cannot be read: %v", err)}
	}
	m := mountOf(table, n.resolve(n.KubeletRoot))
	if m == nil {
		return []Finding{warning("", "no mount holds %s", n.KubeletRoot)}
	}
	for _, field := range strings.Fields(m.Optional) {
		if strings.HasPrefix(field, "shared:") {
			return []Finding{okay("%s lies on %s, whose mounts are shared", n.KubeletRoot, m.Mountpoint)}
		}
	}
	return []Finding{failure("mount --make-rshared "+quoted(m.Mountpoint),
		"%s lies on %s, whose mounts are not shared: a guard made by crust-proxy is not seen by kubelet and the container runtime where they have mount namespaces of their own",
		n.KubeletRoot, m.Mountpoint)}
}

// checkNamespaces compares the mount namespaces of the programs that must see
// each other's mounts: a unit with PrivateTmp= or ProtectSystem= cuts them off.
func checkNamespaces(_ context.Context, n Node, _ Daemon) []Finding {
	spaces := n.namespaces("crust-proxy", "kubelet", "containerd", "crio")
	ours, running := spaces["crust-proxy"]
	if !running {
		return []Finding{okay("not compared: no crust-proxy process can be looked at")}
	}
	var found []Finding
	for _, other := range []string{"kubelet", "containerd", "crio"} {
		theirs, there := spaces[other]
		if there && len(intersect(ours, theirs)) == 0 {
			found = append(found, failure("systemctl cat crust-proxy: no directive may give it a mount namespace of its own (ProtectSystem=, PrivateTmp=, ...)",
				"crust-proxy and %s are in different mount namespaces: its guards may not be seen there", other))
		}
	}
	return orOK(found, "crust-proxy shares its mount namespace with kubelet and the container runtime where they run")
}

// namespaces tells in which mount namespaces processes of these names are. What
// may not be looked at is left out.
func (n Node) namespaces(names ...string) map[string][]string {
	spaces := map[string][]string{}
	comms, _ := filepath.Glob(n.at("/proc/[0-9]*/comm")) // the pattern is constant and well formed
	for _, comm := range comms {
		data, err := os.ReadFile(comm) // #nosec G304 -- a name that the kernel listed
		if err != nil {
			continue
		}
		for _, name := range names {
			if strings.TrimSpace(string(data)) != name {
				continue
			}
			if link, err := os.Readlink(filepath.Join(filepath.Dir(comm), "ns/mnt")); err == nil {
				spaces[name] = append(spaces[name], link)
			}
		}
	}
	return spaces
}

func intersect(a, b []string) []string {
	sort.Strings(b)
	var both []string
	for _, s := range a {
		if i := sort.SearchStrings(b, s); i < len(b) && b[i] == s {
			both = append(both, s)
		}
	}
	return both
}
