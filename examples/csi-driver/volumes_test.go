package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"k8s.io/mount-utils"
	utilexec "k8s.io/utils/exec"
)

// TestFormatsBlankOnly: a device that has data is not formatted, whatever its marker says. The call's deadline does
// not end mkfs.
func TestFormatsBlankOnly(t *testing.T) {
	for _, program := range []string{"mkfs.ext4", "blkid"} {
		if _, err := exec.LookPath(program); err != nil && os.Getenv("CI") != "true" {
			t.Skip(err)
		}
	}
	d := &driver{data: t.TempDir(), mounter: mount.NewSafeFormatAndMount(mount.New(""), utilexec.New())}
	image := d.image("v")
	if err := resize(image, 16<<20); err != nil {
		t.Fatal(err)
	}
	passed, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.format(passed, "v", image, "ext4"); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	for _, marker := range []string{"ext4", ""} {
		if err := os.WriteFile(d.marker("v"), []byte(marker), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := d.format(t.Context(), "v", image, "ext4"); err != nil {
			t.Errorf("marker %q: %v", marker, err)
		}
		now, err := os.ReadFile(image)
		if err != nil || !bytes.Equal(before, now) {
			t.Errorf("marker %q: it was formatted again (%v)", marker, err)
		}
		if holds, err := os.ReadFile(d.marker("v")); string(holds) != "ext4" {
			t.Errorf("marker %q: it is now %q, %v", marker, holds, err)
		}
	}
	blind := t.TempDir()
	if err := errors.Join(os.WriteFile(d.marker("v"), nil, 0o600), os.WriteFile(blind+"/blkid", []byte("#!/bin/sh\nexit 2\n"), 0o755)); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	t.Setenv("PATH", blind+":"+os.Getenv("PATH"))
	if err := d.format(t.Context(), "v", image, "ext4"); err == nil {
		t.Error("a filesystem that blkid does not find was formatted")
	}
	if now, err := os.ReadFile(image); err != nil || !bytes.Equal(before, now) {
		t.Errorf("blkid finds nothing: it was written to (%v)", err)
	}
	if err := mkfs(t.Context(), d.data+"/none", "ext4"); err == nil || !strings.Contains(err.Error(), "/none: ") || strings.HasSuffix(err.Error(), "status 1: ") {
		t.Errorf("mkfs that fails: %v", err)
	}
}
