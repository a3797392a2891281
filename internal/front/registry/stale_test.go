package registry

import (
	"context"
	"os"
	"testing"

	"go.uber.org/zap"
)

// TestNothingIsStaleWhenTheDaemonEnds: sessions give their drivers' names back then, while
// a last look at the directories may still be under way. The registrations must stay, or
// kubelet would take the drivers from the node.
func TestNothingIsStaleWhenTheDaemonEnds(t *testing.T) {
	path := t.TempDir() + "/disk.csi.example.com" + Suffix
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r := New(Config{Log: zap.NewNop()})
	found := map[string]socketID{path: idAt(path)}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	r.dropStale(ended, found)
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("it was removed when the daemon ended: %v", err)
	}
	r.dropStale(t.Context(), found)
	if _, err := os.Lstat(path); err == nil {
		t.Error("nobody serves it, and it stays")
	}
}
