package crust

import (
	"context"
	"os"
	"testing"

	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestForeignDevicesAreAdoptedWhateverTheVolumeIs: the device has an owner, also where
// we know nothing of the volume's type.
func TestForeignDevicesAreAdoptedWhateverTheVolumeIs(t *testing.T) {
	b := newBench(t, bySocket)
	v := b.Volume("foreign")
	check.Must(t, os.Mkdir(b.path(v, ""), 0o700))
	check.Must(t, os.WriteFile(b.path(v, abi.InfoName), []byte(`{"volume-type":"network","device":"/dev/vdq","metadata":{"crust.device":"x"}}`), 0o600))
	b.h.AdoptForeign()
	if got := b.h.Adopted(); len(got) != 1 || got[0].Device.Path != "/dev/vdq" {
		t.Errorf("adopted %v", got)
	}
}

// TestForeignDirectoryThatGoesBeforeItIsWatched: another program removes it after
// AdoptForeign and before Run.
func TestForeignDirectoryThatGoesBeforeItIsWatched(t *testing.T) {
	b := newBench(t, bySocket)
	b.stop()
	h, err := New(b.cfg, b.sandboxes, zap.NewNop())
	check.Must(t, err)
	gone, stays := b.Volume("gone"), b.Volume("stays")
	b.PublishForeign(t, gone)
	b.PublishForeign(t, stays)
	h.AdoptForeign()
	if got := h.Adopted(); len(got) != 2 {
		t.Fatalf("adopted %v", got)
	}
	check.Must(t, os.RemoveAll(b.path(gone, "")))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	check.Eventually(t, "it is not listed any more", func() bool { return len(h.Adopted()) == 1 })
	if got := h.Adopted(); len(got) != 1 || got[0].Key != stays.Key {
		t.Errorf("adopted %v", got)
	}
	cancel()
	check.Must(t, <-ended)
}
