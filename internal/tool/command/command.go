// Package command is what the command lines of our programs have in common: usage errors,
// exit codes, advice below an error, and completion.
package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/crust-proxy/crust-proxy/internal/ground/sys"
	"github.com/crust-proxy/crust-proxy/internal/tool/printer"
	"github.com/crust-proxy/crust-proxy/internal/tool/show"
)

// The exit codes.
const (
	ExitOK       = 0
	ExitFailure  = 1
	ExitUsage    = 2
	ExitFindings = 3
)

// ErrFindings ends a command whose output has errors of nodes, which are shown already.
var ErrFindings = errors.New("errors were found")

// Run runs one command line of a program, prints its error, and returns the exit code.
func Run(ctx context.Context, root *cobra.Command, args []string) int {
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	switch {
	case err == nil:
		return ExitOK
	case errors.Is(err, ErrFindings):
		return ExitFindings
	}
	root.PrintErrln(root.Name() + ": " + show.EscapeLines(err.Error()))
	if usage, ok := errors.AsType[*usageError](err); ok {
		root.PrintErrf("See '%s --help'.\n", usage.command)
		return ExitUsage
	}
	return ExitFailure
}

// Prepare gives the root of a program, which has its commands already, what all programs have. Commands that
// say nothing of their arguments take none. check, which may be nil, runs before each command.
func Prepare(root *cobra.Command, out *printer.Printer, stderr io.Writer, check func(*cobra.Command) error) {
	root.SetOut(out.Out)
	root.SetErr(stderr)
	root.PersistentFlags().StringVarP(&out.Format, "output", "o", printer.FormatTable, printer.FormatsHelp)
	Complete(root, "output", printer.Formats()...)
	root.PersistentPreRunE = func(cmd *cobra.Command, _ []string) (err error) {
		if check != nil {
			err = check(cmd)
		}
		if err = cmp.Or(err, out.Check()); err != nil {
			return WrongUsage(cmd, err)
		}
		return nil
	}
	root.SilenceErrors, root.SilenceUsage, root.SuggestionsMinimumDistance = true, true, 2
	root.Args, root.Version = noSuchCommand, sys.Version()
	root.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		if cmd == root { // an unknown command is the cause of an unknown flag
			err = cmp.Or(noSuchCommand(cmd, cmd.Flags().Args()), err)
		}
		return WrongUsage(cmd, err)
	})
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	for _, cmd := range root.Commands() {
		if cmd.Args == nil {
			cmd.Args = Arguments()
		}
		switch cmd.Name() { // cobra's own print their help, whatever the arguments are
		case "help":
			cmd.Args = func(_ *cobra.Command, args []string) error {
				found, rest, err := root.Find(args)
				return cmp.Or(err, noSuchCommand(found, rest))
			}
		case "completion":
			cmd.Args = Arguments("SHELL")
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				return WrongUsage(cmd, fmt.Errorf("there is no completion for %q", args[0]))
			}
			for _, shell := range cmd.Commands() {
				shell.Args = Arguments()
			}
		}
	}
}

// Complete completes a flag with fixed words. It cannot fail, because the flag exists.
func Complete(cmd *cobra.Command, flag string, words ...string) {
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp))
}

// UnicodeLocale reports whether the locale uses UTF-8.
func UnicodeLocale(getenv func(string) string) bool {
	value := cmp.Or(getenv("LC_ALL"), getenv("LC_CTYPE"), getenv("LANG"))
	return strings.Contains(strings.ToLower(strings.ReplaceAll(value, "-", "")), "utf8")
}
