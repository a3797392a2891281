//go:build system

package driver_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/test/sanity"
)

// TestSanity runs csi-sanity, with both access types, plain and native.
func TestSanity(t *testing.T) {
	program := sanity.Program(t)
	for _, native := range []bool{false, true} {
		for _, kind := range []string{"mount", "block"} {
			name := kind + "-plain"
			if native {
				name = kind + "-native"
			}
			t.Run(name, func(t *testing.T) {
				r := newDriver(t, native)
				socket := r.socket()
				if native {
					socket = sanity.HideDeferral(t, r.conn, r.dir)
				}
				ran, skipped := sanity.Run(t, program, r.dir, socket, kind)
				if ran < 45 {
					t.Errorf("only %d specs ran", ran)
				}
				if diff := cmp.Diff(notOffered(), skipped); diff != "" {
					t.Errorf("skipped -want +got:\n%s", diff)
				}
				r.wantNothing()
			})
		}
	}
}
