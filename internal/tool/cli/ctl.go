// Package cli is crustctl: it shows an operator the volumes of one node through
// the daemon's Admin API, and checks the node.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/crust-proxy/crust-proxy/internal/tool/cluster"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/internal/tool/top"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// ExitFindings is doctor's exit code if it found an error.
const ExitFindings = 3

// Env is the environment of crustctl, without the daemon.
type Env struct {
	Out, Err io.Writer
	Getenv   func(string) string
	Environ  []string
	Host     string           // this machine's name
	Now      func() time.Time // ages are counted from it
	Terminal bool             // Out is a terminal
	Width    int              // of its lines
	Keys     *os.File         // that terminal if keys can be read from it, else nil
	Node     doctor.Node      // what doctor checks, before flags change it
	Run      runner           // asks systemd; nil where it is not asked
}

// Main runs crustctl on this machine and returns its exit code.
func Main(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	host, _ := os.Hostname() // only shown
	env := Env{
		Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv, Now: time.Now,
		Terminal: printer.IsTerminal(os.Stdout), Width: printer.Width(os.Stdout), Node: doctor.DefaultNode(),
		Environ: os.Environ(), Host: host, Run: runProgram,
	}
	if env.Terminal && printer.IsTerminal(os.Stdin) {
		env.Keys = os.Stdin
	}
	return Run(ctx, args, env)
}

// Run runs one command line and returns its exit code.
func Run(ctx context.Context, args []string, env Env) int {
	root := newRoot(env)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if errors.Is(err, errFindings) || errors.Is(err, cluster.ErrFindings) {
		return ExitFindings // the findings are printed already
	}
	return command.Report(root, err)
}

const (
	socketVariable = "CRUSTCTL_SOCKET"
	defaultTimeout = 30 * time.Second
)

func newRoot(env Env) *cobra.Command {
	d := &daemon{service: env.Node.Service, root: env.Node.UID == 0, unit: func(socket string) unit { return unitOf(env, socket) }}
	out := &printer.Printer{Out: env.Out, Colour: printer.UseColour(env.Terminal, env.Getenv)}
	view := &volumeView{out: out, now: env.Now}
	root := &cobra.Command{
		Use:   "crustctl",
		Short: "Look at and repair the deferred volumes of this node",
		Long: `crustctl talks to crust-proxy on this node through its Admin API.

VOLUME is a volume's target path, its id, or the beginning of its id (6 digits
or more).

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 doctor, nodes or volumes found
errors.`,
	}
	root.SetOut(env.Out)
	root.SetErr(env.Err)
	flags := root.PersistentFlags()
	flags.StringVar(&d.socket, "socket", cmp.Or(env.Getenv(socketVariable), env.Node.AdminSocket), "the daemon's admin socket (also "+socketVariable+")")
	flags.DurationVar(&d.timeout, "timeout", defaultTimeout, "how long to wait for the daemon; 0 waits for ever")
	flags.StringVarP(&out.Format, "output", "o", printer.FormatTable, "table, wide, json or yaml")
	command.Complete(root, "output", printer.Formats()...)
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) error {
		if err := cmp.Or(out.Check(), d.check()); err != nil {
			return command.WrongUsage(cmd, err)
		}
		return nil
	}
	root.AddCommand(topCmd(env, d, out), listCmd(d, view), getCmd(d, view), statsCmd(d, view), expandCmd(d, out), freezeCmd(d, out), thawCmd(d, out),
		releaseCmd(d, out, env.Keys), endCmd(d, out, env.Keys), watchCmd(d, view), handlersCmd(d, out), driversCmd(d, view), reconcileCmd(d, out), doctorCmd(env.Node, d, out),
		versionCmd(d, out))
	root.AddCommand(cluster.Commands(out, env.Err, env.Now)...)
	command.Prepare(root)
	return root
}

const completionWait = 2 * time.Second

// selectors adds the flags that select volumes. Their completion asks the daemon.
func selectors(cmd *cobra.Command, d *daemon, driver, handler *string) {
	cmd.Flags().StringVar(driver, "driver", "", "only volumes of this CSI driver")
	cmd.Flags().StringVar(handler, "handler", "", "only volumes of this runtime handler")
	for flag, words := range map[string]wordsFunc{"driver": driversOf, "handler": handlersOf} {
		_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return d.offer(cmd.Context(), begun, words)
		})
	}
}

