package doctor

import (
	"bytes"
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

// checkNamespaces compares the mounts of the programs that must see each other's: a
// unit with PrivateTmp= or ProtectSystem= cuts them off, and so does a container
// whose mounts do not go both ways.
func checkNamespaces(_ context.Context, n Node, _ Daemon) []Finding {
	running := processes(n, "crust-proxy", "kubelet", "containerd", "crio")
	ours := running["crust-proxy"]
	if len(ours) == 0 {
		return []Finding{okay("not compared: no crust-proxy process can be looked at")}
	}
	var found []Finding
	for _, other := range []string{"kubelet", "containerd", "crio"} {
		if theirs := running[other]; len(theirs) > 0 && !shareMounts(ours, theirs, n.resolve(n.KubeletRoot)) {
			found = append(found, failure(adviseSharing(n),
				"crust-proxy and %s are in different mount namespaces: its guards may not be seen there", other))
		}
	}
	return orOK(found, "crust-proxy shares its mounts with kubelet and the container runtime where they run")
}

func adviseSharing(n Node) string {
	bidirectional := "mount " + quoted(n.KubeletRoot) + " with mountPropagation: Bidirectional"
	if n.Service.InPod {
		return "let the DaemonSet " + bidirectional
	}
	return "systemctl cat crust-proxy: no directive may give it a mount namespace of its own (ProtectSystem=, PrivateTmp=, ...); in a container, " +
		bidirectional
}

type mountView struct {
	namespace string
	// table is the file with its mounts.
	table string
}

// processes gives the views of the processes with these names, except those that we may
// not inspect.
func processes(n Node, names ...string) map[string][]mountView {
	views := map[string][]mountView{}
	comms, _ := filepath.Glob(n.at("/proc/[0-9]*/comm")) // the pattern is constant and well formed
	for _, comm := range comms {
		data, err := os.ReadFile(comm) // #nosec G304 -- a name that the kernel listed
		if err != nil {
			continue
		}
		name, dir := strings.TrimSpace(string(data)), filepath.Dir(comm)
		if !slices.Contains(names, name) {
			continue
		}
		if link, err := os.Readlink(filepath.Join(dir, "ns/mnt")); err == nil {
			views[name] = append(views[name], mountView{namespace: link, table: filepath.Join(dir, "mountinfo")})
		}
	}
	return views
}

// shareMounts tells whether one of ours and one of theirs are in one mount namespace, or
// whether mounts below path propagate between them: both have it on mounts of one peer
// group.
func shareMounts(ours, theirs []mountView, path string) bool {
	for _, a := range ours {
		for _, b := range theirs {
			if a.namespace == b.namespace {
				return true
			}
			if group := a.peerGroup(path); group != "" && group == b.peerGroup(path) {
				return true
			}
		}
	}
	return false
}

// peerGroup is the peer group of the mount that holds path, as the process sees it; ""
// if there is none.
func (v mountView) peerGroup(path string) string {
	data, err := os.ReadFile(v.table) // #nosec G304 -- below a name that the kernel listed
	if err != nil {
		return ""
	}
	table, err := mountinfo.GetMountsFromReader(bytes.NewReader(data), nil)
	if err != nil {
		return ""
	}
	if m := mountOf(table, path); m != nil {
		return sharedGroup(m)
	}
	return ""
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
