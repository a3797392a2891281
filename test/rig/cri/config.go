package cri

import (
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
)

// config is containerd's configuration, in the form of its version: 1.x reads
// version 2, and 2.x has CRI in parts, which version 3 names.
func (n *Node) config() (string, error) {
	out, err := exec.Command(n.program("containerd"), "--version").Output()
	if err != nil {
		return "", fmt.Errorf("ask containerd's version: %w", err)
	}
	fields := strings.Fields(string(out))
	if len(fields) < 3 {
		return "", fmt.Errorf("containerd says of its version: %q", out)
	}
	if strings.HasPrefix(strings.TrimPrefix(fields[2], "v"), "1.") {
		return n.head(2) + n.configOf1(), nil
	}
	return n.head(3) + n.configOf2(), nil
}

func (n *Node) head(version int) string {
	return fmt.Sprintf("version = %d\nroot = %q\nstate = %q\n[grpc]\n  address = %q\n", version, n.Dir+"/root", n.Dir+"/state", n.Socket)
}

// Not every root may lower an OOM score, and AppArmor's parser may be missing.
const relaxed = "  restrict_oom_score_adj = true\n  disable_apparmor = true\n"

func (n *Node) configOf1() string {
	const cri = `plugins."io.containerd.grpc.v1.cri"`
	return "[" + cri + "]\n" + relaxed +
		fmt.Sprintf("  sandbox_image = %q\n", PauseImage) +
		"  stream_server_address = \"127.0.0.1\"\n" +
		fmt.Sprintf("[%s.cni]\n  conf_dir = %q\n", cri, n.Dir+"/cni") +
		n.runtimes(cri)
}

func (n *Node) configOf2() string {
	const cri = `plugins."io.containerd.cri.v1.runtime"`
	return "[" + cri + "]\n" + relaxed +
		fmt.Sprintf("[%s.cni]\n  conf_dir = %q\n  bin_dirs = [%q]\n", cri, n.Dir+"/cni", n.opts.Programs+"/cni") +
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
