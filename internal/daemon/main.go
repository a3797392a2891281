// Package daemon puts crust-proxy together: configuration, core, servers, and
// what watches over them.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"

	"github.com/spf13/pflag"

	"github.com/crust-proxy/crust-proxy/internal/config"
	"github.com/crust-proxy/crust-proxy/internal/run"
)

// Version is the daemon's version, as the build stamped it from git.
func Version() string {
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

const usage = `crust-proxy lets a pod's sandbox mount its volumes.

Usage:
  crust-proxy [flags]            serve until SIGTERM
  crust-proxy validate [flags]   check the configuration and show what is in force
  crust-proxy version            show the version
  crust-proxy removable [DRIVER...] [flags]
                                 tell whether crust-proxy can be removed from this
                                 node, or drivers from behind it: exit code 1 and
                                 a list where deferred volumes live. It reads the
                                 records, so the daemon need not run
  crust-proxy removable-nodes HOST:PORT [COMMAND]
                                 the same for all nodes whose daemons have their
                                 metrics at the addresses of HOST; a node that
                                 does not answer counts as one with volumes. A
                                 refusal names COMMAND, which makes a Helm release
                                 usable again
  crust-proxy withdraw [flags]   when the daemon has gone for good: have kubelet
                                 forget the drivers that were registered through it

Signals: SIGTERM and SIGINT end it after the calls under way; SIGHUP reads the
configuration again.

Flags:
`

// Exit codes.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

// Main runs the command line and gives the exit code.
func Main(args []string, stdout, stderr io.Writer) int {
	// Signals are handled before anything slow begins, so that none is lost.
	ctx, stop := run.UntilSignal(context.Background())
	defer stop()
	set := pflag.NewFlagSet("crust-proxy", pflag.ContinueOnError)
	set.SetOutput(stderr)
	set.Usage = func() { _, _ = fmt.Fprint(stderr, usage, set.FlagUsages()) }
	flags := config.AddFlags(set)
	if err := set.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return exitOK
		}
		_, _ = fmt.Fprintln(stderr, "crust-proxy:", err)
		return exitUsage
	}
	command, err := command(set.Args())
	if err == nil {
		err = command(ctx, flags, stdout, stderr)
	}
	if err == nil {
		return exitOK
	}
	_, _ = fmt.Fprintln(stderr, "crust-proxy:", err)
	if errors.Is(err, errUsage) {
		return exitUsage
	}
	return exitError
}

var errUsage = errors.New("see crust-proxy --help")

type commandFunc func(ctx context.Context, flags *config.Flags, stdout, stderr io.Writer) error

func command(args []string) (commandFunc, error) {
	switch {
	case len(args) == 0:
		return serve, nil
	case len(args) == 1 && args[0] == "validate":
		return validate, nil
	case len(args) == 1 && args[0] == "version":
		return showVersion, nil
	case args[0] == "removable":
		return removable(args[1:]), nil
	case (len(args) == 2 || len(args) == 3) && args[0] == "removable-nodes":
		return removableNodes(args[1], args[2:]...), nil
	case len(args) == 1 && args[0] == "withdraw":
		return withdraw, nil
	default:
		return nil, fmt.Errorf("unknown arguments %q: %w", args, errUsage)
	}
}

func showVersion(_ context.Context, _ *config.Flags, stdout, _ io.Writer) error {
	_, err := fmt.Fprintln(stdout, Version())
	return err
}

func validate(_ context.Context, flags *config.Flags, stdout, _ io.Writer) error {
	cfg, err := flags.Load()
	if err != nil {
		return err
	}
	text, err := cfg.YAML()
	if err != nil {
		return err
	}
	policy := cfg.DeferralPolicy()
	for _, line := range append(policy.ExplainModes(), policy.ExplainRuntimes()...) {
		text += "# " + line + "\n"
	}
	_, err = io.WriteString(stdout, text)
	return err
}
