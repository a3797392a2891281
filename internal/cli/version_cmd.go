package cli

import (
	"cmp"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/cli/printer"
	"github.com/crust-proxy/crust-proxy/internal/cli/show"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// versions are those of both sides; the daemon's is empty where it was not asked.
type versions struct {
	Client string `json:"client"`
	Daemon string `json:"daemon,omitempty"`
}

func versionCmd(d *daemon, out *printer.Printer) *cobra.Command {
	var clientOnly bool
	cmd := &cobra.Command{
		Use: "version", Short: "Show the versions of crustctl and of the daemon",
		Example: "  crustctl version --client",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := versions{Client: ownVersion()}
			if clientOnly {
				return v.print(out)
			}
			node, err := ask(cmd.Context(), d, adminv1.AdminClient.GetNode, &adminv1.GetNodeRequest{})
			v.Daemon = node.GetVersion()
			return cmp.Or(v.print(out), err)
		},
	}
	cmd.Flags().BoolVar(&clientOnly, "client", false, "do not ask the daemon")
	return cmd
}

func (v versions) print(out *printer.Printer) error {
	text := "crustctl     " + v.Client
	if v.Daemon != "" {
		text += "\ncrust-proxy  " + show.Escape(v.Daemon)
	}
	return out.Result(v, func() error { return out.Line(text) })
}

// ownVersion is what the Go tool stamped into the program.
func ownVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}
