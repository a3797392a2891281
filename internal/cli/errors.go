package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/crust-proxy/crust-proxy/internal/blocks"
	"github.com/crust-proxy/crust-proxy/internal/cli/show"
	"github.com/crust-proxy/crust-proxy/internal/doctor"
)

const advicePermission = "Use sudo, or add your uid to authorization.admin.uids in the daemon's configuration."

var errFindings = errors.New("doctor found errors")

type usageError struct {
	command string
	err     error
}

func (e *usageError) Error() string { return e.err.Error() }

func wrongUsage(cmd *cobra.Command, err error) error {
	return &usageError{command: cmd.CommandPath(), err: err}
}

func arguments(names ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return wrongUsage(cmd, fmt.Errorf("%s needs a %s", cmd.Name(), strings.Join(names[len(args):], " ")))
		case len(args) > len(names):
			return wrongUsage(cmd, fmt.Errorf("%s does not take %q", cmd.Name(), args[len(names)]))
		}
		return nil
	}
}

func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	near := cmd.SuggestionsFor(args[0])
	for _, name := range daemonCommands().SuggestionsFor(args[0]) {
		near = append(near, "crust-proxy "+name)
	}
	text := fmt.Sprintf("there is no command %q", args[0])
	if len(near) > 0 {
		text += "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return wrongUsage(cmd, errors.New(text))
}

// daemonCommands has the names of the commands of the program crust-proxy.
func daemonCommands() *cobra.Command {
	root := &cobra.Command{SuggestionsMinimumDistance: 2}
	for _, name := range []string{"validate", "removable", "removable-nodes", "withdraw"} {
		root.AddCommand(&cobra.Command{Use: name, Run: func(*cobra.Command, []string) {}})
	}
	return root
}

func noSuchShell(cmd *cobra.Command, args []string) error {
	return wrongUsage(cmd, fmt.Errorf("there is no completion for %q", args[0]))
}

type explained struct {
	err    error
	advice string
}

func (e *explained) Error() string {
	if e.advice == "" {
		return e.err.Error()
	}
	return e.err.Error() + "\n" + e.advice
}

func watchEnded(service doctor.Service) error {
	return &explained{errors.New("the daemon ended the watch"), "It may be restarting: see '" + service.Status() + "'."}
}

func repairsFailed(failed, all int) error {
	return &explained{fmt.Errorf("%d of %d repairs could not be done", failed, all), "See the errors above; 'crustctl doctor' may know more."}
}

// explain adds to the error of a call what it means and what to do. It uses the last error of
// connecting, of which gRPC has only the text. Other errors are returned unchanged.
func (c *client) explain(err error) error {
	st, ofCall := status.FromError(err)
	if err == nil || !ofCall {
		return err
	}
	c.mu.Lock()
	dial := c.dial
	c.mu.Unlock()
	seeStatus := "see '" + c.service.Status() + "'."
	message := show.Escape(st.Message()) // it may quote a guest
	switch {
	case st.Code() == codes.Unavailable && dial != nil:
		return c.explainDial(dial)
	case st.Code() == codes.Unavailable && hungUp(message):
		return &explained{fmt.Errorf("the daemon closed the connection on %s", c.socket),
			advicePermission + " Else crust-proxy may just be stopping: " + seeStatus}
	case st.Code() == codes.Unavailable:
		advice := "Try it again; where it stays so, " + seeStatus
		if strings.HasPrefix(message, "volume ") { // the daemon is well
			advice = "A sandbox has the volume while its pod runs; 'crustctl get VOLUME' shows what is known."
		}
		return &explained{errors.New(message), advice}
	case st.Code() == codes.PermissionDenied || st.Code() == codes.Unauthenticated:
		return &explained{fmt.Errorf("the daemon refused: %s", message), advicePermission}
	case st.Code() == codes.DeadlineExceeded:
		return &explained{fmt.Errorf("no answer in time: %s", message),
			"A sandbox may hang. Give more time with --timeout; 'crustctl get VOLUME' shows what is known."}
	case st.Code() == codes.Canceled:
		return errors.New("interrupted")
	case st.Code() == codes.Unimplemented && unknownCall(message):
		return &explained{errors.New(message), "The daemon may be older than crustctl: see 'crustctl version'."}
	}
	return fmt.Errorf("%s (%s)", message, st.Code())
}

// unknownCall reports whether the daemon does not know the call. gRPC has the same code for a
// runtime that cannot do what the call asks for.
func unknownCall(message string) bool {
	return strings.HasPrefix(message, "unknown method") || strings.HasPrefix(message, "unknown service") ||
		(strings.HasPrefix(message, "method ") && strings.HasSuffix(message, " not implemented"))
}

