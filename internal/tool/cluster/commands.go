package cluster

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

type tool struct {
	access
	out *printer.Printer
	now func() time.Time
}

// Main is kubectl's plug-in: kubectl crust. It returns the exit code.
func Main(args []string) int {
	ctx, stop := sys.UntilInterrupted()
	defer stop()
	out := &printer.Printer{Out: os.Stdout, Templates: printer.ParseTemplate, Colour: printer.UseColour(printer.IsTerminal(os.Stdout), os.Getenv)}
	return run(ctx, args, out, os.Stderr)
}

func run(ctx context.Context, args []string, out *printer.Printer, stderr io.Writer) int {
	root := &cobra.Command{
		Use: "kubectl-crust", Short: "Look at the nodes of a cluster that have crust-proxy",
		Long: `kubectl crust asks the daemons of all nodes through the API server's proxy, with
the caller's own rights.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a node has an error or did not
answer, a check or a test failed.`,
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl crust"},
	}
	root.AddCommand(append(Commands(out, time.Now), checkCmd(out), testCmd(out), bundleCmd(out))...)
	command.Prepare(root, out, stderr, nil)
	root.PersistentFlags().Lookup("output").Usage = "table, wide, json or yaml"
	return command.Run(ctx, root, args)
}

// Commands are those that crustctl has, too.
func Commands(out *printer.Printer, now func() time.Time) []*cobra.Command {
	return []*cobra.Command{nodesCmd(out, now), volumesCmd(out, now)}
}

// newCommand makes a command that asks all nodes a question and works on their answers.
func newCommand(t *tool, cmd *cobra.Command, question func(context.Context, *state) error, work func(context.Context, *api, []*state) error) *cobra.Command {
	t.flags(cmd.PersistentFlags()) // they are described together
	cmd.Use += " [SERVICE:PORT]"
	cmd.Args = command.Arguments("[SERVICE:PORT]")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 && len(t.nodes) > 0 {
			return command.WrongUsage(cmd, errors.New("--node is for the API server: of SERVICE:PORT all addresses are asked"))
		}
		all, k, err := t.places(cmd.Context(), append(args, "")[0])
		if err != nil {
			return err
		}
		return work(cmd.Context(), k, t.ask(cmd.Context(), all, question))
	}
	return cmd
}

// verdict is command.ErrFindings if a node is bad.
func verdict(err error, states []*state) error {
	if err == nil && slices.ContainsFunc(states, (*state).bad) {
		return command.ErrFindings
	}
	return err
}

func nodesCmd(out *printer.Printer, now func() time.Time) *cobra.Command {
	t := &tool{out: out, now: now}
	return newCommand(t, &cobra.Command{
		Use: "nodes", Short: "Show the nodes of the cluster that have crust-proxy",
		Long: `Show the nodes of the cluster: of each the daemon's version, volumes, drivers,
findings and configuration. Without SERVICE, the API server's proxy is used.`,
		Example: "  crustctl nodes --context prod -o wide",
	}, askNode, func(_ context.Context, _ *api, states []*state) error { return verdict(t.printNodes(states), states) })
}

func volumesCmd(out *printer.Printer, now func() time.Time) *cobra.Command {
	var f filter
	t := &tool{out: out, now: now}
	cmd := newCommand(t, &cobra.Command{
		Use: "volumes", Short: "List the volumes of all nodes of the cluster", Example: "  crustctl volumes --state degraded -n shop",
	}, func(ctx context.Context, s *state) error { return s.askVolumes(ctx, f.query()) },
		func(_ context.Context, _ *api, states []*state) error {
			return verdict(t.printVolumes(states, f), states)
		})
	cmd.Flags().StringVarP(&f.namespace, "namespace", "n", "", "only volumes of pods in this namespace")
	cmd.Flags().StringVar(&f.driver, "driver", "", "only volumes of this CSI driver")
	cmd.Flags().StringVar(&f.state, "state", "", "only volumes in this state: "+strings.Join(show.StateNames(), ", "))
	command.Complete(cmd, "state", show.StateNames()...)
	cmd.PreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := show.CheckStates(f.state); f.state != "" && err != nil {
			return command.WrongUsage(cmd, err)
		}
		return nil
	}
	return cmd
}

func checkCmd(out *printer.Printer) *cobra.Command {
	t := &tool{out: out, now: time.Now}
	return newCommand(t, &cobra.Command{
		Use: "check", Short: "Check crust-proxy in the cluster, a line for each component",
		Long: `Check crust-proxy in the cluster: installation, daemons, versions, configuration,
drivers, handlers, volumes and findings. The exit code is 3 if a line says fail.`,
		Example: "  kubectl crust check --context prod",
	}, askNode, func(ctx context.Context, k *api, states []*state) error {
		return printAll(out, checkAll(ctx, &t.access, k, states))
	})
}

func testCmd(out *printer.Printer) *cobra.Command {
	r := &trial{t: &tool{out: out, now: time.Now}}
	cmd := &cobra.Command{
		Use: "test --storage-class NAME", Short: "Try the whole way of a volume with a throw-away claim and pod",
		Long: `Make a claim and a pod in a namespace of their own, and see that the pod writes,
that the volume is deferred, that the host does not see it, that there are
stats, that it grows if class and sandbox do that, and that all of it goes. What
was made is removed whatever happens, also after an interrupt.`,
		Example: "  kubectl crust test --storage-class fast --runtime-class kata",
		Args: func(cmd *cobra.Command, args []string) error {
			if r.class == "" {
				return command.WrongUsage(cmd, errors.New("name the class to test by --storage-class"))
			}
			return command.Arguments()(cmd, args)
		},
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if r.k, err = r.t.connect(); err != nil {
				return err
			}
			signal.Ignore(syscall.SIGPIPE) // it cleans up also if nobody reads on
			return r.run(cmd.Context())
		},
	}
	r.t.flags(cmd.Flags())
	r.flags(cmd.Flags())
	return cmd
}

func bundleCmd(out *printer.Printer) *cobra.Command {
	t, file := &tool{out: out, now: time.Now}, ""
	cmd := newCommand(t, &cobra.Command{
		Use: "bundle", Short: "Write a redacted archive for support, of one node or all",
		Long: `Write an archive for support: what check and the daemons say, metrics, and of
the daemons' pods configuration, events and logs, where your rights allow that.
--node selects nodes. What looks like a secret is removed.`,
		Example: "  kubectl crust bundle --node node-7",
	}, askAll, func(ctx context.Context, k *api, states []*state) error {
		return writeBundle(ctx, t, k, states, cmp.Or(file, t.now().UTC().Format("crust-bundle-20060102-150405.tar.gz")))
	})
	cmd.Flags().StringVar(&file, "file", "", "the archive to write (if not given, crust-bundle-TIME.tar.gz)")
	return cmd
}
