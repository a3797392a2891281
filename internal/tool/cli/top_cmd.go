package cli

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/internal/tool/top"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func topCmd(env Env, d *daemon, out *printer.Printer) *cobra.Command {
	var (
		settings    top.Settings
		sort, state string
		once        bool
	)
	cmd := &cobra.Command{
		Use: "top", Short: "Show the volumes live: how full they are, who has them, what is wrong",
		Long: `Show the volumes live: how full they are, which sandbox has them, how long it
takes to answer, and what is wrong. ? shows the keys.

Sandboxes are asked for fresh numbers only while their volumes are on the
screen, a few at a time. Where the output is no terminal, with --once, and with
-o json or yaml, one picture is printed, and that is all: as wide as the
terminal, or 80 columns, or with -o wide as wide as it needs to be.`,
		Example: "  crustctl top --sort latency --filter 'bound kata'",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := readTopFlags(&settings, env, sort, state); err != nil {
				return command.WrongUsage(cmd, err)
			}
			if once || out.Machine() || !env.screen() {
				return topOnce(cmd.Context(), d, out, settings, env.Width)
			}
			// If the daemon does not answer at the start, that is an error as for every command; later, top waits for it.
			if _, err := ask(cmd.Context(), d, adminv1.AdminClient.GetNode, &adminv1.GetNodeRequest{}); err != nil {
				return err
			}
			return d.within(forEver).call(cmd.Context(), func(ctx context.Context, c *client) error {
				return top.Run(ctx, topDaemon(c, d.timeout), top.Terminal{In: env.Keys, Out: env.Out, Env: env.Environ}, settings)
			})
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&sort, "sort", top.ByUsage.String(), "the order at first: "+strings.Join(top.OrderNames(), ", "))
	command.Complete(cmd, "sort", top.OrderNames()...)
	flags.StringVar(&settings.Filter, "filter", "", "only volumes that have all of these words in name, pod, state, driver, ...")
	flags.StringVar(&state, "state", "", "only volumes in this state: "+strings.Join(show.StateNames(), ", "))
	command.Complete(cmd, "state", show.StateNames()...)
	flags.DurationVar(&settings.Interval, "interval", top.DefaultInterval, "how often a volume's sandbox is asked, 1s or more")
	flags.BoolVar(&once, "once", false, "print one picture and end")
	flags.StringVar(&settings.Driver, "driver", "", "only volumes of this CSI driver")
	flags.StringVar(&settings.Handler, "handler", "", "only volumes of this runtime handler")
	completeFlag(cmd, d, "driver", (*adminv1.Volume).GetDriver)
	completeFlag(cmd, d, "handler", (*adminv1.Volume).GetHandler)
	return cmd
}

func readTopFlags(settings *top.Settings, env Env, sort, state string) (err error) {
	if settings.Sort, err = top.ParseOrder(sort); err != nil {
		return err
	}
	if err := show.CheckStates(state); state != "" && err != nil {
		return err
	}
	if settings.Interval < time.Second {
		return fmt.Errorf("--interval %s is less than 1s", settings.Interval)
	}
	settings.State, settings.ASCII, settings.Host = strings.ToUpper(state), !command.UnicodeLocale(env.Getenv), env.Host
	return nil
}

func topDaemon(c *client, timeout time.Duration) top.Daemon {
	return top.Daemon{AdminClient: c.AdminClient, Timeout: timeout, Explain: func(err error) string {
		line, _, _ := strings.Cut(c.explain(err).Error(), "\n")
		return line
	}}
}

func topOnce(ctx context.Context, d *daemon, out *printer.Printer, settings top.Settings, width int) error {
	return d.call(ctx, func(ctx context.Context, c *client) error {
		picture, err := top.Once(ctx, topDaemon(c, d.timeout), settings)
		if err != nil {
			return err
		}
		node := proto.CloneOf(picture.Node)
		node.Config = "" // no part of a picture
		object := pictureObject{
			Node: printer.Object{Message: node}, Handlers: printer.Objects(picture.Handlers),
			FrontEnabled: picture.Drivers.GetFrontEnabled(), Drivers: printer.Objects(picture.Drivers.GetDrivers()),
			Volumes: printer.Objects(picture.Volumes),
		}
		return out.Result(object, func() error {
			_, err := io.WriteString(out.Out, picture.Text(show.When(!out.Wide(), width)))
			return err
		})
	})
}

// pictureObject has the output of several commands.
type pictureObject struct {
	Node         printer.Object   `json:"node"`
	Handlers     []printer.Object `json:"handlers"`
	FrontEnabled bool             `json:"frontEnabled"`
	Drivers      []printer.Object `json:"drivers"`
	Volumes      []printer.Object `json:"volumes"`
}

// screen reports whether the terminal can show a picture that changes.
func (e Env) screen() bool {
	return e.Terminal && e.Keys != nil && e.Getenv("TERM") != "dumb" && e.Getenv("TERM") != ""
}
