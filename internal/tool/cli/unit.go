package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

const (
	unitName = "crust-proxy.service"
	// unitPatience is how long a connection may take before systemd is asked: a socket of systemd takes
	// connections while nobody serves it. A daemon that was killed is started again within unitAgain.
	unitPatience = time.Second
	unitAgain    = 500 * time.Millisecond
	unitTime     = time.Second // bounds each question
	maxLastError = 400
)

// errUnitDown ends a call: nobody will answer it.
var errUnitDown = errors.New("the daemon's unit has failed")

type runner func(ctx context.Context, program string, args ...string) ([]byte, error)

func runProgram(ctx context.Context, program string, args ...string) ([]byte, error) {
	return exec.CommandContext(ctx, program, args...).Output() //nolint:gosec // constant names
}

// unit is the daemon's unit. Without run, systemd is not asked.
type unit struct {
	run  runner
	root bool // we may read its log
}

// unitOf returns the unit of the daemon behind a socket: only of the usual one it is known that systemd runs it.
func unitOf(env Env, path string) unit {
	_, err := os.Stat(filepath.Join(env.Node.Root, "run/systemd/system"))
	if err != nil || env.Node.Service.InPod || path != env.Node.AdminSocket {
		return unit{}
	}
	return unit{run: env.Run, root: env.Node.UID == 0}
}

// state returns the properties of the unit; nil if systemd does not know it.
func (u unit) state(ctx context.Context) map[string]string {
	out := u.ask(ctx, "systemctl", "show", unitName, "--property=LoadState,ActiveState,SubState,Result,NRestarts,StateChangeTimestamp,StateChangeTimestampMonotonic")
	found := make(map[string]string)
	for line := range strings.Lines(out) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		found[key] = value
	}
	if found["LoadState"] != "loaded" {
		return nil
	}
	return found
}

func (u unit) ask(ctx context.Context, program string, args ...string) string {
	if u.run == nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, unitTime)
	defer cancel()
	out, _ := u.run(ctx, program, args...) // without an answer nothing is said of it
	return string(out)
}

// down reports whether the daemon ended with an error, and is not being started now.
func down(state map[string]string) bool {
	return state["Result"] != "" && state["Result"] != "success"
}

// watch ends a call when there is no connection and the unit is down, at two looks.
func (u unit) watch(ctx context.Context, conn *grpc.ClientConn, end context.CancelCauseFunc) {
	if u.run == nil {
		return
	}
	looks := 0
	for pause := unitPatience; sys.Sleep(ctx, pause) && conn.GetState() != connectivity.Ready; pause = unitAgain {
		if looks = show.When(down(u.state(ctx)), looks+1); looks == 2 {
			end(errUnitDown)
			return
		}
	}
}

// starting is the error of a call to a daemon that systemd is starting.
type starting struct{ error }

// describe adds to an error what systemd knows of the unit, and what that said last.
func (u unit) describe(ctx context.Context, what string) error {
	state := u.state(ctx)
	if state == nil {
		return errors.New(what)
	}
	text := fmt.Sprintf("%s; systemd says that %s is %s (%s), result %s, since %s", what, unitName, state["ActiveState"], state["SubState"],
		state["Result"], state["StateChangeTimestamp"])
	switch {
	case state["ActiveState"] == "activating" && !down(state) && justBegun(state):
		return starting{errors.New(text)}
	case !down(state) || !u.root:
		return errors.New(text)
	}
	log := u.ask(ctx, "journalctl", "_SYSTEMD_UNIT="+unitName, "--boot", "--lines=50", "--output=cat", "--no-pager", "--quiet")
	last := lastError(log)
	return errors.New(text + show.When(last != "", "; its last error: "+sys.ClipTo(show.Escape(last), maxLastError)))
}

// startTime is how long a start may take until it counts as one that hangs.
const startTime = 30 * time.Second

// justBegun reports whether the start under way is the first one, and not old.
func justBegun(state map[string]string) bool {
	var now unix.Timespec
	began, err := strconv.ParseInt(state["StateChangeTimestampMonotonic"], 10, 64)
	if err != nil || unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) != nil {
		return false
	}
	age := time.Duration(now.Nano()) - time.Duration(began)*time.Microsecond
	return state["NRestarts"] == "0" && age < startTime
}

// lastWords match an error in the daemon's log, and the first line of a crash.
var lastWords = sys.LazyRegexp(`(?m)^(crust-proxy: |panic: |fatal error: |\{"level":"error").*$`)

func lastError(log string) string {
	if all := lastWords().FindAllString(log, -1); len(all) > 0 {
		return all[len(all)-1]
	}
	return ""
}
