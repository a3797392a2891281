package cli

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/crust-proxy/crust-proxy/internal/ground/size"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
	runtimev1 "github.com/crust-proxy/crust-proxy/proto/crust/runtime/v1"
)

func expandCmd(d *daemon, out *printer.Printer) *cobra.Command {
	req := &adminv1.ExpandVolumeRequest{}
	cmd := volumeCmd(d, &cobra.Command{
		Use: "expand VOLUME", Short: "Ask the sandbox of a volume to grow its filesystem",
		Long: `Ask the sandbox of a volume to grow its filesystem to the size of its device. The
device must have been grown before: crustctl does not grow devices. --size and
--limit are bounds: the call fails if the device's size is not between them.`,
		Example: "  crustctl expand shop/postgres-0 --size 20Gi",
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if req.GetLimitBytes() != 0 && req.GetLimitBytes() < req.GetRequiredBytes() {
				return command.WrongUsage(cmd, errors.New("--limit is smaller than --size"))
			}
			return nil
		},
	}, func(cmd *cobra.Command, v *adminv1.Volume) error {
		req.Volume = v.GetId()
		return run(cmd, d, out, adminv1.AdminClient.ExpandVolume, req, func(got *adminv1.ExpandVolumeResponse) error {
			n := got.GetCapacityBytes()
			if got.GetLater() {
				return out.Line(fmt.Sprintf("No sandbox has %s: the next one grows its filesystem to %s (%d bytes) when it mounts it.", named(v), show.Size(n), n))
			}
			return out.Line(fmt.Sprintf("The filesystem of %s has %s now (%d bytes).", named(v), show.Size(n), n))
		})
	})
	cmd.Flags().Var((*size.Flag)(&req.RequiredBytes), "size", "the smallest size to accept, such as 20Gi (default: that of the device)")
	cmd.Flags().Var((*size.Flag)(&req.LimitBytes), "limit", "the largest size to accept (default: any)")
	return cmd
}

func freezeCmd(d *daemon, out *printer.Printer) *cobra.Command {
	var most time.Duration
	cmd := volumeCmd(d, &cobra.Command{
		Use: "freeze VOLUME", Short: "Hold all writes to a volume, for a snapshot",
		Long: `Hold all writes to a volume, its filesystem consistent on the device, until
thaw, or until --for is over, whatever dies meanwhile. A snapshot of the device
that is made in between is consistent if thaw succeeds afterwards.`,
		Example: "  crustctl freeze shop/postgres-0 --for 30s",
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			if most < time.Second || most%time.Second != 0 {
				return command.WrongUsage(cmd, errors.New("--for needs whole seconds, such as 30s"))
			}
			return nil
		},
	}, func(cmd *cobra.Command, v *adminv1.Volume) error {
		req := &adminv1.FreezeVolumeRequest{Volume: v.GetId(), Timeout: durationpb.New(most)}
		return run(cmd, d, out, adminv1.AdminClient.FreezeVolume, req, func(*adminv1.FreezeVolumeResponse) error {
			return out.Line(fmt.Sprintf("All writes to %s are blocked for %s at most: thaw it before then.", named(v), most))
		})
	})
	cmd.Flags().DurationVar(&most, "for", time.Minute, "when writes go on by themselves, at most 10m with crust-runc and crust-vm")
	return cmd
}

func thawCmd(d *daemon, out *printer.Printer) *cobra.Command {
	return volumeCmd(d, &cobra.Command{
		Use: "thaw VOLUME", Short: "Let writes to a frozen volume go on",
		Long: `Let writes to a frozen volume go on. It fails where the volume was not frozen
up to now: then what was copied meanwhile may be of different times.`,
		Example: "  crustctl thaw shop/postgres-0",
	}, func(cmd *cobra.Command, v *adminv1.Volume) error {
		return run(cmd, d, out, adminv1.AdminClient.ThawVolume, &adminv1.ThawVolumeRequest{Volume: v.GetId()}, func(*adminv1.ThawVolumeResponse) error {
			return out.Line("Writes to " + named(v) + " go on; it was frozen until now.")
		})
	})
}

