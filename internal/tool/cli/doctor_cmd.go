package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v4"

	"github.com/crust-proxy/crust-proxy/internal/daemon/config"
	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/command"
	"github.com/crust-proxy/crust-proxy/internal/tool/doctor"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
	"github.com/crust-proxy/crust-proxy/internal/tool/top"
	adminv1 "github.com/crust-proxy/crust-proxy/proto/crust/admin/v1"
)

// doctorWait is how long doctor waits for the daemon by default. It is no minute, because a hung
// daemon is a finding, and the local checks do not need it.
const doctorWait = 15 * time.Second

func doctorCmd(node doctor.Node, d *daemon, out *printer.Printer) *cobra.Command {
	var quiet bool
	var wait time.Duration
	var file string
	cmd := &cobra.Command{
		Use: "doctor", Short: "Check this node and say what to do about each finding",
		Long: `Check this node and say what to do about each finding. The local checks run
with the daemon down, too; without --timeout, doctor waits 15s for the daemon. Run
it as root: else some things cannot be looked at.
--pre makes only the checks that make sense before crust-proxy is installed.`,
		Example: "  sudo crustctl doctor",
		RunE: func(cmd *cobra.Command, _ []string) error {
			timeout := show.Either(cmd.Flags().Changed("timeout"), d.timeout, doctorWait)
			node.AdminSocket, _ = socketPath(d.socket) // checked with the other flags
			report, err := examine(cmd.Context(), d.within(timeout), node, file)
			if errors.Is(err, fs.ErrNotExist) { // the file that --config names
				return err
			}
			for end := time.Now().Add(wait); unfinished(report) && time.Now().Before(end) && sys.Sleep(cmd.Context(), time.Second); {
				report, err = examine(cmd.Context(), d.within(timeout), node, file)
			}
			if err != nil {
				cmd.PrintErrln("crustctl: looking in the usual places: " + show.EscapeLines(err.Error()))
			}
			if err = printReport(out, report, quiet); err == nil && wait > 0 && unfinished(report) {
				return command.ErrFindings
			}
			return err
		},
	}
	flags := cmd.Flags()
	flags.BoolVarP(&quiet, "quiet", "q", false, "leave out what is well")
	flags.BoolVar(&node.Before, "pre", false, "check a node on which crust-proxy is not installed yet")
	flags.DurationVar(&wait, "wait", 0, "repeat the checks until there is no error and nothing is starting, for at most this time")
	flags.StringVar(&file, "config", usualConfig, "the daemon's configuration file, for when the daemon does not answer")
	return cmd
}

func unfinished(r doctor.Report) bool { return r.Count(doctor.Error)+r.Count(doctor.Wait) > 0 }

// examine asks the daemon, unless it is not installed yet, and makes the checks. The error is that of the
// configuration, without which doctor looks in the usual places.
func examine(ctx context.Context, d *daemon, node doctor.Node, file string) (doctor.Report, error) {
	known := doctor.Daemon{Err: errors.New("it was not asked")}
	if !node.Before {
		known = askForDoctor(ctx, d)
	}
	path, err := filepath.Abs(file)
	c, err := configuration(known.Node.GetConfig(), filepath.Join(node.Root, show.Either(err == nil, path, file)))
	if file == usualConfig && errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	node.Configure(c)
	return doctor.Run(ctx, node, known), err
}

// askForDoctor collects what the daemon reports. If it does not answer, that is doctor's first finding.
func askForDoctor(ctx context.Context, d *daemon) (known doctor.Daemon) {
	known.Err = d.call(ctx, func(ctx context.Context, c *client) (err error) {
		if known.Node, err = c.GetNode(ctx, &adminv1.GetNodeRequest{}); err != nil {
			return err
		}
		handlers, err := c.ListHandlers(ctx, &adminv1.ListHandlersRequest{})
		if err != nil {
			return err
		}
		known.Handlers = handlers.GetHandlers()
		drivers, err := c.ListDrivers(ctx, &adminv1.ListDriversRequest{})
		if err != nil {
			return err
		}
		known.Drivers = drivers.GetDrivers()
		known.Volumes, err = top.ListVolumes(ctx, c, &adminv1.ListVolumesRequest{})
		return err
	})
	known.Again = d.volumes
	if e, ok := errors.AsType[*command.Explained](known.Err); ok {
		_, known.Starting = errors.AsType[starting](e.Err)
		known.Err, known.Advice, known.Absent = e.Err, e.Advice, strings.HasPrefix(e.Err.Error(), absent)
	} else if known.Err != nil {
		known.Advice = statusAndLogs(d.service())
	}
	return known
}

func printReport(out *printer.Printer, r doctor.Report, quiet bool) error {
	starting, skipped := r.Count(doctor.Wait), r.Count(doctor.Skip)
	counts := fmt.Sprintf("\n%d ok, %s, %s", r.Count(doctor.OK), show.Count(r.Count(doctor.Warn), "warning"), show.Count(r.Count(doctor.Error), "error")) +
		show.When(starting > 0, fmt.Sprintf(", %d starting", starting)) + show.When(skipped > 0, fmt.Sprintf(", %d skipped", skipped))
	if quiet {
		r.Findings = slices.DeleteFunc(r.Findings, func(f doctor.Finding) bool { return f.Severity == doctor.OK || f.Severity == doctor.Skip })
	}
	err := out.Result(r, func() error {
		colours := map[doctor.Severity]string{doctor.Error: show.Red, doctor.Warn: show.Yellow, doctor.Wait: show.Yellow, doctor.OK: show.Green}
		for _, f := range r.Findings {
			line := fmt.Sprintf("%s %s %s", out.Paint(colours[f.Severity], fmt.Sprintf("%-5s", f.Severity)),
				out.Paint(show.Faint, fmt.Sprintf("%-17s", f.Check)), show.Escape(f.Seen)) + show.When(f.Do != "", out.Field(24, "do:", f.Do)) +
				show.When(f.Severity == doctor.Warn || f.Severity == doctor.Error, out.Field(24, "see:", f.URL))
			if _, err := fmt.Fprintln(out.Out, line); err != nil {
				return err
			}
		}
		return out.Line(counts)
	})
	if err == nil && r.Count(doctor.Error) > 0 {
		return command.ErrFindings
	}
	return err
}

// usualConfig is the daemon's configuration file if its unit does not name another one.
const usualConfig = "/etc/crust-proxy/config.yaml"

// configuration returns the daemon's own, or that of its file where it does not answer. Keys of a newer daemon are
// ignored; a problem leaves the defaults.
func configuration(own, file string) (config.Config, error) {
	c := config.Default()
	if own != "" {
		if err := yaml.Unmarshal([]byte(own), &c); err != nil {
			return config.Default(), fmt.Errorf("the daemon's configuration cannot be read: %w", err)
		}
		return c, nil
	}
	raw, err := os.ReadFile(file) // #nosec G304 -- the operator names it
	if err == nil {
		c, err = config.Parse(raw)
	}
	if err != nil {
		return config.Default(), fmt.Errorf("%s: %w", file, err)
	}
	return c, nil
}
