package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/internal/tool/top"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// completionWait bounds how long a press of the tab key may take.
const completionWait = 2 * time.Second

// selectors adds the flags that select volumes. Their completion asks the daemon.
func selectors(cmd *cobra.Command, d *daemon, driver, handler *string) {
	cmd.Flags().StringVar(driver, "driver", "", "only volumes of this CSI driver")
	cmd.Flags().StringVar(handler, "handler", "", "only volumes of this runtime handler")
	for flag, words := range map[string]wordsFunc{"driver": driversOf, "handler": handlersOf} {
		_ = cmd.RegisterFlagCompletionFunc(flag, func(cmd *cobra.Command, _ []string, begun string) ([]string, cobra.ShellCompDirective) {
			return d.offer(cmd.Context(), begun, words)
		})
	}
}

func completeVolume(d *daemon) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begun string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return d.offer(cmd.Context(), begun, func(ctx context.Context, c *client) (words []string) {
			volumes, _ := top.ListVolumes(ctx, c, &adminv1.ListVolumesRequest{})
			for _, v := range volumes {
				word := v.GetTargetPath()
				if !strings.HasPrefix(begun, "/") {
					word = show.ShortID(v.GetId()) + "\t" + show.Escape(word)
				}
				words = append(words, word)
			}
			return words
		})
	}
}

type wordsFunc func(context.Context, *client) []string

// offer returns the words with the prefix that the user typed. If the daemon does not answer,
// there are none: a shell cannot show an error.
func (d *daemon) offer(ctx context.Context, begun string, words wordsFunc) ([]string, cobra.ShellCompDirective) {
	var offered []string
	_ = d.within(completionWait).call(ctx, func(ctx context.Context, c *client) error {
		for _, word := range words(ctx, c) {
			// A shell splits the offers at line feeds and prints them: a word with control
			// characters is left out. One tab separates the word from its description.
			untabbed := strings.Replace(word, "\t", "", 1)
			if word != "" && strings.HasPrefix(word, begun) && show.Escape(untabbed) == untabbed {
				offered = append(offered, word)
			}
		}
		return nil
	})
	slices.Sort(offered)
	return slices.Compact(offered), cobra.ShellCompDirectiveNoFileComp
}

// driversOf returns the drivers of volumes and those that registered with the front. An older
// daemon cannot list the latter.
func driversOf(ctx context.Context, c *client) (names []string) {
	volumes, _ := top.ListVolumes(ctx, c, &adminv1.ListVolumesRequest{})
	for _, v := range volumes {
		names = append(names, v.GetDriver())
	}
	drivers, _ := c.ListDrivers(ctx, &adminv1.ListDriversRequest{})
	for _, d := range drivers.GetDrivers() {
		names = append(names, d.GetName())
	}
	return names
}

func handlersOf(ctx context.Context, c *client) (names []string) {
	got, _ := c.ListHandlers(ctx, &adminv1.ListHandlersRequest{})
	for _, h := range got.GetHandlers() {
		names = append(names, h.GetName())
	}
	return names
}
