package cli

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/cli/printer"
	"github.com/crust-proxy/crust-proxy/internal/cli/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func watchCmd(d *daemon, view *volumeView) *cobra.Command {
	req := &adminv1.WatchVolumesRequest{}
	cmd := &cobra.Command{
		Use: "watch", Short: "Show the volumes, then every change until interrupted",
		Long: `Show the volumes, then every change until interrupted. -o json prints one
object per line. --timeout, where it is given, ends the watch; else it goes on.`,
		Example: "  crustctl watch --handler kata -o json",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			last := d.timeout
			if !cmd.Flags().Changed("timeout") {
				last = 0
			}
			patient := *d
			patient.timeout = 0 // a deadline would end the watch with an error of the daemon's
			write := view.watchTable()
			if view.out.Machine() {
				write = func(event *adminv1.WatchVolumesResponse) error { return view.out.Document(event) }
			}
			return patient.call(cmd.Context(), func(ctx context.Context, c *client) error {
				ctx, cancel := endAfter(ctx, last)
				defer cancel()
				return c.watch(ctx, req, write)
			})
		},
	}
	selectors(cmd, d, &req.Driver, &req.Handler)
	return cmd
}

// endAfter cancels the context after a time without a deadline that gRPC would send to
// the daemon; 0 is never.
func endAfter(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	if d == 0 {
		return ctx, cancel
	}
	timer := time.AfterFunc(d, cancel)
	return ctx, func() { timer.Stop(); cancel() }
}

func (c *client) watch(ctx context.Context, req *adminv1.WatchVolumesRequest, write func(*adminv1.WatchVolumesResponse) error) error {
	stream, err := c.WatchVolumes(ctx, req)
	if err != nil && ctx.Err() != nil {
		return nil // as below
	}
	if err != nil {
		return c.explain(err)
	}
	for {
		event, err := stream.Recv()
		switch {
		case err != nil && ctx.Err() != nil:
			return nil // an interrupt and the end of --timeout are no errors
		case errors.Is(err, io.EOF):
			return watchEnded(c.service)
		case err != nil:
			return c.explain(err)
		}
		if err := write(event); err != nil {
			return err
		}
	}
}

// watchTable collects the rows of the first listing, so that the columns fit them, and
// then prints each change as it comes.
func (w *volumeView) watchTable() func(*adminv1.WatchVolumesResponse) error {
	t := printer.NewTable(append([]string{"EVENT"}, w.heading()...)...)
	t.Widths = make([]int, len(t.Heading))
	// room for later changes: event, id, state, ..., sandbox, used, size, age
	copy(t.Widths, []int{7, show.ShortIDLength, 9, 0, 0, 0, show.ShortIDLength, 8, 8, 5})
	synced := false
	return func(event *adminv1.WatchVolumesResponse) error {
		if event.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED {
			synced = true
			return w.out.Table(t, true)
		}
		name := strings.TrimPrefix(event.GetType().String(), "TYPE_")
		if !synced {
			name = "LISTED"
		}
		t.Add(append([]printer.Cell{printer.Text(name)}, w.row(event.GetVolume())...)...)
		if !synced {
			return nil
		}
		return w.out.Table(t, false)
	}
}
