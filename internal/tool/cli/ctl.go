// Package cli is crustctl: it shows an operator the volumes of one node through
// the daemon's Admin API, and checks the node.
package cli

import (
	"cmp"
	"context"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/cluster"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
)

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
	return command.Run(ctx, newRoot(env), args)
}

const (
	socketVariable = "CRUSTCTL_SOCKET"
	defaultTimeout = 30 * time.Second
)

// names is the template of --output name, for all commands that have it.
const names = `{{with .id}}{{println .}}{{end}}{{with .volume}}{{println .id}}{{end}}` +
	`{{range .volumes}}{{println .id}}{{end}}{{range .handlers}}{{println .name}}{{end}}{{range .drivers}}{{println .name}}{{end}}`

func newRoot(env Env) *cobra.Command {
	d := &daemon{env: env, api: apiAdmin}
	out := &printer.Printer{Out: env.Out, Templates: printer.ParseTemplate, Colour: printer.UseColour(env.Terminal, env.Getenv)}
	view := &volumeView{out: out, now: env.Now}
	root := &cobra.Command{
		Use:   "crustctl",
		Short: "Look at and repair the deferred volumes of this node",
		Long: `crustctl talks to crust-proxy on this node through its Admin API.

VOLUME is any name that one volume has: its pod or its PersistentVolumeClaim, each
also as namespace/name, its PersistentVolume, the pod's UID, the CSI driver's volume
id, the target path, the id of crust-proxy or its first 6 digits or more. Where
several volumes have the name, crustctl lists them and does nothing.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 doctor, nodes or volumes found
errors.`,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&d.socket, "socket", cmp.Or(env.Getenv(socketVariable), env.Node.AdminSocket), "the daemon's admin socket (also "+socketVariable+")")
	flags.DurationVar(&d.timeout, "timeout", defaultTimeout, "how long to wait for the daemon; 0 waits for ever")
	root.AddCommand(topCmd(env, d, out), listCmd(d, view, false), getCmd(d, view), statsCmd(d, view), expandCmd(d, out), freezeCmd(d, out), thawCmd(d, out),
		releaseCmd(d, out, env.Keys), publishCmd(d, out, env.Node.Config.RuntimeSocket.Path), unpublishCmd(d, out, env.Node.Config.RuntimeSocket.Path), endCmd(d, out, env.Keys), listCmd(d, view, true), eventsCmd(d, out), explainCmd(d, out), handlersCmd(d, out), driversCmd(d, view), reconcileCmd(d, out), doctorCmd(env.Node, d, out),
		versionCmd(d, out))
	root.AddCommand(cluster.Commands(out, env.Now)...)
	command.Prepare(root, out, env.Err, func(cmd *cobra.Command) error {
		if slices.Contains([]string{"list", "get", "watch", "handlers", "drivers"}, cmd.Name()) {
			out.Names = names
		}
		return d.check()
	})
	return root
}
