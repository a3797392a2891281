package cri

import (
	"fmt"
	"maps"
	"slices"
)

// Not every root may lower an OOM score, and AppArmor's parser may be missing.
const relaxed = "  restrict_oom_score_adj = true\n  disable_apparmor = true\n"

// config is containerd's configuration.
func (n *Node) config() string {
	const cri = `plugins."io.containerd.cri.v1.runtime"`
	return fmt.Sprintf("version = 3\nroot = %q\nstate = %q\n[grpc]\n  address = %q\n", n.Dir+"/root", n.Dir+"/state", n.Socket) +
		"[" + cri + "]\n" + relaxed +
		fmt.Sprintf("[%s.cni]\n  conf_dir = %q\n  bin_dirs = [%q]\n", cri, n.Dir+"/cni", n.programs+"/cni") +
		fmt.Sprintf("[plugins.\"io.containerd.cri.v1.images\".pinned_images]\n  sandbox = %q\n", PauseImage) +
		"[plugins.\"io.containerd.grpc.v1.cri\"]\n  stream_server_address = \"127.0.0.1\"\n" +
		n.runtimes(cri)
}

func (n *Node) runtimes(cri string) string {
	text := fmt.Sprintf("[%s.containerd.runtimes.runc]\n  runtime_type = \"io.containerd.runc.v2\"\n", cri)
	for _, name := range slices.Sorted(maps.Keys(n.opts.Handlers)) {
		text += fmt.Sprintf("[%s.containerd.runtimes.%q]\n  runtime_type = \"io.containerd.runc.v2\"\n", cri, name) +
			fmt.Sprintf("[%s.containerd.runtimes.%q.options]\n  BinaryName = %q\n", cri, name, n.opts.Handlers[name])
	}
	return text
}
