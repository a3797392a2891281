package cli

import (
	"context"
	"errors"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func watchCmd(d *daemon, view *volumeView) *cobra.Command {
	req := &adminv1.WatchVolumesRequest{}
	cmd := &cobra.Command{
		Use: "watch", Short: "Show the volumes, then every change until interrupted",
		Long: `Show the volumes, then every change until interrupted. -o json prints one
object per line. --timeout, where it is given, ends the watch; else it goes on.`,
		Example: "  crustctl watch --handler kata -o json",
		Args:    command.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			write := view.watchTable()
			if view.out.Machine() {
				write = func(event *adminv1.WatchVolumesResponse) error { return view.out.Document(event) }
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			defer cancel()
			if cmd.Flags().Changed("timeout") { // as a deadline it would end the watch with an error of the daemon's
				defer time.AfterFunc(d.timeout, cancel).Stop()
			}
			return d.within(forEver).call(ctx, func(ctx context.Context, c *client) error { return c.watch(ctx, req, write) })
		},
	}
	selectors(cmd, d, &req.Driver, &req.Handler)
	return cmd
}

func (c *client) watch(ctx context.Context, req *adminv1.WatchVolumesRequest, write func(*adminv1.WatchVolumesResponse) error) error {
	stream, err := c.WatchVolumes(ctx, req)
	for err == nil {
		var event *adminv1.WatchVolumesResponse
		if event, err = stream.Recv(); err == nil {
			if err := write(event); err != nil {
				return err
			}
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil // an interrupt and the end of --timeout are no errors
	case errors.Is(err, io.EOF):
		return watchEnded(c.service)
	}
	return err
}

// watchTable collects the rows of the first listing, so that the columns fit them, and
// then prints each change as it comes.
func (w *volumeView) watchTable() func(*adminv1.WatchVolumesResponse) error {
	t := printer.NewTable(append([]string{"EVENT"}, w.heading()...)...)
	// room for later changes: event, id, state, ..., sandbox, used, size, age
	t.Widths = []int{7, show.ShortIDLength, 9, 0, 0, 0, show.ShortIDLength, 8, 8, 5}
	synced := false
	return func(event *adminv1.WatchVolumesResponse) error {
		if event.GetType() == adminv1.WatchVolumesResponse_TYPE_SYNCED {
			synced = true
			return w.out.Table(t)
		}
		name := strings.TrimPrefix(event.GetType().String(), "TYPE_")
		if !synced {
			name = "LISTED"
		}
		t.Add(append([]printer.Cell{printer.Text(name)}, w.row(event.GetVolume())...)...)
		if !synced {
			return nil
		}
		return w.out.Table(t)
	}
}
