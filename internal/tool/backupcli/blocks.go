package backupcli

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/internal/tool/blockview"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
)

func blocksCmd(env Env, out *printer.Printer) *cobra.Command {
	var (
		server blockServer
		of     question
		format string
	)
	cmd := &cobra.Command{
		Use: "blocks SNAPSHOT", Short: "Show which blocks of a snapshot have data, or have changed since another one",
		Long: `Show which blocks of a volume's snapshot have data or, with --base, have changed
since an earlier snapshot of the volume.

SNAPSHOT and --base are VolumeSnapshots of a Kubernetes cluster, whose service
external-snapshot-metadata is asked. With --csi-socket they are CSI's ids, which a
VolumeSnapshotContent has in status.snapshotHandle, and the driver is asked.

-o json prints a line for each message of the stream, raw a line "OFFSET SIZE" for
each range, and qemu-img-map what qemu-img would.`,
		Example: "  crust-backup blocks tuesday --base monday -n shop --service-account backup-client",
		Args:    command.Arguments("SNAPSHOT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			picture := &blockview.Picture{
				Out: out, Width: env.Width, ASCII: !command.UnicodeLocale(env.Getenv), Snapshot: args[0], Base: cmp.Or(of.base, of.baseID),
			}
			message, end, err := blockview.New(format, env.Out, picture)
			if err = cmp.Or(err, server.check(cmd), of.check()); err != nil {
				return command.WrongUsage(cmd, err)
			}
			of.target = args[0]
			return server.with(cmd.Context(), of, func(ctx context.Context, _ string, reader *blocks.Reader) error {
				if err := reader.Read(ctx, 0, message); err != nil {
					return err
				}
				return end()
			})
		},
	}
	server.flags(cmd)
	cmd.Flags().StringVar(&of.base, "base", "", "an earlier snapshot of the volume: show what has changed since")
	cmd.Flags().StringVar(&of.baseID, "base-id", "", "the same by CSI's id, if Kubernetes has it no more")
	cmd.Flags().StringVarP(&format, "output", "o", blockview.FormatPicture, "picture, json, raw or qemu-img-map")
	command.Complete(cmd, "output", blockview.Formats()...)
	return cmd
}
