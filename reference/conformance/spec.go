package conformance

import (
	"cmp"
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// writeBundle writes a bundle like that of containerd's CRI plugin, as far as volumes are
// concerned.
func writeBundle(bundle string, spec *specs.Spec) (string, error) {
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		return "", err
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return "", err
	}
	return bundle, os.WriteFile(filepath.Join(bundle, "config.json"), raw, 0o600)
}

func baseSpec(rootfs string, command ...string) *specs.Spec {
	capabilities := []string{
		"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_LINUX_IMMUTABLE",
	}
	return &specs.Spec{
		Version: "1.0.2",
		Process: &specs.Process{
			Args: append([]string{"/probe", ProbeWord}, command...), Cwd: "/", Env: []string{"PATH=/"}, NoNewPrivileges: true,
			Capabilities: &specs.LinuxCapabilities{Bounding: capabilities, Effective: capabilities, Permitted: capabilities},
		},
		Root: &specs.Root{Path: rootfs, Readonly: true},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/tmp", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "nodev", "mode=1777"}},
		},
		Linux: &specs.Linux{},
	}
}

// sandboxSpec is the pause container.
func (p *pod) sandboxSpec() *specs.Spec {
	spec := baseSpec(p.n.path("rootfs"), "sleep")
	spec.Hostname = "conformance"
	spec.Linux.Namespaces = []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace}, {Type: specs.NetworkNamespace},
	}
	spec.Annotations = p.annotations("sandbox", "")
	return spec
}

// containerSpec is a container of the pod, which shares the sandbox's namespaces.
func (p *pod) containerSpec(name string, binds []bind) *specs.Spec {
	spec := baseSpec(p.n.path("rootfs"), "sleep")
	of := func(ns string) string { return filepath.Join("/proc", p.sandbox.pid, "ns", ns) }
	spec.Linux.Namespaces = []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.MountNamespace},
		{Type: specs.IPCNamespace, Path: of("ipc")}, {Type: specs.UTSNamespace, Path: of("uts")}, {Type: specs.NetworkNamespace, Path: of("net")},
	}
	spec.Annotations = p.annotations("container", name)
	for _, b := range binds {
		spec.Mounts = append(spec.Mounts, b.mount())
	}
	return spec
}

func (b bind) mount() specs.Mount {
	return specs.Mount{
		Destination: b.at, Type: "bind", Source: b.source, Options: []string{"rbind", "rprivate", cmp.Or(b.mode, "rw")},
		UIDMappings: b.owners, GIDMappings: b.owners,
	}
}

func (p *pod) annotations(kind, name string) map[string]string {
	all := map[string]string{
		"io.kubernetes.cri.container-type": kind, "io.kubernetes.cri.sandbox-id": p.sandbox.id, "io.kubernetes.cri.sandbox-uid": p.uid,
		"io.kubernetes.cri.sandbox-name": "conformance", "io.kubernetes.cri.sandbox-namespace": "default",
	}
	if name != "" {
		all["io.kubernetes.cri.container-name"] = name
	}
	return all
}
