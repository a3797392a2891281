package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

// runtimeCmd completes a command of the Runtime API, which has a socket of its own.
func runtimeCmd(d *daemon, usual string, cmd *cobra.Command, run func(context.Context, runtimev1.RuntimeClient, []string) error) *cobra.Command {
	runtime := *d
	cmd.Flags().StringVar(&runtime.socket, "runtime-socket", usual, "the daemon's socket of the Runtime API")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		runtime.api, runtime.timeout = apiRuntime, d.timeout
		return runtime.call(cmd.Context(), func(ctx context.Context, c *client) error {
			return run(ctx, runtimev1.NewRuntimeClient(c.conn), args)
		})
	}
	return cmd
}

func publishCmd(d *daemon, out *printer.Printer, usual string) *cobra.Command {
	req := &runtimev1.RuntimeStageVolumeRequest{VolumeType: &runtimev1.VolumeType{Type: runtimev1.VolumeType_BLOCK}}
	var readOnly bool
	var cmd *cobra.Command
	cmd = runtimeCmd(d, usual, &cobra.Command{
		Use: "publish DEVICE TARGET", Short: "Hand over a device: the sandbox of a pod mounts its filesystem",
		Long: `Hand over a block device or a disk image by the Runtime API, as an orchestrator
would. TARGET is the path at which kubelet would publish the volume of the pod, below
kubelet's root; its parent directory must exist. The device must have the filesystem.`,
		Example: "  crustctl publish /dev/vg/data /var/lib/kubelet/pods/UID/volumes/x/data/mount --fs xfs",
		Args:    command.Arguments("DEVICE", "TARGET"),
	}, func(ctx context.Context, c runtimev1.RuntimeClient, args []string) error {
		req.VolumeBackingPath, req.VolumeTargetPath = args[0], args[1]
		if req.GetFsType() == "" {
			return command.WrongUsage(cmd, errors.New("publish needs --fs: the filesystem on the device, such as xfs"))
		}
		if readOnly {
			req.MountFlags = append(req.MountFlags, "ro")
		}
		got, err := c.RuntimeStageVolume(ctx, req)
		if err != nil {
			return err
		}
		return out.Result(got, func() error {
			return out.Line(fmt.Sprintf("Published %s at %s: the sandbox of the pod mounts it as %s.", args[0], args[1], req.GetFsType()))
		})
	})
	cmd.Flags().StringVar(&req.FsType, "fs", "", "the filesystem on the device; required")
	cmd.Flags().StringSliceVar(&req.MountFlags, "options", nil, "mount options, such as noatime,nosuid")
	cmd.Flags().BoolVar(&readOnly, "read-only", false, "the sandbox mounts it read-only")
	return cmd
}

func unpublishCmd(d *daemon, out *printer.Printer, usual string) *cobra.Command {
	return runtimeCmd(d, usual, &cobra.Command{
		Use: "unpublish TARGET", Short: "Take back what publish handed over",
		Long: `Take back what publish handed over at a target path. It is refused while a sandbox
or a process has the device. A target at which nothing is published is a success.`,
		Example: "  crustctl unpublish /var/lib/kubelet/pods/UID/volumes/x/data/mount",
		Args:    command.Arguments("TARGET"),
	}, func(ctx context.Context, c runtimev1.RuntimeClient, args []string) error {
		got, err := c.RuntimeUnstageVolume(ctx, &runtimev1.RuntimeUnstageVolumeRequest{VolumeTargetPath: args[0]})
		if err != nil {
			return err
		}
		return out.Result(got, func() error { return out.Line("No volume is published at " + args[0] + " now.") })
	})
}