func releaseCmd(d *daemon, out *printer.Printer, keys *os.File) *cobra.Command {
	var yes bool
	req := &adminv1.ReleaseVolumeRequest{}
	cmd := volumeCmd(d, &cobra.Command{
		Use: "release VOLUME", Short: "Take a volume back, as unpublishing it would",
		Long: `Take a volume back, as unpublishing it would: its device is free afterwards. It is
refused while a sandbox or a process has the device: end the VM, and repeat. Delete its
pod first: kubelet does not publish it anew for a pod that stays, and a container that
starts later then writes to the node's own disk.

--force asks no sandbox. A VM that has the device goes on writing to it, beside the
pod or node that gets the device next, and destroys the filesystem. Use it only where
you know that nobody writes: nothing else can tell. crustctl shows who has the volume,
as far as that is known, then asks for confirmation.

A VOLUME that is not namespace/name, the target path or the whole id may be another
volume's name next time: it needs confirmation too, which --yes does not give.`,
		Example: "  crustctl release shop/postgres-0",
	}, func(cmd *cobra.Command, v *adminv1.Volume) error {
		req.Volume = v.GetId()
		question := "Release it?" + show.When(req.GetForce(), " Whoever writes to it then destroys the filesystem")
		if req.GetForce() || isBare(cmd, v) {
			if err := confirm(cmd, keys, yes, v, describeUsers(v), question, "nothing was released"); err != nil {
				return err
			}
		}
		return run(cmd, d, out, adminv1.AdminClient.ReleaseVolume, req, func(got *adminv1.ReleaseVolumeResponse) error {
			return out.Line("Released: " + named(v) + "." +
				show.When(got.GetHeldBy() != "", " Its device is still open in "+got.GetHeldBy()+": end that before the device is used again."))
		})
	})
	cmd.Flags().BoolVar(&req.Force, "force", false, "give the device up although somebody may write to it: destroys data if so")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask before --force; refused for a bare name")
	return cmd
}

func describeUsers(v *adminv1.Volume) string {
	sandbox := cmp.Or(show.When(v.GetSandbox() != nil, "sandbox "+show.Escape(v.GetSandbox().GetId())+" has it"), "no sandbox is known to have it")
	return whole(v) + ": " + sandbox + show.When(v.GetHeldBy() != "", ", and its device is open in "+show.Escape(v.GetHeldBy())) +
		".\nThis is what was noticed before. The kernel was not asked now who has the device open.\n"
}

func endCmd(d *daemon, out *printer.Printer, keys *os.File) *cobra.Command {
	var yes bool
	cmd := volumeCmd(d, &cobra.Command{
		Use: "end VOLUME", Short: "End a VM that still has a volume although its sandbox has ended",
		Long: `End a process that still has the device of a volume open although the container
runtime does not know its sandbox any more, such as a VM that outlived its shim. crustctl
shows the process and why it is an orphan, then asks for confirmation. It never ends a
process that is not known to be an orphan.

With --yes, VOLUME is namespace/name, the target path or the whole id: any other name
may be another volume's next time.`,
		Example: "  crustctl end shop/postgres-0",
	}, func(cmd *cobra.Command, v *adminv1.Volume) error {
		req := &adminv1.EndOrphansRequest{Volume: v.GetId()}
		found, err := ask(cmd.Context(), d, adminv1.AdminClient.EndOrphans, req)
		if err != nil {
			return err
		}
		req.Pids = sys.Map(found.GetOrphans(), (*adminv1.Orphan).GetPid)
		if err := confirm(cmd, keys, yes, v, describeOrphans(v, found, time.Now()), "End it? The VM stops at once", "nothing was ended"); err != nil {
			return err
		}
		return run(cmd, d, out, adminv1.AdminClient.EndOrphans, req, func(got *adminv1.EndOrphansResponse) error {
			return out.Line(fmt.Sprintf("%d processes were ended. They do not have the device of %s open any more.", len(got.GetOrphans()), named(v)))
		})
	})
	cmd.Flags().BoolVar(&yes, "yes", false, "end it without asking; refused for a bare name")
	return cmd
}

