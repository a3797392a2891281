package csi

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/front/csi/staging"
	"github.com/crust-proxy/crust-proxy/internal/front/policy"
	"github.com/crust-proxy/crust-proxy/pkg/volume"
)

func TestCallsWaitShortlyForTheirVolume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all Front
		end, err := all.lock(t.Context(), staging.VolumeID{Driver: "d", ID: "v"})
		if err != nil {
			t.Fatal(err)
		}
		if other, err := all.lock(t.Context(), staging.VolumeID{Driver: "d", ID: "w"}); err != nil {
			t.Errorf("another volume waits: %v", err)
		} else {
			other()
		}
		began := time.Now()
		_, err = all.lock(t.Context(), staging.VolumeID{Driver: "d", ID: "v"})
		if volume.KindOf(err) != volume.Busy || time.Since(began) != lockTimeout {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err = all.lock(ctx, staging.VolumeID{Driver: "d", ID: "v"}); volume.KindOf(err) != volume.Busy {
			t.Errorf("with a deadline: %v", err)
		}
		end()
	})
}

// TestVolumeIDsCannotForgeALog: errors of volumes that are not deferred are logged as they are.
func TestVolumeIDsCannotForgeALog(t *testing.T) {
	id := "vol-1\nforged" + strings.Repeat("x", 1<<20)
	r := newRig(t, &policy.Policy{})
	stage := r.stageReq()
	stage.VolumeId = id
	for _, code := range []codes.Code{codes.Unavailable, codes.Internal} {
		r.driver.fail("stage-mount", status.Error(code, "no"))
		r.driver.fail("unstage", status.Error(code, "no"))
		err := r.tryStage(stage)
		if code == codes.Internal {
			r.refused(err, codes.Aborted, "could not be undone yet")
		}
		for _, err := range []error{err, callUnderWay(staging.VolumeID{Driver: driverName, ID: id})} {
			if text := err.Error(); len(text) > 1<<10 || strings.Contains(text, "\n") {
				t.Errorf("%v: %d bytes: %.100q", code, len(text), text)
			}
		}
	}
}
