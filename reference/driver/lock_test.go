package driver

import (
	"context"
	"testing"
	"time"
)

// TestVolumesWithoutSourceDoNotWaitForEachOther: one blank volume that takes long to make
// must not keep the others from being made.
func TestVolumesWithoutSourceDoNotWaitForEachOther(t *testing.T) {
	var l locks
	release, err := l.take(t.Context(), "vol-1", "")
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	other, err := l.take(ctx, "vol-2", "")
	if err != nil {
		t.Fatal(err)
	}
	other()
}
