package ctl

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"syscall"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const advicePermission = "Use sudo, or add your uid to authorization.admin.uids in the daemon's configuration."

// errFindings ends doctor where it found an error.
var errFindings = errors.New("doctor found errors")

// usageError is a command line that cannot be understood.
type usageError struct {
	command string
	err     error
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// explained is an error and what the operator can do about it.
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

func (e *explained) Unwrap() error { return e.err }

// explain turns the error of a call into words. dial is the last error of
// connecting, which gRPC itself tells as text only.
func explain(err error, socket string, dial error) error {
	if err == nil {
		return nil
	}
	st := status.Convert(err)
	message := escape(st.Message()) // it may quote a guest
	switch {
	case st.Code() == codes.Unavailable && dial != nil:
		return explainDial(dial, socket)
	case st.Code() == codes.Unavailable && hungUp(message):
		return &explained{fmt.Errorf("the daemon closed the connection on %s", socket), advicePermission +
			" Else crust-proxy may just be stopping: see 'systemctl status crust-proxy'."}
	case st.Code() == codes.Unavailable:
		return &explained{errors.New(message), "Try it again; where it stays so, see 'systemctl status crust-proxy'."}
	case st.Code() == codes.PermissionDenied || st.Code() == codes.Unauthenticated:
		return &explained{fmt.Errorf("the daemon refused: %s", message),
			advicePermission}
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

// unknownCall tells a daemon that does not know the call from a runtime that cannot
// do what it asks for: gRPC has one code for both.
func unknownCall(message string) bool {
	return strings.HasPrefix(message, "unknown method") || strings.HasPrefix(message, "unknown service") ||
		(strings.HasPrefix(message, "method ") && strings.HasSuffix(message, " not implemented"))
}

// hungUp tells a connection that was closed from what the daemon itself said;
// gRPC has one code for both, and its own texts differ with the moment.
func hungUp(message string) bool {
	for _, sign := range []string{"connection error", "broken pipe", "connection reset", "EOF", "server preface", "transport is closing"} {
		if strings.Contains(message, sign) {
			return true
		}
	}
	return false
}

func explainDial(dial error, socket string) error {
	switch {
	case errors.Is(dial, fs.ErrPermission):
		return &explained{fmt.Errorf("permission denied on the admin socket %s", socket),
			"Use sudo, or add your uid to authorization.admin.uids and see that the socket's group is yours."}
	case errors.Is(dial, fs.ErrNotExist):
		return &explained{fmt.Errorf("crust-proxy is not running: there is no socket %s", socket),
			"See 'systemctl status crust-proxy'. Is the socket elsewhere? Give --socket or set CRUSTCTL_SOCKET."}
	case errors.Is(dial, syscall.ECONNREFUSED):
		return &explained{fmt.Errorf("crust-proxy is not running: nobody listens on %s", socket),
			"See 'systemctl status crust-proxy' and 'journalctl -u crust-proxy'."}
	case errors.Is(dial, context.DeadlineExceeded):
		return &explained{fmt.Errorf("crust-proxy does not take the connection on %s", socket),
			"It may hang: see 'systemctl status crust-proxy'."}
	}
	return fmt.Errorf("cannot connect to %s: %w", socket, dial)
}