// hungUp reports whether the connection was closed. gRPC has the same code for errors of the
// daemon itself, and its texts depend on when the connection was closed.
func hungUp(message string) bool {
	signs := []string{"connection error", "broken pipe", "connection reset", "EOF", "server preface", "transport is closing"}
	return slices.ContainsFunc(signs, func(sign string) bool { return strings.Contains(message, sign) })
}

func (c *client) explainDial(dial error) error {
	socket, service := c.socket, c.service
	switch {
	case errors.Is(dial, fs.ErrPermission):
		return &explained{fmt.Errorf("permission denied on the admin socket %s", socket),
			"Use sudo, or add your uid to authorization.admin.uids and see that the socket's group is yours."}
	case errors.Is(dial, fs.ErrNotExist):
		return &explained{fmt.Errorf("crust-proxy is not running: there is no socket %s", socket),
			"See '" + service.Status() + "'; 'crust-proxy validate' checks the configuration. Is the socket elsewhere? Give --socket or set CRUSTCTL_SOCKET."}
	case errors.Is(dial, syscall.ECONNREFUSED) && !isSocket(socket):
		return &explained{fmt.Errorf("%s is not a socket", socket), "Give the daemon's admin socket with --socket or CRUSTCTL_SOCKET."}
	case errors.Is(dial, syscall.ECONNREFUSED):
		return &explained{fmt.Errorf("crust-proxy is not running: nobody listens on %s", socket), statusAndLogs(service)}
	case errors.Is(dial, context.DeadlineExceeded):
		return &explained{fmt.Errorf("crust-proxy does not take the connection on %s", socket),
			"It may hang: see '" + service.Status() + "'."}
	}
	return fmt.Errorf("cannot connect to %s: %w", socket, dial)
}

// isSocket is also true if the file cannot be examined.
func isSocket(path string) bool {
	info, err := os.Stat(path)
	return err != nil || info.Mode().Type() == fs.ModeSocket
}

func statusAndLogs(service doctor.Service) string {
	return "See '" + service.Status() + "' and '" + service.Logs() + "'."
}

// blockAdvice is what to do about the codes of CSI's SnapshotMetadata.
var blockAdvice = map[codes.Code]string{
	codes.NotFound:           "Is the snapshot deleted? The id of one is in its VolumeSnapshotContent, status.snapshotHandle; each node has its own.",
	codes.InvalidArgument:    "The base must be an earlier snapshot of the same volume.",
	codes.FailedPrecondition: "The driver cannot compare these two now: make a full backup, without a base.",
	codes.Unimplemented:      "The driver does not serve changed blocks (CSI's SnapshotMetadata).",
	codes.OutOfRange:         "The snapshot is smaller than expected: is it another one now? Begin anew.",
	codes.Unavailable:        "Does the driver run, and its sidecar? See the logs of its pod, and try it again.",
	codes.Unauthenticated:    "The server does not accept the token: see the audience of the SnapshotMetadataService and the server's log.",
	codes.PermissionDenied:   "Allow the service account to get volumesnapshots in the snapshot's namespace.",
}

// brokenStream is the line for a stream that broke and is retried after a pause.
func brokenStream(err error, at int64, pause time.Duration) string {
	return fmt.Sprintf("the stream broke at %s: %s; retrying in %v", show.Size(at), show.Escape(status.Convert(err).Message()), pause)
}

// explainBlocks adds to the error of a stream what to do about it.
func explainBlocks(ctx context.Context, err error) error {
	var server *blocks.ServerError
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return errors.New("interrupted")
	case errors.As(err, &server):
		return &explained{err, "Nothing was used of that message. The driver is at fault: tell its author."}
	}
	if advice := clusterAdvice(err); advice != "" {
		return &explained{err, advice}
	}
	var answer interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &answer) {
		return err
	}
	st := answer.GRPCStatus()
	advice := blockAdvice[st.Code()]
	if blocks.IsCertificate(err) {
		advice = "Check the SnapshotMetadataService: its caCert must verify the server's certificate, and the certificate must name the host of its address."
	}
	return &explained{fmt.Errorf("%s (%s)", show.Escape(st.Message()), st.Code()), advice}
}

// clusterAdvice is what to do about an error of the API server.
func clusterAdvice(err error) string {
	var answer apierrors.APIStatus
	switch {
	case !errors.As(err, &answer):
		return ""
	case apierrors.IsForbidden(err):
		return "Who asks needs the rights of deploy/kustomize/examples/changed-blocks/client.yaml."
	case apierrors.IsUnauthorized(err):
		return "The API server does not know the identity of the kubeconfig: is it of this cluster, and current?"
	case apierrors.IsNotFound(err):
		return "Are --namespace and --context right? A driver without SnapshotMetadataService has no external-snapshot-metadata beside it: see docs/crustctl.md."
	}
	return "See the API server's log, and try it again."
}
