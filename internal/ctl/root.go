package ctl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

const (
	socketVariable = "CRUSTCTL_SOCKET"
	defaultTimeout = 30 * time.Second
)

// app is what every command shares.
type app struct {
	world   World
	socket  string
	output  string
	timeout time.Duration
}

func newRoot(world World) *cobra.Command {
	a := &app{world: world}
	root := &cobra.Command{
		Use:   "crustctl",
		Short: "Look at and repair the deferred volumes of this node",
		Long: `crustctl talks to crust-proxy on this node through its Admin API.

VOLUME is a volume's target path, its id, or the beginning of its id (6 digits
or more).

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 doctor found errors.`,
		SilenceErrors: true, SilenceUsage: true,
		SuggestionsMinimumDistance: 2,
		Args:                       noSuchCommand,
		RunE:                       func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetOut(world.Out)
	root.SetErr(world.Err)
	root.SetFlagErrorFunc(wrongUsage)
	a.globalFlags(root)
	root.AddCommand(a.topCmd(), a.listCmd(), a.getCmd(), a.statsCmd(), a.expandCmd(), a.freezeCmd(), a.thawCmd(), a.watchCmd(),
		a.handlersCmd(), a.driversCmd(), a.reconcileCmd(), a.doctorCmd(), a.conformanceCmd(), a.versionCmd())
	root.InitDefaultCompletionCmd()
	ownUsageErrors(root)
	return root
}

// ownUsageErrors makes cobra's own completion command refuse wrong arguments as
// ours do; by itself it prints its help and succeeds.
func ownUsageErrors(root *cobra.Command) {
	completion, _, err := root.Find([]string{"completion"})
	if err != nil {
		return // there is none
	}
	completion.Args = arguments("SHELL")
	completion.RunE = func(cmd *cobra.Command, args []string) error {
		return wrongUsage(cmd, fmt.Errorf("there is no completion for %q", args[0]))
	}
	for _, shell := range completion.Commands() {
		shell.Args = arguments()
	}
}

func (a *app) globalFlags(root *cobra.Command) {
	socket := a.world.Getenv(socketVariable)
	if socket == "" {
		socket = a.world.Node.AdminSocket
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.socket, "socket", socket, "the daemon's admin socket (also "+socketVariable+")")
	flags.DurationVar(&a.timeout, "timeout", defaultTimeout, "how long to wait for the daemon; 0 waits for ever")
	flags.StringVarP(&a.output, "output", "o", formatTable, "table, wide, json or yaml")
	complete(root, "output", formatTable, formatWide, formatJSON, formatYAML)
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error { return a.checkFlags(cmd) }
}

func (a *app) checkFlags(cmd *cobra.Command) error {
	switch a.output {
	case formatTable, formatWide, formatJSON, formatYAML:
	default:
		return wrongUsage(cmd, fmt.Errorf("--output %q is not table, wide, json or yaml", a.output))
	}
	if a.timeout < 0 {
		return wrongUsage(cmd, fmt.Errorf("--timeout %s is negative", a.timeout))
	}
	if _, err := socketPath(a.socket); err != nil {
		return wrongUsage(cmd, err)
	}
	return nil
}

func wrongUsage(cmd *cobra.Command, err error) error {
	return &usageError{command: cmd.CommandPath(), err: err}
}

// arguments makes a command take exactly the named arguments.
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
	text := fmt.Sprintf("there is no command %q", args[0])
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		text += "; did you mean " + strings.Join(near, " or ") + "?"
	}
	return wrongUsage(cmd, errors.New(text))
}

// call runs one exchange with the daemon within the timeout.
func (a *app) call(cmd *cobra.Command, do func(context.Context, *client) error) error {
	ctx, cancel := a.deadline(cmd.Context())
	defer cancel()
	c, err := newClient(a.socket)
	if err != nil {
		return err
	}
	return errors.Join(do(ctx, c), c.Close())
}

func (a *app) deadline(ctx context.Context) (context.Context, context.CancelFunc) {
	if a.timeout == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, a.timeout)
}

// parseState reads a state as people write it.
func parseState(text string) (adminv1.VolumeState, error) {
	if text == "" {
		return adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED, nil
	}
	n, ok := adminv1.VolumeState_value[statePrefix+strings.ToUpper(text)]
	if !ok || n == 0 {
		return 0, fmt.Errorf("--state %q is none of %s", text, strings.Join(stateNames(), ", "))
	}
	return adminv1.VolumeState(n), nil
}
