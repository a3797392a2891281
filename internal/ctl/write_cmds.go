package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func number(n int64) string { return strconv.FormatInt(n, 10) }

// say prints a line of our own, whose parts may come from elsewhere.
func (a *app) say(line string) error {
	_, err := io.WriteString(a.world.Out, escapeLines(line)+"\n")
	return err
}

func (a *app) expandCmd() *cobra.Command {
	var atLeast, limit string
	cmd := &cobra.Command{
		Use: "expand VOLUME", Short: "Ask the sandbox of a volume to grow its filesystem",
		Long: `Ask the sandbox of a volume to grow its filesystem, to the whole device or to
--size. The device must have been grown before: crustctl does not grow devices.`,
		Example: "  crustctl expand 3f1c9a0b52de --size 20Gi",
		Args:    arguments("VOLUME"), ValidArgsFunction: a.completeVolume,
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &adminv1.ExpandVolumeRequest{Volume: args[0]}
			if err := sizes(req, atLeast, limit); err != nil {
				return wrongUsage(cmd, err)
			}
			return a.call(cmd, func(ctx context.Context, c *client) error { return a.expand(ctx, c, req) })
		},
	}
	cmd.Flags().StringVar(&atLeast, "size", "", "the least size, such as 20Gi (default: that of the device)")
	cmd.Flags().StringVar(&limit, "limit", "", "the largest size that is still right (default: none)")
	return cmd
}

func sizes(req *adminv1.ExpandVolumeRequest, atLeast, limit string) (err error) {
	if atLeast != "" {
		if req.RequiredBytes, err = parseSize(atLeast); err != nil {
			return fmt.Errorf("--size: %w", err)
		}
	}
	if limit != "" {
		if req.LimitBytes, err = parseSize(limit); err != nil {
			return fmt.Errorf("--limit: %w", err)
		}
	}
	if req.LimitBytes != 0 && req.LimitBytes < req.RequiredBytes {
		return errors.New("--limit is smaller than --size")
	}
	return nil
}

func (a *app) expand(ctx context.Context, c *client, req *adminv1.ExpandVolumeRequest) error {
	got, err := c.ExpandVolume(ctx, req)
	if err != nil {
		return c.explain(err)
	}
	if a.machine() {
		return a.printMessage(got)
	}
	n := got.GetCapacityBytes()
	return a.say(fmt.Sprintf("The filesystem has %s now (%d bytes).", size(n), n))
}

func (a *app) reconcileCmd() *cobra.Command {
	return &cobra.Command{
		Use: "reconcile", Short: "Compare every record with the node now and repair what differs",
		Example: "  crustctl reconcile",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.call(cmd, func(ctx context.Context, c *client) error {
				got, err := c.Reconcile(ctx, &adminv1.ReconcileRequest{})
				if err != nil {
					return c.explain(err)
				}
				return a.reconciled(got)
			})
		},
	}
}

// reconciled fails where something could not be repaired, whoever reads it.
func (a *app) reconciled(got *adminv1.ReconcileResponse) error {
	show := a.repairs
	if a.machine() {
		show = func(r *adminv1.ReconcileResponse) error { return a.printMessage(r) }
	}
	if err := show(got); err != nil {
		return err
	}
	failed := 0
	for _, r := range got.GetRepairs() {
		if r.GetError() != "" {
			failed++
		}
	}
	if failed > 0 {
		return &explained{fmt.Errorf("%d of %d repairs could not be done", failed, len(got.GetRepairs())),
			"See the errors above; 'crustctl doctor' may know more."}
	}
	return nil
}

func (a *app) repairs(got *adminv1.ReconcileResponse) error {
	if len(got.GetRepairs()) == 0 {
		return a.say(fmt.Sprintf("%d volumes checked, nothing to repair.", got.GetChecked()))
	}
	t := &table{heading: []string{"VOLUME", "DONE", "ACTION", "ERROR"}}
	for _, r := range got.GetRepairs() {
		done := painted(green, "yes")
		if r.GetError() != "" {
			done = painted(red, "no")
		}
		t.add(text(short(r.GetVolumeId())), done, text(r.GetAction()), text(r.GetError()))
	}
	if err := a.print(t, true); err != nil {
		return err
	}
	return a.say(fmt.Sprintf("%d volumes checked.", got.GetChecked()))
}
