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

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

func (c *client) permission() string {
	where := " to authorization." + c.daemon.api + ".uids in the daemon's configuration"
	return show.Either(c.daemon.env.Node.UID == 0, "Add uid 0"+where+".", "Use sudo, or add your uid"+where+", and see that the socket's group is yours.")
}

// explain adds to the error of a call what it means and what to do. It uses the last error of
// connecting, of which gRPC has only the text. Other errors are returned unchanged.
func (c *client) explain(err error) error {
	st, ofCall := status.FromError(err)
	if err == nil || !ofCall {
		return err
	}
	message := show.Escape(st.Message()) // it may quote a guest
	switch {
	case st.Code() == codes.Unavailable:
		return c.explainUnavailable(message)
	case st.Code() == codes.DeadlineExceeded && c.conn.GetState() != connectivity.Ready:
		return c.unanswered()
	case st.Code() == codes.PermissionDenied && strings.HasPrefix(message, "uid "): // else it refuses what was asked, not the caller
		return command.Explain(fmt.Errorf("the daemon refused: %s", message), c.permission())
	case st.Code() == codes.DeadlineExceeded:
		return command.Explain(fmt.Errorf("no answer in time: %s", message),
			"A sandbox may hang. Give more time with --timeout; 'crustctl get VOLUME' shows what is known.")
	case st.Code() == codes.Canceled:
		return errors.New("interrupted")
	case st.Code() == codes.Unimplemented && strings.HasPrefix(message, "unknown service"):
		return command.Explain(errors.New(message), "Is "+c.socket+" the daemon's "+c.daemon.api+" socket?")
	case st.Code() == codes.Unimplemented && unknownCall(message):
		return command.Explain(errors.New(message), "The daemon may be older than crustctl: see 'crustctl version'.")
	}
	return fmt.Errorf("%s (%s)", message, st.Code())
}

// explainUnavailable distinguishes a daemon that is away from one that cannot do the call now.
func (c *client) explainUnavailable(message string) error {
	c.mu.Lock()
	dial := c.dial
	c.mu.Unlock()
	seeStatus := "see '" + c.daemon.service().Status() + "'."
	switch {
	case dial != nil:
		return c.explainDial(dial)
	case strings.HasPrefix(message, "volume "): // the daemon is well
		return command.Explain(errors.New(message), "A sandbox has the volume while its pod runs; 'crustctl get VOLUME' shows what is known.")
	case c.conn != nil && c.conn.GetState() == connectivity.Ready: // it answered
	case strings.Contains(message, context.DeadlineExceeded.Error()):
		return c.unanswered()
	case hungUp(message):
		return c.unserved("the daemon closed the connection on "+c.socket, c.permission()+" Else crust-proxy may just be stopping: "+seeStatus)
	}
	return command.Explain(errors.New(message), "Try it again; where it stays so, "+seeStatus)
}

// unknownCall reports whether the daemon does not know the call. gRPC has the same code for a
// runtime that cannot do what the call asks for.
func unknownCall(message string) bool {
	return strings.HasPrefix(message, "unknown method") || strings.HasPrefix(message, "method ") && strings.HasSuffix(message, " not implemented")
}

// hungUp reports whether the connection was closed. gRPC has the same code for errors of the
// daemon itself, and its texts depend on when the connection was closed.
func hungUp(message string) bool {
	signs := []string{"connection error", "broken pipe", "connection reset", "EOF", "server preface", "transport is closing"}
	return slices.ContainsFunc(signs, func(sign string) bool { return strings.Contains(message, sign) })
}

func (c *client) explainDial(dial error) error {
	socket, service := c.socket, c.daemon.service()
	info, statErr := os.Stat(socket)
	give := "Give " + show.Either(c.daemon.api != apiAdmin, "--runtime-socket", "--socket or set "+socketVariable)
	switch {
	case errors.Is(dial, fs.ErrPermission):
		return command.Explain(fmt.Errorf("permission denied on the %s socket %s", c.daemon.api, socket), c.permission())
	case errors.Is(dial, fs.ErrNotExist):
		return c.unserved(absent+"there is no socket "+socket, validate+", or see '"+service.Status()+"'. Is the socket elsewhere? "+give+".")
	case errors.Is(dial, syscall.ECONNREFUSED) && statErr == nil && info.Mode().Type() != fs.ModeSocket:
		return command.Explain(fmt.Errorf("%s is not a socket", socket), give+" to the daemon's "+c.daemon.api+" socket.")
	case errors.Is(dial, syscall.ECONNREFUSED):
		return c.notRunning("nobody listens on " + socket)
	case errors.Is(dial, context.DeadlineExceeded):
		return c.unanswered()
	}
	return fmt.Errorf("cannot connect to %s: %w", socket, dial)
}

const absent = "crust-proxy is not running: " // begins the error if nobody listens
const validate = "Run 'crust-proxy validate --config " + usualConfig + "'"

func (c *client) notRunning(what string) error {
	return c.unserved(absent+what, validate+". "+statusAndLogs(c.daemon.service()))
}

func (c *client) unanswered() error {
	return c.unserved("crust-proxy does not answer on "+c.socket, "It may hang: see '"+c.daemon.service().Status()+"'.")
}

// unserved is the error of a call that no daemon took, with what systemd knows of it.
func (c *client) unserved(what, advice string) error {
	return command.Explain(c.unit.describe(context.Background(), what), advice)
}

func statusAndLogs(service doctor.Service) string {
	return "See '" + service.Status() + "' and '" + service.Logs() + "'."
}
