package ctl

import (
	"context"
	"encoding/json"
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"

	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// versions are those of both sides; the daemon's is empty where it was not asked.
type versions struct {
	Client string `json:"client"`
	Daemon string `json:"daemon,omitempty"`
}

func (a *app) versionCmd() *cobra.Command {
	var clientOnly bool
	cmd := &cobra.Command{
		Use: "version", Short: "Show the versions of crustctl and of the daemon",
		Example: "  crustctl version --client",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versions{Client: ownVersion()}
			if clientOnly {
				return a.versions(v)
			}
			err := a.call(cmd, func(ctx context.Context, c *client) error {
				node, err := c.GetNode(ctx, &adminv1.GetNodeRequest{})
				v.Daemon = node.GetVersion()
				return c.explain(err)
			})
			if shown := a.versions(v); shown != nil {
				return shown
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&clientOnly, "client", false, "do not ask the daemon")
	return cmd
}

func (a *app) versions(v versions) error {
	if a.machine() {
		raw, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("write JSON: %w", err)
		}
		return a.printRaw(raw)
	}
	if err := a.say("crustctl     " + v.Client); err != nil || v.Daemon == "" {
		return err
	}
	return a.say("crust-proxy  " + escape(v.Daemon))
}

// ownVersion is what the Go tool stamped into the program.
func ownVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}
