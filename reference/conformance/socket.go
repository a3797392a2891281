package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/pkg/runtime/abi"
	handlerv1 "github.com/crust-proxy/crust-proxy/proto/crust/handler/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// servesWithin bounds the wait for the handler to serve the socket that it named.
const servesWithin = 10 * time.Second

// overSocket waits until the handler serves the socket that it offers, and calls f.
func (v *testVolume) overSocket(ctx context.Context, f func(context.Context, handlerv1.HandlerClient) error) error {
	path, err := v.line(abi.SocketName)
	if errors.Is(err, os.ErrNotExist) {
		return unsupported{reason: "it offers no runtime-socket, which is optional"}
	}
	if err != nil {
		return err
	}
	conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	c := handlerv1.NewHandlerClient(conn)
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	err = eventually(ctx, servesWithin, func(ctx context.Context) error {
		_, err := c.GetVolumeStats(ctx, &handlerv1.GetVolumeStatsRequest{TargetPath: v.target})
		if status.Code(err) == codes.Unavailable {
			return fmt.Errorf("nobody serves the socket: %w", err)
		}
		return nil
	})
	if err == nil {
		err = f(ctx, c)
	}
	return errors.Join(err, conn.Close())
}

// wantCode fails unless a call ended with a code.
func wantCode(err error, code codes.Code, what string) error {
	if got := status.Code(err); got != code {
		return fmt.Errorf("%s is answered with %s and should be with %s: %s", what, got, code, status.Convert(err).Message())
	}
	return nil
}

// socketAnswers compares the socket's answers with the program's.
func (v *testVolume) socketAnswers(ctx context.Context, sandbox string) error {
	return v.overSocket(ctx, func(ctx context.Context, c handlerv1.HandlerClient) error {
		seen := func(ctx context.Context) (string, error) {
			program, err := v.stats(ctx)
			return statsText(program), err
		}
		return whileStill(ctx, seen, func(ctx context.Context, program string) error {
			reply, err := c.GetVolumeStats(ctx, &handlerv1.GetVolumeStatsRequest{TargetPath: v.target})
			if err != nil {
				return fmt.Errorf("stats by the socket: %w", err)
			}
			if got := statsText(statsOf(reply)); got != program {
				return fmt.Errorf("the socket says %s, the program %s", got, program)
			}
			return want("sandbox_id", reply.GetSandboxId(), sandbox)
		})
	})
}

// statsText is all of an answer to stats, to be compared and shown.
func statsText(reply abi.StatsReply) string {
	if reply.Condition == nil {
		return fmt.Sprintf("%+v without a condition", reply.Usage)
	}
	return fmt.Sprintf("%+v with the condition %+v", reply.Usage, *reply.Condition)
}

// statsOf is the answer of a socket as a program would give it.
func statsOf(reply *handlerv1.GetVolumeStatsResponse) (stats abi.StatsReply) {
	units := map[runtimev1.VolumeUsage_Unit]string{
		runtimev1.VolumeUsage_BYTES: abi.UnitBytes, runtimev1.VolumeUsage_INODES: abi.UnitInodes,
	}
	for _, u := range reply.GetUsage() {
		stats.Usage = append(stats.Usage, abi.Usage{
			Available: u.GetAvailable(), Total: u.GetTotal(), Used: u.GetUsed(), Unit: units[u.GetUnit()],
		})
	}
	if c := reply.GetVolumeCondition(); c != nil {
		stats.Condition = &abi.Condition{Abnormal: c.GetAbnormal(), Message: c.GetMessage(), Reason: c.GetReason()}
	}
	return stats
}

// socketRefuses makes calls that the handler has to refuse.
func (v *testVolume) socketRefuses(ctx context.Context) error {
	return v.overSocket(ctx, func(ctx context.Context, c handlerv1.HandlerClient) error {
		_, unknown := c.GetVolumeStats(ctx, &handlerv1.GetVolumeStatsRequest{TargetPath: v.target + "-other"})
		_, relative := c.GetVolumeStats(ctx, &handlerv1.GetVolumeStatsRequest{TargetPath: "mount"})
		_, far := c.ResizeVolume(ctx, &handlerv1.ResizeVolumeRequest{
			TargetPath: v.target, CapacityRange: &runtimev1.CapacityRange{RequiredBytes: 1 << 50},
		})
		if status.Code(far) == codes.Unimplemented {
			far = status.Error(codes.OutOfRange, "")
		}
		return errors.Join(
			wantCode(unknown, codes.NotFound, "a volume that no sandbox has"),
			wantCode(relative, codes.InvalidArgument, "a relative target"),
			wantCode(far, codes.OutOfRange, "a size beyond the device"),
		)
	})
}
