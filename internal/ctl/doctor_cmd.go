package ctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/doctor"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// doctorWait is how long doctor waits for the daemon, unless told: a hung one is
// a finding, and the local checks are worth seeing soon.
const doctorWait = 5 * time.Second

func (a *app) doctorCmd() *cobra.Command {
	node := a.world.Node
	var quiet bool
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check this node and say what to do about each finding",
		Long: `Check this node and say what to do about each finding. The local checks run
with the daemon down, too. Run it as root: else some things cannot be looked at.`,
		Example: "  sudo crustctl doctor",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("timeout") {
				a.timeout = doctorWait
			}
			node.AdminSocket, _ = socketPath(a.socket) // checked with the other flags
			daemon := a.askDaemon(cmd)
			if err := placesOf(daemon.Node.GetConfig(), &node, cmd.Flags().Changed); err != nil {
				cmd.PrintErrln("crustctl: looking in the usual places: " + escape(err.Error()))
			}
			report := doctor.Run(cmd.Context(), node, daemon)
			return a.report(report, quiet)
		},
	}
	flags := cmd.Flags()
	flags.BoolVarP(&quiet, "quiet", "q", false, "show only warnings and errors")
	flags.StringVar(&node.RuntimeSocket, "runtime-socket", node.RuntimeSocket, "the daemon's runtime socket")
	flags.StringVar(&node.RunDir, "run-dir", node.RunDir, "the daemon's run directory")
	flags.StringVar(&node.KataDir, "kata-dir", node.KataDir, "Kata's direct-volumes directory")
	flags.StringVar(&node.KubeletRoot, "kubelet-root", node.KubeletRoot, "kubelet's root directory")
	flags.StringVar(&node.ContainerdSocket, "containerd-socket", node.ContainerdSocket, "containerd's socket")
	return cmd
}

// askDaemon gathers what the daemon knows; where it cannot be asked, that is
// the first finding.
func (a *app) askDaemon(cmd *cobra.Command) doctor.Daemon {
	var d doctor.Daemon
	err := a.call(cmd, func(ctx context.Context, c *client) (err error) {
		if d.Node, err = c.GetNode(ctx, &adminv1.GetNodeRequest{}); err != nil {
			return c.explain(err)
		}
		handlers, err := c.ListHandlers(ctx, &adminv1.ListHandlersRequest{})
		if err != nil {
			return c.explain(err)
		}
		d.Handlers = handlers.GetHandlers()
		d.Volumes, err = c.list(ctx, &adminv1.ListVolumesRequest{})
		return err
	})
	if err == nil {
		return d
	}
	var told *explained
	if errors.As(err, &told) {
		return doctor.Daemon{Err: told.err, Advice: told.advice}
	}
	return doctor.Daemon{Err: err, Advice: "See 'systemctl status crust-proxy' and 'journalctl -u crust-proxy'."}
}

func (a *app) report(r doctor.Report, quiet bool) error {
	show := a.findings
	if a.machine() {
		show = a.findingsForPrograms
	}
	if quiet {
		r = withoutOK(r)
	}
	if err := show(r); err != nil {
		return err
	}
	if r.Count(doctor.Error) > 0 {
		return errFindings
	}
	return nil
}

func withoutOK(r doctor.Report) doctor.Report {
	kept := doctor.Report{Findings: []doctor.Finding{}}
	for _, f := range r.Findings {
		if f.Severity != doctor.OK {
			kept.Findings = append(kept.Findings, f)
		}
	}
	return kept
}

func (a *app) findingsForPrograms(r doctor.Report) error {
	raw, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write JSON: %w", err)
	}
	return a.printRaw(raw)
}

func (a *app) findings(r doctor.Report) error {
	for _, f := range r.Findings {
		line := fmt.Sprintf("%s %s %s", a.colour(severityColour(f.Severity), fmt.Sprintf("%-5s", f.Severity)),
			a.colour(faint, fmt.Sprintf("%-17s", f.Check)), escape(f.Seen))
		if f.Do != "" {
			line += fmt.Sprintf("\n%24s%s %s", "", a.colour(bold, "do:"), escape(f.Do))
		}
		if _, err := fmt.Fprintln(a.world.Out, line); err != nil {
			return err
		}
	}
	return a.say(fmt.Sprintf("\n%d ok, %d warnings, %d errors", r.Count(doctor.OK), r.Count(doctor.Warn), r.Count(doctor.Error)))
}

func severityColour(s doctor.Severity) string {
	switch s {
	case doctor.Error:
		return red
	case doctor.Warn:
		return yellow
	default:
		return green
	}
}
