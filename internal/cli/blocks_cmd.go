package cli

import (
	"cmp"
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/blocks"
	"github.com/crust-proxy/crust-proxy/internal/cli/blockview"
	"github.com/crust-proxy/crust-proxy/internal/cli/printer"
)

func blocksCmd(env Env, out *printer.Printer) *cobra.Command {
	var (
		server       blockServer
		base, format string
	)
	cmd := &cobra.Command{
		Use: "blocks SNAPSHOT", Short: "Show which blocks of a snapshot have data, or have changed since another one",
		Long: `Show which blocks of a volume's snapshot have data or, with --base, have changed
since an earlier snapshot of the volume.

SNAPSHOT and --base are CSI's ids of snapshots, which a VolumeSnapshotContent has
in status.snapshotHandle. -o json prints a line for each message of the stream, raw
a line "OFFSET SIZE" for each range, and qemu-img-map what qemu-img would.`,
		Example: "  crustctl blocks snap-2 --base snap-1 --csi-socket /run/csi/csi.sock",
		Args:    arguments("SNAPSHOT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			picture := &blockview.Picture{
				Out: out, Width: cmp.Or(env.Width, defaultWidth), ASCII: !unicodeLocale(env.Getenv), Snapshot: args[0], Base: base,
			}
			view, err := blockview.New(format, env.Out, picture)
			if err = cmp.Or(err, server.check()); err != nil {
				return wrongUsage(cmd, err)
			}
			return server.with(cmd.Context(), question{target: args[0], base: base}, func(ctx context.Context, _ string, reader *blocks.Reader) error {
				if err := reader.Read(ctx, 0, view.Message); err != nil {
					return err
				}
				return view.End()
			})
		},
	}
	server.flags(cmd)
	cmd.Flags().StringVar(&base, "base", "", "an earlier snapshot of the volume: show what has changed since")
	cmd.Flags().StringVarP(&format, "output", "o", blockview.FormatPicture, "picture, json, raw or qemu-img-map")
	complete(cmd, "output", blockview.Formats()...)
	return cmd
}

// defaultWidth is that of a terminal which does not say.
const defaultWidth = 80

// blockServer is who is asked for blocks.
type blockServer struct {
	csiSocket string
}

func (s *blockServer) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&s.csiSocket, "csi-socket", "", "the socket of the CSI driver that has the snapshot")
}

func (s *blockServer) check() error {
	if s.csiSocket == "" {
		return errors.New("--csi-socket is missing")
	}
	return nil
}

// question is about which snapshots a server is asked.
type question struct {
	target string
	// base is named as target is, and baseID by CSI's id. Both are empty for allocated blocks.
	base, baseID string
}

// with connects, and explains the errors of what is done with the connection. It also gives
// CSI's id of the snapshot.
func (s *blockServer) with(ctx context.Context, of question, do func(context.Context, string, *blocks.Reader) error) error {
	conn, err := blocks.DialCSI(s.csiSocket)
	if err != nil {
		return &explained{err, "The driver's pod and its --endpoint show where the socket is on the node."}
	}
	err = do(ctx, of.target, &blocks.Reader{Source: blocks.FromCSI(conn, cmp.Or(of.baseID, of.base), of.target)})
	return errors.Join(explainBlocks(ctx, err), conn.Close())
}
