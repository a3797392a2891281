package vm

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func testSpec() *specs.Spec {
	return &specs.Spec{
		Root: &specs.Root{Path: "rootfs", Readonly: true}, Process: &specs.Process{}, Hooks: &specs.Hooks{},
		Annotations: map[string]string{"a": "b"},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/etc/hosts", Type: "bind", Source: "/var/lib/hosts", Options: []string{"rbind", "ro"}},
			{Destination: "/data", Type: "bind", Source: "/target", Options: []string{"rbind", "rw"}},
			{Destination: "/sub", Source: "/var/lib/sub", Options: []string{"bind", "rro", "rslave"}},
		},
		Linux: &specs.Linux{CgroupsPath: "/kubepods/x", Seccomp: &specs.LinuxSeccomp{}, Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}}},
	}
}

func TestGuestSpec(t *testing.T) {
	spec := testSpec()
	raw, binds, err := guestSpec("c1", "/bundle", spec, []*oci.Mount{{Index: 2}})
	check.Must(t, err)
	want := []bind{
		{name: "c1/rootfs", source: "/bundle/rootfs"}, // read-only only once the guest has created its mount points
		{name: "c1/1", source: "/var/lib/hosts", readOnly: true},
		{name: "c1/3", source: "/var/lib/sub", readOnly: true, recursive: true, slave: true},
	}
	check.Same(t, cmp.Diff(want, binds, cmp.AllowUnexported(bind{})), "-want +got")
	var inGuest specs.Spec
	check.Must(t, json.Unmarshal(raw, &inGuest))
	var sources []string
	for _, m := range inGuest.Mounts {
		sources = append(sources, m.Source)
	}
	check.Same(t, cmp.Diff([]string{"proc", "/run/crust/shared/c1/1", "", "/run/crust/shared/c1/3"}, sources), "-want +got")
	check.That(t, inGuest.Root.Path == "/run/crust/shared/c1/rootfs" && inGuest.Linux.Seccomp == nil && inGuest.Linux.CgroupsPath == "", "%s", raw)
	check.Same(t, cmp.Diff(testSpec(), spec), "the container's own spec was changed")
}

func TestWhatAContainerCannotHave(t *testing.T) {
	for word, change := range map[string]func(*specs.Spec){
		"hooks":            func(s *specs.Spec) { s.Hooks.CreateRuntime = []specs.Hook{{Path: "/bin/true"}} },
		"/dev/fuse":        func(s *specs.Spec) { s.Linux.Devices = []specs.LinuxDevice{{Path: "/dev/fuse"}} },
		"user namespace":   func(s *specs.Spec) { s.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.UserNamespace}} },
		"maps owners":      func(s *specs.Spec) { s.Mounts[1].UIDMappings = []specs.LinuxIDMapping{{Size: 1}} },
		"mount at /data":   func(s *specs.Spec) { s.Mounts[2].Options = []string{"rbind", "rshared"} },
		"mountPropagation": func(s *specs.Spec) { s.Mounts[2].Options = []string{"rbind", "shared"} },
		"mount at /sub":    func(s *specs.Spec) { s.Mounts[3].Options = []string{"rbind", "rshared"} },
		"":                 func(*specs.Spec) {},
	} {
		spec := testSpec()
		change(spec)
		err := checkSpec(spec)
		check.That(t, (err == nil) == (word == "") && (err == nil || strings.Contains(err.Error(), word)), "%q: %v", word, err)
	}
}

func TestSpecThatCannotBeRead(t *testing.T) {
	for _, content := range []string{"{", "{}"} {
		bundle := t.TempDir()
		check.Must(t, os.WriteFile(bundle+"/config.json", []byte(content), 0o600))
		check.Fails(t, check.Err(readSpec(bundle)), "config.json")
	}
}
