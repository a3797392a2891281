package main

import (
	"os"
	"testing"
)

// TestHelpHasNothingOfTheBuilder: the same sources give the same pages everywhere.
func TestHelpHasNothingOfTheBuilder(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("CRUSTCTL_SOCKET", "/builders.sock")
	if err := os.WriteFile(dir+"/crustctl", []byte("#!/bin/sh\necho \"${CRUSTCTL_SOCKET-usual} ${HOME-none} $LC_ALL\"\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	if help, err := helpOf(dir, "crustctl", nil); err != nil || help != "usual none C\n" {
		t.Errorf("%q, %v", help, err)
	}
}
