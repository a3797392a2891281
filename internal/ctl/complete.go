package ctl

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// completionWait bounds how long a press of the tab key may take.
const completionWait = 2 * time.Second

// complete offers fixed words for a flag. It cannot fail: the flag was just made.
func complete(cmd *cobra.Command, flag string, words ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// completeLive offers for a flag what the daemon has of it now.
func (a *app) completeLive(cmd *cobra.Command, flag string, ask func(context.Context, *client) []string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
		return a.offer(cmd, begun, ask), cobra.ShellCompDirectiveNoFileComp
	})
}

func (a *app) completeVolume(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ask := idsOf
	if strings.HasPrefix(begun, "/") {
		ask = targetsOf
	}
	return a.offer(cmd, begun, ask), cobra.ShellCompDirectiveNoFileComp
}

// offer asks the daemon. Without one there is nothing to offer, and a shell has
// no place to say why.
func (a *app) offer(cmd *cobra.Command, begun string, ask func(context.Context, *client) []string) []string {
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionWait)
	defer cancel()
	c, err := newClient(a.socket)
	if err != nil {
		return nil
	}
	defer func() { _ = c.Close() }() // nothing is lost with it
	var offered []string
	for _, word := range ask(ctx, c) {
		// A shell splits the offers at line feeds and shows them: what is not
		// printable is not offered at all.
		if strings.HasPrefix(word, begun) && escape(strings.Replace(word, "\t", "", 1)) == strings.Replace(word, "\t", "", 1) {
			offered = append(offered, word)
		}
	}
	slices.Sort(offered)
	return slices.Compact(offered)
}

func volumesFor(ctx context.Context, c *client, word func(*adminv1.Volume) string) []string {
	volumes, err := c.list(ctx, &adminv1.ListVolumesRequest{})
	if err != nil {
		return nil
	}
	words := make([]string, 0, len(volumes))
	for _, v := range volumes {
		if w := word(v); w != "" {
			words = append(words, w)
		}
	}
	return words
}

func idsOf(ctx context.Context, c *client) []string {
	return volumesFor(ctx, c, func(v *adminv1.Volume) string { return short(v.GetId()) + "\t" + escape(v.GetTargetPath()) })
}

func targetsOf(ctx context.Context, c *client) []string {
	return volumesFor(ctx, c, (*adminv1.Volume).GetTargetPath)
}

// driversOf offers those that volumes have and those that registered with the
// front, which an older daemon cannot tell.
func driversOf(ctx context.Context, c *client) []string {
	names := volumesFor(ctx, c, (*adminv1.Volume).GetDriver)
	got, err := c.ListDrivers(ctx, &adminv1.ListDriversRequest{})
	if err != nil {
		return names
	}
	for _, d := range got.GetDrivers() {
		names = append(names, d.GetName())
	}
	return names
}

func handlersOf(ctx context.Context, c *client) []string {
	got, err := c.ListHandlers(ctx, &adminv1.ListHandlersRequest{})
	if err != nil {
		return nil
	}
	names := make([]string, 0, len(got.GetHandlers()))
	for _, h := range got.GetHandlers() {
		names = append(names, h.GetName())
	}
	return names
}
