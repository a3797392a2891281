//go:build system

package driver_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/crust-proxy/crust-proxy/reference/conformance"
	"github.com/crust-proxy/crust-proxy/reference/conformance/csidriver"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/sanity"
)

// TestSanity runs csi-sanity, with both access types, plain and native: native on a
// filesystem with reflinks, and plain where data is copied if that of the machine has none. CI has
// native mounts only, and those of test/front, where the driver is called through crust-proxy.
func TestSanity(t *testing.T) {
	program := sanity.Program(t)
	for _, native := range rig.Sample([]bool{true, false}, 2) {
		for _, kind := range rig.Sample([]string{"mount", "block"}, 2) {
			name, pool := kind+"-plain", ""
			if native {
				name, pool = kind+"-native", "xfs"
			}
			t.Run(name, func(t *testing.T) {
				r := newDriverOn(t, pool, native)
				socket, hidden := sanity.HideDeferral(t, r.conn, r.dir, nil)
				if !native {
					socket = r.socket()
				}
				ran, skipped := sanity.Run(t, program, r.dir, socket, kind)
				check.That(t, !native || hidden.Load() != 0, "the driver never reported DEFER_FS_OPS")
				check.That(t, ran >= 45, "only %d specs ran", ran)
				check.Same(t, cmp.Diff(notOffered(), skipped), "skipped -want +got")
			})
		}
	}
}

// TestSnapshotMetadataSpecs runs crust-conformance snapshot-metadata: each demand is met,
// where data is shared and where it is copied.
func TestSnapshotMetadataSpecs(t *testing.T) {
	for _, pool := range rig.Sample(pools, 2) {
		t.Run(pool, func(t *testing.T) {
			r := newDriverOn(t, pool, false)
			report := check.Value(csidriver.RunMetadata(t.Context(), r.conn, csidriver.Options{Size: 16 * mib, Dir: r.dir}, func(result conformance.Result) {
				check.That(t, result.Status == conformance.Pass, "%v", result)
			}))(t)
			check.That(t, len(report.Results) >= 15, "only %d specs ran", len(report.Results))
		})
	}
}
