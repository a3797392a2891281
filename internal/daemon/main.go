// Package daemon assembles crust-proxy: configuration, core, servers and supervision.
package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap"

	"github.com/crust-proxy/crust-proxy/internal/daemon/admin"
	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/run"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/ground/systemd"
	"github.com/crust-proxy/crust-proxy/internal/ground/telemetry"
)

const usage = `crust-proxy lets a pod's sandbox mount its volumes.

Usage:
  crust-proxy [flags]            serve until SIGTERM
  crust-proxy validate [flags]   check the configuration and show what is in force,
                                 and what this node lacks for it
  crust-proxy version            show the version
  crust-proxy removable [DRIVER...] [flags]
                                 check whether crust-proxy can be removed from this
                                 node, or drivers from behind it: exit code 1 and
                                 a list of deferred volumes that live, and drivers
                                 behind the front. The daemon need not run
  crust-proxy removable-nodes HOST:PORT [COMMAND [DRIVER]]
                                 the same for all nodes whose daemons have their
                                 metrics at the addresses of HOST; a node that
                                 does not answer counts as one with volumes. A
                                 refusal names COMMAND, which makes a Helm release
                                 usable again. DRIVER goes with the release: it may
                                 be behind the front, without volumes
  crust-proxy withdraw [flags]   when the daemon has gone for good: make kubelet
                                 forget the drivers that were registered through it

Signals: SIGTERM and SIGINT end it after the calls under way; SIGHUP reads the
configuration again.

Flags:
`

const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

// Main runs the command line and returns the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	// Signals are handled before anything slow begins, so that none is lost.
	ctx, stop := run.UntilSignal(context.Background())
	defer stop()
	set := pflag.NewFlagSet("crust-proxy", pflag.ContinueOnError)
	set.SetOutput(stderr)
	set.Usage = func() { _, _ = fmt.Fprint(stdout, usage, set.FlagUsages()) } // called for --help only
	flags := config.AddFlags(set)
	pod := set.String("pod", "", "with validate: a file with a Pod, its RuntimeClass, claims, and PersistentVolumes or StorageClasses: say what becomes of its volumes, and why")
	quiet := set.BoolP("quiet", "q", false, "print errors only")
	version := set.Bool("version", false, "print the version")
	if err := set.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return exitOK
		}
		return failed(stderr, fmt.Errorf("%w: %w", err, errUsage))
	}
	if *quiet {
		stdout = io.Discard
	}
	command, err := commandOf(set.Args())
	if *version {
		command, err = showVersion, nil
	}
	if err == nil && *pod != "" && set.Arg(0) != "validate" {
		err = fmt.Errorf("--pod is for validate: %w", errUsage)
	}
	if err == nil {
		err = command(ctx, invocation{flags, *pod, set.Args()[min(1, set.NArg()):], stdout, stderr})
	}
	return failed(stderr, err)
}

func failed(stderr io.Writer, err error) int {
	if err == nil {
		return exitOK
	}
	if _, bad := errors.AsType[*config.FileError](err); bad {
		_, _ = fmt.Fprintln(stderr, err) // each line begins with file:line:column:, as editors expect it
	} else if !errors.Is(err, errLogged) {
		_, _ = fmt.Fprintln(stderr, "crust-proxy:", err)
	}
	if errors.Is(err, errUsage) {
		return exitUsage
	}
	return exitError
}

var (
	errUsage  = errors.New("see crust-proxy --help")
	errLogged = errors.New("the log says what is wrong")
)

// invocation is what a command gets.
type invocation struct {
	flags          *config.Flags
	pod            string   // --pod
	args           []string // after the command
	stdout, stderr io.Writer
}

type commandFunc func(context.Context, invocation) error

// subcommands are the commands, with the number of arguments that each takes, and their description in errors.
var subcommands = []struct {
	name        string
	least, most int
	arguments   string
	run         commandFunc
}{
	{name: "validate", run: validate},
	{name: "version", run: showVersion},
	{name: "removable", most: math.MaxInt, run: removable},
	{name: "removable-nodes", least: 1, most: 3, arguments: "HOST:PORT, such as crust-proxy.crust-proxy.svc:9814, and perhaps a COMMAND and a DRIVER", run: removableNodes},
	{name: "withdraw", run: withdraw},
}

func commandOf(args []string) (commandFunc, error) {
	if len(args) == 0 {
		return serve, nil
	}
	var names []string
	for _, one := range subcommands {
		if names = append(names, one.name); one.name != args[0] {
			continue
		}
		if n := len(args) - 1; n < one.least || n > one.most {
			return nil, fmt.Errorf("%s takes %s: %w", one.name, cmp.Or(one.arguments, "no arguments"), errUsage)
		}
		return one.run, nil
	}
	return nil, fmt.Errorf("there is no command %q; there are %s: %w", args[0], strings.Join(names, ", "), errUsage)
}

func showVersion(_ context.Context, call invocation) error {
	sys.PrintVersion(call.stdout, "crust-proxy")
	return nil
}

func serve(ctx context.Context, call invocation) error {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	level := zap.NewAtomicLevel()
	log := telemetry.NewLogger(call.stderr, level)
	// It watches before the file is read.
	set := &settings{flags: call.flags, log: log, watcher: config.Watch(call.flags.File), hangups: hangups}
	cfg, err := set.load()
	if err != nil {
		set.logBad("crust-proxy cannot start: the configuration is bad", err)
		return errLogged
	}
	passed, err := systemd.Inherit("runtime", "admin")
	if err != nil {
		return err
	}
	notify, err := systemd.FromEnvironment()
	if err != nil {
		return err
	}
	start := func(cfg *config.Config) error {
		level.SetLevel(telemetry.Level(cfg.Log.Level))
		set.put(cfg)
		d := &daemon{
			settings: set, level: level, log: log, metrics: telemetry.NewMetrics(sys.Version()),
			notify: notify, passed: passed, hub: admin.NewHub(), started: time.Now(), stopping: make(chan struct{}),
		}
		return d.start(ctx)
	}
	err = start(&cfg)
	if err != nil && ctx.Err() == nil {
		if accepted, failed := set.fallBack(err); failed == nil {
			err = start(&accepted)
		}
	}
	if err != nil {
		log.Error("ended with an error", zap.Error(err))
	}
	return err
}
