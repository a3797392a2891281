//go:build system

package broker

import (
	"context"
	"testing"

	"github.com/crust-proxy/crust-proxy/test/rig"
)

// BenchmarkStageUnstage is the core's part of a stage and an unstage, without
// gRPC and without a runtime handler's files.
func BenchmarkStageUnstage(b *testing.B) {
	n := newNode(b)
	in := n.instruction("pod-1", rig.Disk(b, 16*mib, ""))
	ctx := context.Background()
	for b.Loop() {
		if _, err := n.Defer(ctx, in); err != nil {
			b.Fatal(err)
		}
		if _, err := n.Release(ctx, in.Target); err != nil {
			b.Fatal(err)
		}
	}
}
