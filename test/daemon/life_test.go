//go:build system

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// metric reads one value from /metrics; one that is not there is 0.
func metric(t *testing.T, d *rig.Daemon, name string) (value float64) {
	t.Helper()
	body := check.Value(d.HTTP("/metrics"))(t)
	for line := range strings.SplitSeq(body, "\n") {
		if text, ok := strings.CutPrefix(line, name); ok {
			check.Must(t, check.Err(fmt.Sscan(text, &value)))
		}
	}
	return value
}

func TestTerminationLetsCallsEnd(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start("CRUST_FAILPOINTS=stage-recorded=sleep:700ms")
	req := d.StageRequest("pod-1", rig.Disk(t, 16*mib, "ext4"))
	client := d.Runtime()
	watch := check.Value(d.Admin().WatchVolumes(t.Context(), &adminv1.WatchVolumesRequest{}))(t)
	_, err := watch.Recv() // SYNCED
	check.Must(t, err)
	done := check.Begin(func() error { return check.Err(client.RuntimeStageVolume(t.Context(), req)) })
	check.Eventually(t, "the call is under way", func() bool {
		records, _ := filepath.Glob(d.Dir + "/run/state/volumes/*.json")
		return len(records) == 1
	})
	d.Signal(syscall.SIGTERM)
	ended := <-done
	check.That(t, ended == nil, "a call under way was cut off: %v", ended)
	for err == nil {
		_, err = watch.Recv()
	}
	check.Code(t, err, codes.Unavailable)
	check.Equal(t, d.WaitEnd(time.Minute), 0, "exit code")
	for _, socket := range []string{d.RuntimeSocket, d.AdminSocket} {
		_, err = os.Lstat(socket)
		check.That(t, err != nil, "%s is left", socket)
	}
	d.Start()
	unstage(t, d, req)
	d.WantClean()
}

// TestOpenStreamsDoNotHoldUpTheEnd: health watches and reflection have no end of their own.
func TestOpenStreamsDoNotHoldUpTheEnd(t *testing.T) {
	t.Parallel()
	d := rig.NewDaemon(t)
	d.Start()
	for _, socket := range []string{d.RuntimeSocket, d.AdminSocket} {
		conn := d.Dial(socket)
		health := check.Value(healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{}))(t)
		served := check.Value(health.Recv())(t)
		check.That(t, served.GetStatus() == healthv1.HealthCheckResponse_SERVING, "%s: %v", socket, served)
		stream := check.Value(reflectionv1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context()))(t)
		check.Must(t, stream.Send(&reflectionv1.ServerReflectionRequest{MessageRequest: &reflectionv1.ServerReflectionRequest_ListServices{}}))
		reply := check.Value(stream.Recv())(t)
		check.That(t, strings.Contains(reply.String(), "crust."), "%s: reflection lists %v", socket, reply)
	}
	d.Signal(syscall.SIGTERM)
	check.Equal(t, d.WaitEnd(time.Minute), 0, "exit code")
	check.That(t, !strings.Contains(d.Log(), "cut off"), "the streams were waited for:\n%s", d.Log())
}

// TestNothingLeaks looks at the daemon from outside before and after much work.
func TestNothingLeaks(t *testing.T) {
	d := rig.NewDaemon(t)
	d.Start()
	disk := rig.Disk(t, 32*mib, "ext4")
	req := d.StageRequest("pod-1", disk)
	mounted, _ := guest(t, rig.Disk(t, 32*mib, "ext4")) // a mount of the disk itself would refuse the next claim
	client := d.Runtime()
	work := func(times int) {
		for range times {
			check.Must(t, check.Err(client.RuntimeStageVolume(t.Context(), req)))
			shim := boot(t, d, "sandbox", req.GetVolumeTargetPath(), disk, mounted)
			check.Must(t, check.Err(client.RuntimeGetVolumeStats(t.Context(), &runtimev1.RuntimeGetVolumeStatsRequest{
				VolumeTargetPath: req.GetVolumeTargetPath(),
			})))
			check.Must(t, shim.Stop())
			check.Must(t, check.Err(client.RuntimeUnstageVolume(t.Context(), unstageRequest(req))))
		}
	}
	work(5)
	count := func() (fds int, routines float64) {
		return len(rig.FDs(t, d.Pid())), metric(t, d, "go_goroutines ")
	}
	time.Sleep(200 * time.Millisecond)
	fds, routines := count()
	work(100)
	// The daemon may do some things more or less at a time; what leaks does so a hundred times.
	check.Succeeds(t, "no more descriptors and goroutines than before", func() error {
		if now, nowRoutines := count(); now > fds+10 || nowRoutines > routines+10 {
			return fmt.Errorf("%d descriptors, %v goroutines; %d and %v before", now, nowRoutines, fds, routines)
		}
		return nil
	})
	d.WantClean()
}
