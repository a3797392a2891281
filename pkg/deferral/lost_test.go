package deferral

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/crust-proxy/crust-proxy/pkg/deferral/claim"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestNewerRecordIsLeftAlone when the orchestrator publishes its volume again.
func TestNewerRecordIsLeftAlone(t *testing.T) {
	b, _ := newTestBroker(t)
	image := filepath.Join(t.TempDir(), "image")
	check.Must(t, os.WriteFile(image, nil, 0o600))
	again := testRecord(b.cfg.Root + "/mount")
	again.Boot, again.Device = b.boot, claim.Identify(image)
	newer := *again
	newer.Version++
	check.Must(t, b.store.put(&newer))
	path := b.store.path(volumesDir, newer.Key)
	before, err := os.ReadFile(path)
	check.Must(t, err)
	check.Must(t, b.Load(t.Context()))
	target, err := b.targets.root.Resolve(newer.Target)
	check.Must(t, err)
	defer target.Close()
	_, err = b.lost.deferAgain(t.Context(), b.table.get(newer.Key), again, target)
	if err == nil || volume.KindOf(err) != volume.Busy {
		t.Errorf("published again: %v", err)
	}
	if after, err := os.ReadFile(path); !bytes.Equal(before, after) {
		t.Errorf("the record is %s, %v", after, err)
	}
}
