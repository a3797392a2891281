package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func (a *app) watchCmd() *cobra.Command {
	req := &adminv1.WatchVolumesRequest{}
	cmd := &cobra.Command{
		Use: "watch", Short: "Show the volumes, then every change until interrupted",
		Long: `Show the volumes, then every change until interrupted. -o json prints one
object per line. --timeout, where it is given, ends the watch; else it goes on.`,
		Example: "  crustctl watch --handler kata -o json",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			last := a.timeout
			if !cmd.Flags().Changed("timeout") {
				last = 0
			}
			a.timeout = 0 // the watch ends by itself: a deadline would end it with an error of the daemon's
			return a.call(cmd, func(ctx context.Context, c *client) error {
				ctx, cancel := endAfter(ctx, last)
				defer cancel()
				return a.watch(ctx, c, req)
			})
		},
	}
	a.selectors(cmd, &req.Driver, &req.Handler)
	return cmd
}

// endAfter cancels after a time, of which the daemon is not told; 0 is never.
func endAfter(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	if d == 0 {
		return ctx, cancel
	}
	timer := time.AfterFunc(d, cancel)
	return ctx, func() { timer.Stop(); cancel() }
}

func (a *app) watch(ctx context.Context, c *client, req *adminv1.WatchVolumesRequest) error {
	stream, err := c.WatchVolumes(ctx, req)
	if err != nil && ctx.Err() != nil {
		return nil // as below
	}
	if err != nil {
		return c.explain(err)
	}
	show := a.watchTable()
	if a.machine() {
		show = a.watchMachine
	}
	for {
		event, err := stream.Recv()
		switch {
		case err != nil && ctx.Err() != nil:
			return nil // interrupted, or its time is over: both end a watch as they should
		case errors.Is(err, io.EOF):
			return &explained{errors.New("the daemon ended the watch"), "It may be restarting: see 'systemctl status crust-proxy'."}
		case err != nil:
			return c.explain(err)
		}
		if err := show(event); err != nil {
			return err
		}
	}
}

// watchMachine prints one JSON object per line, or one YAML document.
func (a *app) watchMachine(event *adminv1.WatchVolumesResponse) error {
	if a.output == formatYAML {
		if _, err := io.WriteString(a.world.Out, "---\n"); err != nil {
			return err
		}
		return a.printMessage(event)
	}
	raw, err := toJSON(event)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.world.Out, "%s\n", escapeJSON(raw))
	return err
}

// watchTable gathers rows until the first listing is whole, so that its columns
// fit, and then prints each change as it comes.
func (a *app) watchTable() func(*adminv1.WatchVolumesResponse) error {
	t := &table{heading: append([]string{"EVENT"}, a.volumeHeading()...)}
	t.widths = make([]int, len(t.heading))
	// room for what may come: event, id, state, ..., sandbox, used, size, age
	copy(t.widths, []int{7, shortID, 9, 0, 0, 0, shortID, 8, 8, 5})
	synced := false
	return func(event *adminv1.WatchVolumesResponse) error {
		if event.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED {
			synced = true
			return a.print(t, true)
		}
		name := strings.TrimPrefix(event.GetType().String(), "TYPE_")
		if !synced {
			name = "LISTED"
		}
		t.add(append([]cell{text(name)}, a.volumeRow(event.GetVolume())...)...)
		if !synced {
			return nil
		}
		return a.print(t, false)
	}
}
