package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
	"github.com/crust-proxy/crust-proxy/reference/fsops"
	"github.com/crust-proxy/crust-proxy/reference/handler"
)

// supervisorVolumes serves `crust-vm crust ...`: it finds the sandbox that has a volume, and
// calls its supervisor over the Handler API, as crust-proxy does.
type supervisorVolumes struct{ cfg Config }

type supervisorError struct {
	text string
	kind error
}

func (e *supervisorError) Error() string { return e.text }
func (e *supervisorError) Unwrap() error { return e.kind }

// callSupervisor calls the newest live sandbox that has the volume.
func callSupervisor[Q, A any](
	v supervisorVolumes, target string, method func(handlerv1.HandlerClient, context.Context, *Q, ...grpc.CallOption) (*A, error), req *Q,
) (*A, string, error) {
	sandbox, err := v.sandbox(target)
	if err != nil {
		return nil, "", err
	}
	conn, err := grpc.NewClient("unix://"+v.cfg.sandbox(sandbox).volumesSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	reply, err := method(handlerv1.NewHandlerClient(conn), ctx, req)
	if err != nil {
		is := status.Convert(err)
		return nil, sandbox, &supervisorError{text: is.Message(), kind: kindOfCode[is.Code()]}
	}
	return reply, sandbox, nil
}

// sandbox returns the newest live sandbox that has the volume.
func (v supervisorVolumes) sandbox(target string) (string, error) {
	dir, err := abi.Open(v.cfg.Root, abi.DirName(target))
	if errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("volume %s: %w: it is not published to this runtime", target, handler.ErrNoSandbox)
	}
	if err != nil {
		return "", err
	}
	defer func() { _ = dir.Close() }()
	ids, err := dir.Sandboxes()
	if err != nil {
		return "", err
	}
	for _, id := range ids {
		r, err := v.cfg.findRecord(id)
		if err != nil && !errors.Is(err, errUnknown) {
			return "", err // the sandbox may be alive
		}
		if err == nil && r.isSandbox() && !r.Process.Ended() {
			return id, nil
		}
	}
	return "", fmt.Errorf("volume %s: %w", target, handler.ErrNoSandbox)
}

func (v supervisorVolumes) Stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	stats, sandbox, err := callSupervisor(v, target, handlerv1.HandlerClient.GetVolumeStats, &handlerv1.GetVolumeStatsRequest{TargetPath: target})
	if err != nil {
		return reply, sandbox, err
	}
	for _, u := range stats.GetUsage() {
		unit := abi.UnitBytes
		if u.GetUnit() == runtimev1.VolumeUsage_INODES {
			unit = abi.UnitInodes
		}
		reply.Usage = append(reply.Usage, abi.Usage{Available: u.GetAvailable(), Total: u.GetTotal(), Used: u.GetUsed(), Unit: unit})
	}
	condition := stats.GetVolumeCondition()
	reply.Condition = &abi.Condition{Abnormal: condition.GetAbnormal(), Message: condition.GetMessage(), Reason: condition.GetReason()}
	return reply, sandbox, nil
}

func (v supervisorVolumes) Resize(target string, required, limit int64) (int64, error) {
	reply, _, err := callSupervisor(v, target, handlerv1.HandlerClient.ResizeVolume, &handlerv1.ResizeVolumeRequest{
		TargetPath: target, CapacityRange: &runtimev1.CapacityRange{RequiredBytes: required, LimitBytes: limit},
	})
	return reply.GetCapacityBytes(), err
}

func (v supervisorVolumes) Freeze(target string, timeout time.Duration) error {
	_, _, err := callSupervisor(v, target, handlerv1.HandlerClient.FreezeVolume,
		&handlerv1.FreezeVolumeRequest{TargetPath: target, Timeout: durationpb.New(timeout)})
	return err
}

// Thaw ends a freeze. If the machine has ended, so has the freeze, and the caller must learn
// that what it read of the device meanwhile may not be of one moment.
func (v supervisorVolumes) Thaw(target string) error {
	_, _, err := callSupervisor(v, target, handlerv1.HandlerClient.ThawVolume, &handlerv1.ThawVolumeRequest{TargetPath: target})
	if errors.Is(err, handler.ErrNoSandbox) {
		err = fmt.Errorf("volume %s: %w: no sandbox has it", target, fsops.ErrNotFrozen)
	}
	return err
}

// ThawExpired does nothing: each guest thaws its volumes itself.
func (supervisorVolumes) ThawExpired() abi.ThawExpiredReply { return abi.ThawExpiredReply{} }
