package daemon

import (
	"context"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

// TestLookAtHostMountsIsShared: the mount table is read once for all volumes and all
// who ask at a time, and a caller who goes away waits no longer.
func TestLookAtHostMountsIsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks, goOn := 0, make(chan struct{})
		h := &hostMounts{volumes: func() []deferral.Status {
			looks++
			<-goOn
			return mountedVolumes(t)
		}}
		gone, leave := context.WithCancel(t.Context())
		left := make(chan []string, 1)
		go func() { left <- h.findings(gone) }()
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				found := h.findings(t.Context())
				if len(found) != 2 || !strings.HasPrefix(found[0], "volume /pods/a/mount: ") ||
					!strings.Contains(found[1], "is mounted on the host at /proc") || !strings.Contains(found[1], "unmount it") {
					t.Errorf("found %q", found)
				}
			})
		}
		synctest.Wait()
		leave()
		if found := <-left; found != nil {
			t.Errorf("a caller who has gone is told %q", found)
		}
		close(goOn)
		all.Wait()
		if looks != 1 {
			t.Errorf("%d looks for 9 callers of one moment", looks)
		}
	})
}

// mountedVolumes are two volumes of one device, which is that of /proc, and one of
// a device that is mounted nowhere.
func mountedVolumes(t *testing.T) []deferral.Status {
	var st unix.Stat_t
	if err := unix.Stat("/proc", &st); err != nil {
		t.Error(err)
	}
	status := func(target string, major, minor uint32) deferral.Status {
		return deferral.Status{Volume: &volume.Volume{
			Key: volume.KeyOf(target), Target: target,
			Device: volume.Device{Kind: volume.BlockDevice, Path: "/dev/x", Major: major, Minor: minor},
		}}
	}
	major, minor := unix.Major(st.Dev), unix.Minor(st.Dev)
	return []deferral.Status{status("/pods/a/mount", major, minor), status("/pods/b/mount", major, minor), status("/pods/c/mount", 4095, 1)}
}

// TestLookAtHostMountsEndsInTime: an ended context ends the look at the table.
func TestLookAtHostMountsEndsInTime(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := deferral.HostMounts(ctx, mountedVolumes(t)); err == nil {
		t.Error("the mount table was read for a caller who has gone")
	}
}
