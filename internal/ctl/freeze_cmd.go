package ctl

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

func (a *app) freezeCmd() *cobra.Command {
	var most time.Duration
	cmd := &cobra.Command{
		Use: "freeze VOLUME", Short: "Hold all writes to a volume, for a snapshot",
		Long: `Hold all writes to a volume, its filesystem consistent on the device, until
thaw, or until --for is over, whatever dies meanwhile. A snapshot of the device
that is made in between is consistent if thaw succeeds afterwards.`,
		Example: "  crustctl freeze 3f1c9a0b52de --for 30s",
		Args:    arguments("VOLUME"), ValidArgsFunction: a.completeVolume,
		RunE: func(cmd *cobra.Command, args []string) error {
			if most < time.Second || most%time.Second != 0 {
				return wrongUsage(cmd, errors.New("--for needs whole seconds, such as 30s"))
			}
			req := &adminv1.FreezeVolumeRequest{Volume: args[0], Timeout: durationpb.New(most)}
			return a.call(cmd, func(ctx context.Context, c *client) error { return a.freeze(ctx, c, req) })
		},
	}
	cmd.Flags().DurationVar(&most, "for", time.Minute, "when writes go on by themselves")
	return cmd
}

func (a *app) freeze(ctx context.Context, c *client, req *adminv1.FreezeVolumeRequest) error {
	got, err := c.FreezeVolume(ctx, req)
	if err != nil {
		return c.explain(err)
	}
	if a.machine() {
		return a.printMessage(got)
	}
	return a.say(fmt.Sprintf("The volume holds all writes, for %s at most: thaw it before.", req.GetTimeout().AsDuration()))
}

func (a *app) thawCmd() *cobra.Command {
	return &cobra.Command{
		Use: "thaw VOLUME", Short: "Let writes to a frozen volume go on",
		Long: `Let writes to a frozen volume go on. It fails where the volume was not frozen
up to now: then what was copied meanwhile may be of different times.`,
		Example: "  crustctl thaw 3f1c9a0b52de",
		Args:    arguments("VOLUME"), ValidArgsFunction: a.completeVolume,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.call(cmd, func(ctx context.Context, c *client) error { return a.thaw(ctx, c, args[0]) })
		},
	}
}

func (a *app) thaw(ctx context.Context, c *client, volume string) error {
	got, err := c.ThawVolume(ctx, &adminv1.ThawVolumeRequest{Volume: volume})
	if err != nil {
		return c.explain(err)
	}
	if a.machine() {
		return a.printMessage(got)
	}
	return a.say("The volume takes writes again; it was frozen up to now.")
}