func describeOrphans(v *adminv1.Volume, found *adminv1.EndOrphansResponse, now time.Time) string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s:\n", whole(v))
	for _, one := range found.GetOrphans() {
		since := fmt.Sprintf("; this was first noticed %s ago", now.Sub(one.GetHeldSince().AsTime()).Round(time.Second))
		fmt.Fprintf(&text, "process %d (%q), control group %s, has the device%s.\nIt is an orphan: %s %s, which the container runtime does not know.\n",
			one.GetPid(), one.GetProgram(), show.Escape(one.GetControlGroup()), show.When(one.GetHeldSince() != nil, since), one.GetWhy(), one.GetSandbox())
	}
	return text.String()
}

// confirm shows what is concerned. It fails unless --yes is set or the user confirms at a terminal; for a bare name,
// only a person's answer counts.
func confirm(cmd *cobra.Command, keys *os.File, yes bool, v *adminv1.Volume, what, question, refused string) error {
	if (yes || keys == nil) && isBare(cmd, v) {
		return command.WrongUsage(cmd, fmt.Errorf("%s is a name that other volumes may have, so nothing is done without a person at a terminal who "+
			"confirms it: give namespace/name, the target path or the whole id. It is now that of %s", show.Escape(strconv.Quote(cmd.Flags().Arg(0))), whole(v)))
	}
	if _, err := fmt.Fprint(cmd.ErrOrStderr(), what); err != nil || yes {
		return err
	}
	if keys == nil {
		return command.WrongUsage(cmd, errors.New("there is no terminal to ask: repeat with --yes to do it"))
	}
	if _, err := fmt.Fprint(cmd.ErrOrStderr(), question+" [y/N] "); err != nil {
		return err
	}
	if line, _ := bufio.NewReader(keys).ReadString('\n'); strings.TrimSpace(strings.ToLower(line)) != "y" {
		return errors.New(refused)
	}
	return nil
}

func reconcileCmd(d *daemon, out *printer.Printer) *cobra.Command {
	return &cobra.Command{
		Use: "reconcile", Short: "Compare every record with the node now and repair what differs",
		Example: "  crustctl reconcile",
		RunE: func(cmd *cobra.Command, _ []string) error {
			got, err := ask(cmd.Context(), d, adminv1.AdminClient.Reconcile, &adminv1.ReconcileRequest{})
			if err == nil {
				err = out.Result(got, func() error { return printRepairs(out, got) })
			}
			failed := slices.DeleteFunc(got.GetRepairs(), func(r *adminv1.Repair) bool { return r.GetError() == "" })
			if err == nil && len(failed) > 0 {
				err = command.Explain(fmt.Errorf("%d of %d repairs could not be done", len(failed), len(got.GetRepairs())), "See the errors above; 'crustctl doctor' may know more.")
			}
			return err
		},
	}
}

func printRepairs(out *printer.Printer, got *adminv1.ReconcileResponse) error {
	if len(got.GetRepairs()) == 0 {
		return out.Line(show.Count(int(got.GetChecked()), "volume") + " checked, nothing to repair.")
	}
	text, t := printer.Text, printer.NewTable("VOLUME", "DONE", "ACTION", "ERROR")
	for _, r := range got.GetRepairs() {
		t.Add(text(show.ShortID(r.GetVolumeId())), printer.YesNo(r.GetError() == ""), text(r.GetAction()), text(r.GetError()))
	}
	return cmp.Or(out.Table(t), out.Line(show.Count(int(got.GetChecked()), "volume")+" checked."))
}

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
