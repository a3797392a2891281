package front

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/observe"
	"github.com/crust-proxy/crust-proxy/pkg/deferral"
	"github.com/crust-proxy/crust-proxy/pkg/front/passthrough"
	"github.com/crust-proxy/crust-proxy/pkg/rpccode"
)

// Conn gives the connection to a driver, which may be another one after the
// driver was upgraded.
type Conn = func() (grpc.ClientConnInterface, error)

// node answers the Node calls of one driver.
type node struct {
	*Front
	name  string
	conn  Conn
	known atomic.Pointer[capabilities]
	log   *zap.Logger
}

// forwardFunc sends a request of the method in hand to the driver.
type forwardFunc = func(ctx context.Context, request []byte) (reply []byte, err error)

// Answered are the methods that the front answers itself where a volume is
// deferred; it words their errors.
func Answered() map[string]bool {
	return map[string]bool{
		csi.Node_NodeGetCapabilities_FullMethodName: true,
		csi.Node_NodeStageVolume_FullMethodName:     true,
		csi.Node_NodeUnstageVolume_FullMethodName:   true,
		csi.Node_NodePublishVolume_FullMethodName:   true,
		csi.Node_NodeUnpublishVolume_FullMethodName: true,
		csi.Node_NodeGetVolumeStats_FullMethodName:  true,
		csi.Node_NodeExpandVolume_FullMethodName:    true,
	}
}

// Driver makes the proxy that kubelet will take for the driver.
func (f *Front) Driver(name string, conn Conn) *passthrough.Proxy {
	n := &node{Front: f, name: name, conn: conn, log: f.cfg.Log.With(zap.String(observe.FieldDriver, name))}
	local := make(map[string]passthrough.Local)
	for method, answer := range map[string]func(context.Context, []byte, forwardFunc) ([]byte, error){
		csi.Node_NodeGetCapabilities_FullMethodName: n.getCapabilities,
		csi.Node_NodeStageVolume_FullMethodName:     n.stageVolume,
		csi.Node_NodeUnstageVolume_FullMethodName:   n.unstageVolume,
		csi.Node_NodePublishVolume_FullMethodName:   n.publishVolume,
		csi.Node_NodeUnpublishVolume_FullMethodName: n.unpublishVolume,
		csi.Node_NodeGetVolumeStats_FullMethodName:  n.getVolumeStats,
		csi.Node_NodeExpandVolume_FullMethodName:    n.expandVolume,
	} {
		local[method] = func(ctx context.Context, _ string, request []byte, forward func(context.Context, []byte) ([]byte, error)) ([]byte, error) {
			ctx, cancel := n.bound(ctx)
			defer cancel()
			reply, err := answer(ctx, request, forward)
			return reply, rpccode.Status(err)
		}
	}
	return passthrough.New(conn, local)
}

// bound gives a deadline to a call that came without one.
func (n *node) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok || n.cfg.DriverTimeout <= 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, n.cfg.DriverTimeout)
}

func (n *node) id(volume string) volumeID { return volumeID{driver: n.name, id: volume} }

// call makes a call of our own to the driver.
func (n *node) call(ctx context.Context, method string, request, reply proto.Message) error {
	conn, err := n.conn()
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return conn.Invoke(ctx, method, request, reply)
}

// undoTime bounds the roll-back of a call, which goes on when its caller has
// gone.
const undoTime = 30 * time.Second

func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), undoTime)
}

// driverError is what the driver said, with its own code and details, and who
// said it while doing what. Secrets of the request that the driver repeats are
// taken out: errors end in events and logs.
func (n *node) driverError(doing string, err error, secrets map[string]string) error {
	said := status.Convert(err).Proto()
	said.Message = fmt.Sprintf("driver %s, %s: %s", n.name, doing, oneLine(redact(said.GetMessage(), secrets)))
	return by(deferral.PartyDriver, status.FromProto(said).Err())
}

// secretsOf are the values of a request that no error may repeat: its secrets, and
// what else may be one, such as the tokens of service accounts.
func secretsOf(req interface {
	GetSecrets() map[string]string
	GetPublishContext() map[string]string
	GetVolumeContext() map[string]string
},
) map[string]string {
	const shortest = 8 // words such as "none" are no secrets, whatever their key
	out := maps.Clone(req.GetSecrets())
	for _, more := range []map[string]string{req.GetPublishContext(), req.GetVolumeContext()} {
		for key, value := range more {
			if !secretName(key) || len(value) < shortest {
				continue
			}
			if out == nil {
				out = make(map[string]string)
			}
			out["context "+key] = value
		}
	}
	return out
}

// redact takes the values of secrets out of a text. Values that are too short to
// be secret would take half the text with them.
func redact(text string, secrets map[string]string) string {
	const shortest = 3
	for _, value := range secrets {
		if len(value) >= shortest {
			text = strings.ReplaceAll(text, value, "[redacted]")
		}
	}
	return text
}

// final tells whether kubelet takes an error for the last word: nothing has been
// done, and nothing will be undone.
func final(err error) bool {
	switch status.Code(rpccode.Status(err)) {
	case codes.OK, codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.ResourceExhausted, codes.Aborted:
		return false
	default:
		return true
	}
}

// failed joins the cause of a failure with what went wrong in undoing it. While
// anything is left the error is one to come again for.
func failed(target string, cause, undoing error) error {
	if undoing == nil {
		return cause
	}
	return by(partyOf(cause), deferral.Errorf(deferral.Busy, "volume %s: %w; and it could not be undone yet: %w", target,
		plain(cause), plain(undoing)))
}

// plain is an error without its gRPC wrapping, which reads badly inside a text.
func plain(err error) error {
	if said, ok := status.FromError(err); ok && said != nil {
		return errors.New(said.Message())
	}
	return err
}

// notNow is an error after which nothing is left, and kubelet goes on: it is the
// one that does not keep a pod from starting when growth fails.
func notNow(format string, args ...any) error {
	return status.Errorf(codes.FailedPrecondition, format, args...)
}

// complain tells the log what could not be done and keeps nobody waiting.
func (n *node) complain(err error) {
	n.log.Error("a volume that is not deferred cannot be put on record", zap.Error(err))
}