func completeVolume(d *daemon) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return d.offer(cmd.Context(), begun, func(ctx context.Context, c *client) (words []string) {
			volumes, _ := top.ListVolumes(ctx, c, &adminv1.ListVolumesRequest{})
			for _, v := range volumes {
				word := v.GetTargetPath()
				if !strings.HasPrefix(begun, "/") {
					word = show.ShortID(v.GetId()) + "\t" + show.Escape(word)
				}
				words = append(words, word)
			}
			return words
		})
	}
}

type wordsFunc func(context.Context, *client) []string

// offer returns the words with the prefix that the user typed. If the daemon does not answer,
// there are none: a shell cannot show an error.
func (d *daemon) offer(ctx context.Context, begun string, words wordsFunc) ([]string, cobra.ShellCompDirective) {
	var offered []string
	_ = d.within(completionWait).call(ctx, func(ctx context.Context, c *client) error {
		for _, word := range words(ctx, c) {
			// A shell splits the offers at line feeds and prints them: a word with control
			// characters is left out. One tab separates the word from its description.
			untabbed := strings.Replace(word, "\t", "", 1)
			if word != "" && strings.HasPrefix(word, begun) && show.Escape(untabbed) == untabbed {
				offered = append(offered, word)
			}
		}
		return nil
	})
	slices.Sort(offered)
	return slices.Compact(offered), cobra.ShellCompDirectiveNoFileComp
}

// driversOf returns the drivers of volumes and those that registered with the front. An older
// daemon cannot list the latter.
func driversOf(ctx context.Context, c *client) (names []string) {
	volumes, _ := top.ListVolumes(ctx, c, &adminv1.ListVolumesRequest{})
	for _, v := range volumes {
		names = append(names, v.GetDriver())
	}
	drivers, _ := c.ListDrivers(ctx, &adminv1.ListDriversRequest{})
	for _, d := range drivers.GetDrivers() {
		names = append(names, d.GetName())
	}
	return names
}

func handlersOf(ctx context.Context, c *client) (names []string) {
	got, _ := c.ListHandlers(ctx, &adminv1.ListHandlersRequest{})
	for _, h := range got.GetHandlers() {
		names = append(names, h.GetName())
	}
	return names
}

func stateNames() []string {
	var names []string
	for n := int32(1); adminv1.VolumeState_name[n] != ""; n++ {
		names = append(names, strings.ToLower(show.StateName(adminv1.VolumeState(n))))
	}
	return names
}

func parseState(text string) (adminv1.VolumeState, error) {
	if text == "" {
		return adminv1.VolumeState_VOLUME_STATE_UNSPECIFIED, nil
	}
	n, ok := adminv1.VolumeState_value[show.StatePrefix+strings.ToUpper(text)]
	if !ok || n == 0 {
		return 0, fmt.Errorf("--state %q is none of %s", text, strings.Join(stateNames(), ", "))
	}
	return adminv1.VolumeState(n), nil
}

func stateFlag(cmd *cobra.Command, state *string) {
	cmd.Flags().StringVar(state, "state", "", "only volumes in this state: "+strings.Join(stateNames(), ", "))
	command.Complete(cmd, "state", stateNames()...)
}

// parseSize reads a quantity as Kubernetes writes it: 20Gi, 1.5Ti, 10G, 4096.
func parseSize(text string) (int64, error) {
	digits := strings.TrimRight(text, "BEGKMPTik")
	size, err := resource.ParseQuantity(strings.TrimSuffix(text, "B"))
	if err != nil || strings.Trim(digits, "0123456789.") != "" {
		return 0, fmt.Errorf("%q is no size; write it as 20Gi, 500Mi or in bytes", text)
	}
	// A quantity that is too large becomes the largest number.
	if n := size.Value(); n > 0 && n < math.MaxInt64 {
		return n, nil
	}
	return 0, errors.New(text + " is out of range: a size is more than 0 and less than 8Ei")
}
