package runc

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/oci"
	"github.com/crust-proxy/crust-proxy/reference/handler"
	"github.com/crust-proxy/crust-proxy/test/check"
)

func TestSharedMountsAreRefused(t *testing.T) {
	for option, refused := range map[string]bool{"rshared": true, "shared": true, "rslave": false, "rprivate": false} {
		spec := &specs.Spec{Mounts: []specs.Mount{{Options: []string{"rbind", option, "rw"}}}}
		if err := checkMounts("runc", spec, []*oci.Mount{{Destination: "/data"}}); (err != nil) != refused {
			t.Errorf("%s: %v", option, err)
		}
	}
}

// A runtime that takes what we cannot read would show the guards.
func TestSpecThatCannotBeRead(t *testing.T) {
	bundle := t.TempDir()
	check.Must(t, os.WriteFile(bundle+"/config.json", []byte(`{"mounts": [{"source": 1}]}`), 0o600))
	c := &creator{in: handler.Invocation{Bundle: bundle}}
	if err := c.prepare(); err == nil || !strings.Contains(err.Error(), "config.json") {
		t.Errorf("it says %v", err)
	}
}

func TestOwnersOfAVolumesFiles(t *testing.T) {
	const (
		able   = `echo '{"linux":{"mountExtensions":{"idmap":{"enabled":true}}}}'`
		unable = `echo '{"linux":{"mountExtensions":{"idmap":{"enabled":false}}}}'`
		older  = `echo '{"linux":{"namespaces":["user"]}}'`
	)
	ids := []specs.LinuxIDMapping{{HostID: 200000, Size: 65536}}
	for name, c := range map[string]struct {
		namespace     bool
		uids, gids    []specs.LinuxIDMapping
		runtime, says string
	}{
		"the node's users":      {false, nil, nil, "exit 1", ""},
		"mapped":                {true, ids, ids, able, ""},
		"mapped without users":  {false, ids, ids, able, ""},
		"no mappings":           {true, nil, nil, able, "has no ID mappings"},
		"users alone":           {true, ids, nil, able, "has no ID mappings"},
		"a runc that does not":  {true, ids, ids, unable, "runc 1.2"},
		"a runc of before":      {true, ids, ids, older, "runc 1.2"},
		"a runc without a word": {true, ids, ids, "exit 1", "cannot be told"},
	} {
		t.Run(name, func(t *testing.T) {
			runtime := filepath.Join(t.TempDir(), "runc")
			check.Must(t, os.WriteFile(runtime, []byte("#!/bin/sh\n"+c.runtime+"\n"), 0o700)) //nolint:gosec // it is run
			spec := &specs.Spec{Linux: &specs.Linux{}, Mounts: []specs.Mount{{}, {UIDMappings: c.uids, GIDMappings: c.gids}}}
			if c.namespace {
				spec.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.UserNamespace}}
			}
			err := checkMounts(runtime, spec, []*oci.Mount{{Index: 1, Destination: "/data"}})
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("it says %v, want %q", err, c.says)
			}
		})
	}
}
