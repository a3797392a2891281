package ctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/crust-proxy/crust-proxy/internal/ctl/top"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// topFlags are what `crustctl top` is told.
type topFlags struct {
	settings    top.Settings
	sort, state string
	once        bool
}

func (a *app) topCmd() *cobra.Command {
	var f topFlags
	cmd := &cobra.Command{
		Use: "top", Short: "Show the volumes live: how full they are, who has them, what is wrong",
		Long: `Show the volumes live: how full they are, which sandbox has them, how long it
takes to answer, and what is wrong. ? shows the keys.

Sandboxes are asked for fresh numbers only while their volumes are on the
screen, a few at a time. Where the output is no terminal, with --once, and with
-o json or yaml, one picture is printed, and that is all.`,
		Example: "  crustctl top --sort latency --filter 'bound kata'",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.read(a); err != nil {
				return wrongUsage(cmd, err)
			}
			if f.once || a.machine() || !a.world.screen() {
				return a.call(cmd, func(ctx context.Context, c *client) error { return a.topOnce(ctx, c, f.settings) })
			}
			return a.topLive(cmd.Context(), f.settings)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&f.sort, "sort", top.ByUsage.String(), "the order at first: "+strings.Join(top.OrderNames(), ", "))
	complete(cmd, "sort", top.OrderNames()...)
	flags.StringVar(&f.settings.Filter, "filter", "", "only volumes that have all of these words in name, pod, state, driver, ...")
	flags.StringVar(&f.state, "state", "", "only volumes in this state: "+strings.Join(stateNames(), ", "))
	complete(cmd, "state", stateNames()...)
	flags.DurationVar(&f.settings.Interval, "interval", top.DefaultInterval, "how often a volume's sandbox is asked, 1s or more")
	flags.BoolVar(&f.once, "once", false, "print one picture and end")
	a.selectors(cmd, &f.settings.Driver, &f.settings.Handler)
	return cmd
}

// read turns flags and environment into settings.
func (f *topFlags) read(a *app) (err error) {
	if f.settings.Sort, err = top.ParseOrder(f.sort); err != nil {
		return err
	}
	state, err := parseState(f.state)
	if err != nil {
		return err
	}
	if f.settings.Interval < time.Second {
		return fmt.Errorf("--interval %s is less than 1s", f.settings.Interval)
	}
	f.settings.State = stateName(state)
	f.settings.ASCII = !unicodeLocale(a.world.Getenv)
	f.settings.Host = a.world.Host
	return nil
}

// unicodeLocale tells whether the terminal's owner said that it knows Unicode.
func unicodeLocale(getenv func(string) string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if value := getenv(name); value != "" {
			value = strings.ToLower(strings.ReplaceAll(value, "-", ""))
			return strings.Contains(value, "utf8")
		}
	}
	return false
}

func (c *client) topDaemon(timeout time.Duration) top.Daemon {
	return top.Daemon{AdminClient: c.AdminClient, Timeout: timeout, Explain: func(err error) string {
		line, _, _ := strings.Cut(c.explain(err).Error(), "\n")
		return line
	}}
}

// topLive shows the volumes until the user ends it. A daemon that is not there to
// begin with is an error as everywhere; later on it is waited for.
func (a *app) topLive(ctx context.Context, settings top.Settings) error {
	c, err := newClient(a.socket)
	if err != nil {
		return err
	}
	try, cancel := a.deadline(ctx)
	_, err = c.GetNode(try, &adminv1.GetNodeRequest{})
	cancel()
	if err != nil {
		return errors.Join(c.explain(err), c.Close())
	}
	err = top.Run(ctx, c.topDaemon(a.timeout), top.Terminal{
		In: a.world.Keys, Out: a.world.Out, Env: a.world.Environ,
		There: func() bool { return isTerminal(a.world.Keys) },
	}, settings)
	return errors.Join(err, c.Close())
}

// topOnce prints one picture.
func (a *app) topOnce(ctx context.Context, c *client, settings top.Settings) error {
	picture, err := top.Once(ctx, c.topDaemon(a.timeout), settings)
	if err != nil {
		return c.explain(err)
	}
	if !a.machine() {
		_, err = io.WriteString(a.world.Out, picture.Text())
		return err
	}
	raw, err := pictureJSON(picture)
	if err != nil {
		return err
	}
	return a.printRaw(raw)
}

// pictureJSON is what the single commands give, as one object.
func pictureJSON(p *top.Picture) (json.RawMessage, error) {
	node := proto.CloneOf(p.Node)
	node.Config = "" // no part of a picture
	var object struct {
		Node         json.RawMessage   `json:"node"`
		Handlers     []json.RawMessage `json:"handlers"`
		FrontEnabled bool              `json:"frontEnabled"`
		Drivers      []json.RawMessage `json:"drivers"`
		Volumes      []json.RawMessage `json:"volumes"`
	}
	errs := make([]error, 4)
	object.Node, errs[0] = toJSON(node)
	object.Handlers, errs[1] = toJSONs(p.Handlers)
	object.FrontEnabled = p.Drivers.GetFrontEnabled()
	object.Drivers, errs[2] = toJSONs(p.Drivers.GetDrivers())
	object.Volumes, errs[3] = toJSONs(p.Volumes)
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return json.Marshal(object)
}

func toJSONs[M proto.Message](items []M) ([]json.RawMessage, error) {
	all := make([]json.RawMessage, 0, len(items))
	for _, item := range items {
		raw, err := toJSON(item)
		if err != nil {
			return nil, err
		}
		all = append(all, raw)
	}
	return all, nil
}

// keys is the terminal that crustctl runs on, where it can both show and be typed
// at.
func keys() *os.File {
	if isTerminal(os.Stdin) && isTerminal(os.Stdout) {
		return os.Stdin
	}
	return nil
}

// screen tells whether a picture can be drawn and redrawn.
func (w *World) screen() bool {
	return w.Terminal && w.Keys != nil && w.Getenv("TERM") != "dumb" && w.Getenv("TERM") != ""
}
