package ctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/conformance"
)

func (a *app) conformanceCmd() *cobra.Command {
	opts := conformance.Default()
	cmd := &cobra.Command{
		Use: "conformance --runtime PROGRAM", Short: "Try a runtime handler against the directory ABI",
		Long: `Try a runtime handler that has runc's command line against what
docs/runtime-authors.md demands: on a loop device, a guard mount and a volume of
its own, which are removed in the end. It needs root, and neither a container
runtime nor crust-proxy.`,
		Example: "  sudo crustctl conformance --runtime /usr/bin/crust-runc --fs xfs",
		Args:    arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := opts.Check(); err != nil {
				return wrongUsage(cmd, err)
			}
			return a.conformance(cmd, opts)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&opts.Runtime, "runtime", "", "the handler's program")
	flags.StringArrayVar(&opts.Args, "runtime-arg", nil, "an argument before the handler's command; may be repeated")
	flags.StringVar(&opts.Root, "root", opts.Root, "where the handler looks for the directories of volumes")
	flags.StringVar(&opts.FSType, "fs", opts.FSType, "the volumes' filesystem: ext4, xfs or btrfs")
	flags.StringVar(&opts.Dir, "dir", opts.Dir, "where the node that is played gets its directory")
	flags.StringSliceVar(&opts.Only, "only", nil, "play these scenes alone")
	complete(cmd, "fs", "ext4", "xfs", "btrfs")
	complete(cmd, "only", conformance.SceneNames()...)
	return cmd
}

func (a *app) conformance(cmd *cobra.Command, opts conformance.Options) error {
	program, err := exec.LookPath(opts.Runtime)
	if err == nil {
		opts.Runtime, err = filepath.Abs(program)
	}
	if err != nil {
		return wrongUsage(cmd, fmt.Errorf("--runtime: %w", err))
	}
	ctx := cmd.Context()
	if cmd.Flags().Changed("timeout") {
		var cancel context.CancelFunc
		ctx, cancel = a.deadline(ctx)
		defer cancel()
	}
	var unsaid error
	report, err := conformance.Run(ctx, opts, func(r conformance.Result) {
		if !a.machine() {
			unsaid = errors.Join(unsaid, a.conformanceLine(r))
		}
	})
	switch {
	case errors.Is(err, context.Canceled):
		err = errors.New("interrupted: what was made is removed again")
	case err != nil && errors.Is(ctx.Err(), context.Canceled): // in the words of a program that was ended
		err = fmt.Errorf("interrupted: %w", err)
	case errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("it did not end within --timeout %s: what was made is removed again", a.timeout)
	}
	if err = errors.Join(err, unsaid); err != nil && len(report.Results) == 0 {
		return err
	}
	return errors.Join(err, a.conformanceEnd(report))
}

// conformanceLine is one result for people.
func (a *app) conformanceLine(r conformance.Result) error {
	colours := map[conformance.Status]string{conformance.Pass: green, conformance.Fail: red, conformance.Skip: yellow}
	line := fmt.Sprintf("%s %s %s", a.colour(colours[r.Status], string(r.Status)), a.colour(faint, fmt.Sprintf("%-18s", r.Name)), r.Demand)
	if r.Seen != "" {
		line += fmt.Sprintf("\n%24s%s %s", "", a.colour(bold, "seen:"), escape(r.Seen))
	}
	if r.Status == conformance.Fail {
		line += fmt.Sprintf("\n%24s%s docs/runtime-authors.md, section %s", "", a.colour(bold, "see:"), r.Section)
	}
	return a.say(line)
}

func (a *app) conformanceEnd(report conformance.Report) error {
	failed := report.Count(conformance.Fail)
	if a.machine() {
		raw, err := json.Marshal(report)
		if err != nil {
			return fmt.Errorf("write JSON: %w", err)
		}
		if err := a.printRaw(raw); err != nil {
			return err
		}
	} else {
		text := fmt.Sprintf("\n%d passed, %d failed, %d skipped", report.Count(conformance.Pass), failed, report.Count(conformance.Skip))
		if err := a.say(text); err != nil {
			return err
		}
	}
	if failed > 0 {
		return fmt.Errorf("the handler does not meet %d of %d demands", failed, len(report.Results))
	}
	return nil
}
