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

// asked is the volumes of all sandboxes of the node, for one question. Supervisors are asked
// as crust-proxy asks them.
type asked struct{ cfg Config }

// ofSupervisor is an error that the supervisor told.
type ofSupervisor struct {
	text string
	kind error
}

func (e *ofSupervisor) Error() string { return e.text }
func (e *ofSupervisor) Unwrap() error { return e.kind }

// ask asks the newest live sandbox that has the volume.
func ask[Q, A any](v asked, target string, method func(handlerv1.HandlerClient, context.Context, *Q, ...grpc.CallOption) (*A, error), question *Q) (*A, string, error) {
	sandbox, err := v.sandbox(target)
	if err != nil {
		return nil, "", err
	}
	conn, err := grpc.NewClient("unix://"+v.cfg.sandbox(sandbox).volumes(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	answer, err := method(handlerv1.NewHandlerClient(conn), ctx, question)
	if err != nil {
		said := status.Convert(err)
		return nil, sandbox, &ofSupervisor{text: said.Message(), kind: kinds[said.Code()]}
	}
	return answer, sandbox, nil
}

func (v asked) sandbox(target string) (string, error) {
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
		is, err := v.cfg.find(id)
		if err != nil && !errors.Is(err, errUnknown) {
			return "", err // nobody must take it for ended
		}
		if err == nil && is.isSandbox() && !is.Process.Ended() {
			return id, nil
		}
	}
	return "", fmt.Errorf("volume %s: %w", target, handler.ErrNoSandbox)
}

// Stats measures the filesystem now.
func (v asked) Stats(target string) (reply abi.StatsReply, sandbox string, err error) {
	said, sandbox, err := ask(v, target, handlerv1.HandlerClient.GetVolumeStats, &handlerv1.GetVolumeStatsRequest{TargetPath: target})
	if err != nil {
		return reply, sandbox, err
	}
	for _, u := range said.GetUsage() {
		unit := abi.UnitBytes
		if u.GetUnit() == runtimev1.VolumeUsage_INODES {
			unit = abi.UnitInodes
		}
		reply.Usage = append(reply.Usage, abi.Usage{Available: u.GetAvailable(), Total: u.GetTotal(), Used: u.GetUsed(), Unit: unit})
	}
	is := said.GetVolumeCondition()
	reply.Condition = &abi.Condition{Abnormal: is.GetAbnormal(), Message: is.GetMessage(), Reason: is.GetReason()}
	return reply, sandbox, nil
}

// Resize makes the filesystem as large as its device.
func (v asked) Resize(target string, least, most int64) (int64, error) {
	said, _, err := ask(v, target, handlerv1.HandlerClient.ResizeVolume, &handlerv1.ResizeVolumeRequest{
		TargetPath: target, CapacityRange: &runtimev1.CapacityRange{RequiredBytes: least, LimitBytes: most},
	})
	return said.GetCapacityBytes(), err
}

// Freeze holds all writes until Thaw, or until the time is over.
func (v asked) Freeze(target string, timeout time.Duration) error {
	_, _, err := ask(v, target, handlerv1.HandlerClient.FreezeVolume, &handlerv1.FreezeVolumeRequest{TargetPath: target, Timeout: durationpb.New(timeout)})
	return err
}

// Thaw lets writes go on. A machine that has ended has frozen nothing any more, and whoever
// read the device meanwhile has to learn of it.
func (v asked) Thaw(target string) error {
	_, _, err := ask(v, target, handlerv1.HandlerClient.ThawVolume, &handlerv1.ThawVolumeRequest{TargetPath: target})
	if errors.Is(err, handler.ErrNoSandbox) {
		err = fmt.Errorf("volume %s: %w: no sandbox has it", target, fsops.ErrNotFrozen)
	}
	return err
}

// ThawExpired has nothing to do: each guest thaws by itself.
func (asked) ThawExpired() abi.ThawExpiredReply { return abi.ThawExpiredReply{} }
