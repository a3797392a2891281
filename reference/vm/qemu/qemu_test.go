package qemu

import (
	"os"
	"os/exec"
	"testing"
)

// The guest that proves KVM runs: here by emulation, which is everywhere.
func TestTheSmallestGuestEnds(t *testing.T) {
	program, err := exec.LookPath("qemu-system-x86_64")
	if err != nil || os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("it takes QEMU and root")
		}
		t.Skip("it takes QEMU and root")
	}
	if err := probe(program, 1_900_000_000, false); err != nil {
		t.Fatal(err)
	}
	t.Log("by KVM:", ProbeKVM(program, 1_900_000_000))
}
