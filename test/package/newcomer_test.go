//go:build system

package package_test

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

const aCluster = "it needs a cluster; TestQuickStart of test/kube takes the files from there, and types no command"

// left are the commands and files of the pages that the newcomer leaves out, by section and text, of which ... stands
// for the rest.
var left = map[string]string{
	"Try it: make demo-vm":          "QEMU and a kernel are half a gigabyte; test/vm has such pods",
	"Try it: make test":             "this is one of them",
	"Install and use: crustctl top": "it runs until a key is pressed; internal/tool/top has its tests",
	"One node, no cluster: git clone https://github.com/crust-proxy/crust-proxy && cd crust-proxy && make package": "README.md had it done",

	"A cluster with crust-runc: # /etc/crust-proxy/config.yaml ...":                                                             aCluster,
	"A cluster with crust-runc: mkdir -p /etc/systemd/system/crust-proxy.service.d":                                             aCluster,
	"A cluster with crust-runc: cp /usr/share/crust-proxy/{crust-runc,cluster}.conf /etc/systemd/system/crust-proxy.service.d/": aCluster,
	"A cluster with crust-runc: systemctl daemon-reload && systemctl restart crust-proxy && crustctl doctor --quiet --wait 30s": aCluster,
	"A cluster with crust-runc: mkdir -p /run/crust-driver /var/lib/kubelet/crust-proxy/registry":                               aCluster,
	"A cluster with crust-runc: systemd-run --unit crust-driver ...":                                                            aCluster,
	"A cluster with crust-runc: crustctl drivers":                                                                               aCluster,
	"A cluster with crust-runc: grep -e kubernetes.io~csi/data /proc/self/mountinfo ...":                                        aCluster,
	"A cluster with crust-runc: crustctl list":                                                                                  aCluster,
}

// TestNewcomer does on a bare Debian what the pages tell newcomers, as it is printed, in the order in which they
// read: all commands have to succeed, and to print what the page prints.
func TestNewcomer(t *testing.T) {
	s := newcomer(t)
	met, names := map[string]bool{}, slices.Collect(maps.Keys(left))
	for _, page := range []string{"README.md", "docs/quick-start.md", "docs/driver-authors.md", "docs/runtime-authors.md"} {
		text := check.Value(os.ReadFile("../../" + page))(t)
		steps := check.Value(stepsOf(string(text)))(t)
		check.That(t, len(steps) != 0, "%s has no commands", page)
		for _, step := range steps {
			if name := leftAs(step, names); name != "" {
				met[name] = true
			} else if !s.do(step) {
				t.Fatalf("%s: a newcomer gets no further", page)
			}
		}
	}
	for _, name := range names {
		check.That(t, met[name], "no page has what is left out as %q", name)
	}
}

// leftAs returns the name under which a step is left out, or nothing.
func leftAs(step step, names []string) string {
	text := step.text
	if step.file == "" {
		text, _, _ = strings.Cut(text, " # ")
	}
	words := strings.Fields(step.section + ": " + text)
	for _, name := range names {
		begin, more := strings.CutSuffix(name, " ...")
		want := strings.Fields(begin)
		if slices.Equal(words, want) || more && len(words) > len(want) && slices.Equal(words[:len(want)], want) {
			return name
		}
	}
	return ""
}

// newcomer boots a bare Debian that has Go, as go.dev installs it, and finds the repository where the pages
// say it is. What Go and containerd were built from is not downloaded again.
func newcomer(t *testing.T) *shell {
	t.Helper()
	rig.Need(t, "debootstrap")
	debian, err := rig.Script("debian.sh", "trixie")
	if err != nil {
		rig.Missing(t, err.Error())
	}
	containerd := check.Value(rig.Script("containerd.sh"))(t)
	if len(rig.GroupDirs("demo")) == 0 { // where control groups are of version 1, the pod's are this machine's
		t.Cleanup(func() { check.Must(t, rig.RemoveGroup("demo")) })
	}
	repository := t.TempDir()
	run(t, "git", "clone", "--quiet", "--bare", "../..", repository)
	bind := func(from, to string) string { return "--bind=" + from + ":" + to }
	env := func(name string) string { return strings.TrimSpace(run(t, "go", "env", name)) }
	var open []*os.File
	t.Cleanup(func() { detachOver(t, open) })
	m := bootOver(t, debian, "size=6g", "--resolv-conf=copy-host", "--system-call-filter=@keyring", "--bind=/dev/loop-control",
		bind(repository, "/srv/repository"), "--bind-ro="+env("GOROOT")+":/usr/local/go",
		bind(env("GOMODCACHE"), "/root/go/pkg/mod"), bind(env("GOCACHE"), "/root/.cache/go-build"),
		"--bind-ro="+containerd+":/root/.cache/crust-proxy/"+filepath.Base(containerd))
	const config = "[url \"/srv/repository\"]\n\tinsteadOf = https://github.com/crust-proxy/crust-proxy\n[safe]\n\tdirectory = *\n"
	check.Must(t, os.WriteFile(m.path("/root/.gitconfig"), []byte(config), 0o644))
	check.Must(t, os.WriteFile(m.path("/etc/apt/apt.conf.d/retries"), []byte("Acquire::Retries \"5\";\n"), 0o644))
	for _, path := range []string{"/root/.gitconfig", "/tmp", "/run", "/dev/shm"} { // on each of the machine's filesystems
		open = append(open, check.Value(os.Open(m.path(path)))(t))
	}
	// Control groups of version 1, where this machine has them, can be read only.
	m.run("sh", "-c", "for n in $(seq 0 255); do mknod /dev/loop$n b 7 $n; done; "+
		"for dir in $(grep -o ' /sys/fs/cgroup/[^ ]*' /proc/mounts); do mount -o remount,bind,rw $dir; done")
	return m.shell()
}
