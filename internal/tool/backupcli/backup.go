package backupcli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/backup"
	"github.com/crust-proxy/crust-proxy/internal/backup/blocks"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

func backupCmd(out *printer.Printer) *cobra.Command {
	var (
		server   blockServer
		baseFile string
		job      backup.Backup
	)
	cmd := &cobra.Command{
		Use: "backup SNAPSHOT", Short: "Write the blocks of a snapshot into a file",
		Long: `Write the blocks of a volume's snapshot that have data into a file or, with
--base-file, those that have changed since an earlier backup. --from is a device or
image that has what is in the snapshot, such as a raw block volume made of it.

Until the backup is complete its file is called FILE.part. After a failure, run the
same command again: it goes on where it was.`,
		Example: "  crust-backup backup tuesday --from /dev/vdb --file tue.backup --base-file mon.backup",
		Args:    command.Arguments("SNAPSHOT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if job.From == "" || job.File == "" {
				return command.WrongUsage(cmd, errors.New("--from and --file are needed"))
			}
			if err := server.check(cmd); err != nil {
				return command.WrongUsage(cmd, err)
			}
			server.waiting = func(line string) { cmd.PrintErrln("crust-backup: " + line) }
			of := question{target: args[0]}
			if baseFile != "" {
				base, err := backup.ReadBase(baseFile)
				if err != nil {
					return err
				}
				job.Base, of.baseID = base, base.Snapshot
			}
			return runBackup(cmd.Context(), out, &server, of, job)
		},
	}
	server.flags(cmd)
	cmd.Flags().StringVar(&job.From, "from", "", "the device or image to read")
	cmd.Flags().StringVar(&job.File, "file", "", "the file to write")
	cmd.Flags().StringVar(&baseFile, "base-file", "", "the backup before this one: write what has changed since")
	return cmd
}

func runBackup(ctx context.Context, out *printer.Printer, server *blockServer, of question, job backup.Backup) error {
	return server.with(ctx, of, func(ctx context.Context, id string, reader *blocks.Reader) error {
		job.Snapshot, job.Blocks = id, reader
		done, err := job.Run(ctx)
		if err != nil {
			return err
		}
		return out.Result(done, func() error {
			return out.Line(fmt.Sprintf("%s: %s of data of a volume of %s. SHA-256 %s.", job.File, show.Size(done.Data), show.Size(done.Size), done.Digest))
		})
	})
}

func restoreCmd(out *printer.Printer) *cobra.Command {
	var (
		to    string
		check bool
	)
	cmd := &cobra.Command{
		Use: "restore FILE...", Short: "Restore a volume from a full backup and its increments",
		Long: `Restore a volume from a full backup and its increments, in their order, to --to: a
block device that nobody uses, all of whose content is lost, or a new file. All
files are checked before anything is written; --check does no more than that.

After a failure the target is incomplete: run the same command again. What the
target has already is not written again, but where files have the same blocks.`,
		Example: "  crust-backup restore mon.backup tue.backup --to /dev/vdc",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return command.Arguments("FILE")(cmd, args)
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if check == (to != "") {
				return command.WrongUsage(cmd, errors.New("one of --to and --check is needed"))
			}
			var done *backup.Result
			var err error
			if check {
				done, err = backup.Check(cmd.Context(), args)
			} else {
				done, err = backup.Restore(cmd.Context(), args, to)
			}
			if err != nil {
				return err
			}
			return out.Result(done, func() error { return out.Line(restored(done, to)) })
		},
	}
	cmd.Flags().StringVar(&to, "to", "", "the block device to write to, or the file to make")
	cmd.Flags().BoolVar(&check, "check", false, "check the files and write nothing")
	return cmd
}

func restored(done *backup.Result, to string) string {
	what := show.Either(to == "", "The files are whole: snapshot "+done.Snapshot, to+" has snapshot "+done.Snapshot+" now")
	return what + ", " + show.Size(done.Size) + "."
}
