package fsops

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// TestGrowthIsNotCutOff ends the caller's context while resize2fs is at work: a
// filesystem that is half grown may be lost. No limit ends it either.
func TestGrowthIsNotCutOff(t *testing.T) {
	dir := t.TempDir()
	device, begun, more := filepath.Join(dir, "device"), filepath.Join(dir, "begun"), filepath.Join(dir, "more")
	image := make([]byte, 1<<20)
	copy(image[extStart+extMagic:], "\x53\xef")
	image[extStart+extGroupBlocks+1] = 0x80
	check.Must(t, os.WriteFile(device, image, 0o600))
	// A confined program can write to no file but the device; it can set times.
	check.Must(t, os.WriteFile(begun, nil, 0o600))
	check.Must(t, os.Chtimes(begun, time.Time{}, time.Unix(0, 0)))
	check.Must(t, unix.Mkfifo(more, 0o600))
	for name, script := range map[string]string{
		"e2fsck": "exit 1", "resize2fs": "touch -c " + begun + "; read _ < " + more +
			"; [ \"$(ulimit -t) $(ulimit -v) $(read -r oom </proc/self/oom_score_adj; echo $((oom < 1000)))\" = 'unlimited unlimited 1' ] && echo grown 1<> " + device,
	} {
		check.Must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755)) //nolint:gosec // a program
	}
	t.Setenv("PATH", dir)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- GrowUnmounted(ctx, device, "ext4") }()
	check.Eventually(t, "resize2fs was begun", func() bool {
		info, err := os.Stat(begun)
		return err == nil && info.ModTime().Unix() != 0
	})
	cancel()
	// Open for both, it waits for no reader: there may be none any more.
	fifo, err := os.OpenFile(more, os.O_RDWR, 0)
	check.Must(t, err)
	defer func() { _ = fifo.Close() }()
	_, err = fifo.WriteString("\n")
	check.Must(t, err)
	check.Must(t, <-done)
	if is, err := os.ReadFile(device); err != nil || !strings.HasPrefix(string(is), "grown\n") {
		t.Errorf("resize2fs did not end its work: %.20q, %v", is, err)
	}
}
